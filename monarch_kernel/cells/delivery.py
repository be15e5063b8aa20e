"""Signals that host agents deliver: a cell begins when they say that they have, so that none of the last cell hits it.

A signal takes another way than a cell, by the agent and the kernel of the system, and no signal says what it is for.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from monarch._kernel_api import Answers, current_node, host_of, send_signal, states

_PATIENCE = 5.0
"""Seconds for which a cell waits at most for an agent that says nothing."""


class Delivery:
    """Signals on their way; made by the thread that runs cells, answered in the one that receives."""

    def __init__(self, procs: Collection[str], number: int) -> None:
        node = current_node()
        send_signal(node, procs, number)
        self.hosts = {host_of(proc) for proc in procs}
        """Those that have not said that they have sent them on. The receiving thread takes away."""
        self.thread: Any = None
        """As a Waiter has it."""
        # Agents handle messages in the order in which they come.
        self._answers = [Answers(node, [f"{host}/agent"], states(), self._heard) for host in list(self.hosts)]

    @property
    def done(self) -> bool:
        """Whether all were sent on."""
        return not self.hosts

    def _heard(self, agent: str, _: Any) -> None:
        self.hosts.discard(host_of(agent))
        current_node().receive_loop.notify(self)

    def wait(self) -> bool:
        """Waits until they were sent on, for some seconds at most; whether they were, or their host is lost."""
        node = current_node()
        self.hosts -= {host for host in list(self.hosts) if host in node.hosts.lost}
        delivered = node.receive_loop.wait(self, _PATIENCE)
        for each in self._answers:
            each.close()
        return delivered


_under_way: list[Delivery] = []
"""Appended to by the threads that stop cells, emptied by the one that runs them, in single steps."""


def deliver(procs: Collection[str], number: int) -> None:
    """Has a signal sent to some processes."""
    _under_way.append(Delivery(procs, number))


def await_delivery() -> list[str]:
    """Waits for the signals that are under way; the hosts whose agents do not say that they were sent on."""
    deliveries: list[Delivery] = []
    while _under_way:
        deliveries.append(_under_way.pop(0))
    return sorted({host for each in deliveries if not each.wait() for host in each.hosts})
