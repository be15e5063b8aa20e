"""Signals that host agents deliver: a cell begins after their delivery, so that no old signal hits it.

A signal takes another path than a cell, through the agent and the OS, and does not say which cell it is for.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from monarch._kernel_api import ServiceAnswers, current_node, host_of, send_signal, states

_PATIENCE = 5.0
"""Seconds that a cell waits for a silent agent."""


class Delivery:
    """Signals in transit; made by the thread that runs cells, answered in the receiving thread."""

    def __init__(self, procs: Collection[str], number: int) -> None:
        node = current_node()
        send_signal(node, procs, number)
        self.hosts = {host_of(proc) for proc in procs}
        """Hosts whose agents have not confirmed delivery. The receiving thread removes them."""
        self.thread: Any = None
        """See Waiter."""
        # Agents handle messages in order.
        self._answers = [ServiceAnswers(node, [f"{host}/agent"], states(), self._heard) for host in list(self.hosts)]

    @property
    def done(self) -> bool:
        """Whether all signals were delivered."""
        return not self.hosts

    def _heard(self, agent: str, _: Any) -> None:
        self.hosts.discard(host_of(agent))
        current_node().receive_loop.notify(self)

    def wait(self) -> bool:
        """Wait for the delivery, with a bound; return whether all were delivered or their host is lost."""
        node = current_node()
        self.hosts -= {host for host in list(self.hosts) if host in node.hosts.lost}
        delivered = node.receive_loop.wait(self, _PATIENCE)
        for each in self._answers:
            each.close()
        return delivered


_under_way: list[Delivery] = []
"""Appended to by the threads that stop cells, emptied by the thread that runs cells, in atomic steps."""


def deliver(procs: Collection[str], number: int) -> None:
    """Send a signal to processes."""
    _under_way.append(Delivery(procs, number))


def await_delivery() -> list[str]:
    """Wait for signals in transit; return the hosts whose agents do not confirm delivery."""
    late: set[str] = set()
    while _under_way:
        each = _under_way[0]
        # It stays for the next cell if a Stop ends this wait.
        if not each.wait():
            late |= each.hosts
        _under_way.remove(each)
    return sorted(late)
