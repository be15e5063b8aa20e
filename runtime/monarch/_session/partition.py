"""Hosts that have lost each other while the program has both: then one of them counts as lost, for everybody."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from monarch._core.causes import Cause, HostsParted
from monarch._node.node import Node
from monarch._wire.messages import Parted


class Partitions:
    """Hears of connections between hosts that broke, and gives up one of the two hosts.

    What was on its way between their ranks may be gone, so their ranks are dead to each other, for good. If a host was
    lost as a whole, the program notices by itself within the time that a host may be silent.

    Args:
        node: of this program.
        host_lost: told of the host that is given up, in the receiving thread.
    """

    def __init__(self, node: Node, host_lost: Callable[[str, Cause], None]) -> None:
        self._node = node
        self._host_lost = host_lost
        node.dispatch.handle(Parted, self._parted)

    def _parted(self, parted: Parted, _: Sequence[Any]) -> None:
        self._node.receive_loop.call_later(
            self._node.hosts.lease + 1.0, partial(self._decide, parted.host, parted.other)
        )

    def _decide(self, one: str, other: str) -> None:
        node = self._node
        if node.closed or any(host not in (node.host, *node.hosts.known) for host in (one, other)):
            return
        # The same one, whoever has said it first; and never the program's own.
        lost = max(host for host in (one, other) if host != node.host)
        kept = one if lost == other else other
        self._host_lost(lost, HostsParted(lost, kept))
