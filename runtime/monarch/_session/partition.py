"""Partitions: if two hosts lose each other while the program reaches both, one of them counts as lost, unless no
message between their ranks was on its way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from monarch._core.causes import Cause, HostsParted
from monarch._node.node import Node
from monarch._wire.messages import Parted


class Partitions:
    """Handles broken connections between hosts by giving up one of the two hosts.

    Messages between their ranks may be lost, so the ranks stay dead to each other. The loss of a whole host is noticed
    by the program itself, within the silence timeout.

    Args:
        node: the node of this program.
        host_lost: called with the host to give up, in the receiving thread.
        parted: called with two hosts that have lost each other, in the receiving thread; returns whether one relayed
            the other, which gets what may have been lost.
    """

    def __init__(self, node: Node, host_lost: Callable[[str, Cause], None], parted: Callable[[str, str], bool]) -> None:
        self._node = node
        self._host_lost = host_lost
        self._tell_parted = parted
        node.dispatch.handle(Parted, self._parted)

    def _parted(self, parted: Parted, _: Sequence[Any]) -> None:
        relayed = self._tell_parted(parted.host, parted.other)
        # Messages on their way by a lost host have been sent again.
        self._node.hosts.spreads.breaks += 1
        if not relayed and parted.other in (self._node.host, *self._node.hosts.known):
            self._node.hosts.spreads.parted([parted.host, parted.other])
        if parted.harmless:
            return
        self._node.receive_loop.call_later(
            self._node.hosts.lease + 1.0, partial(self._decide, parted.host, parted.other)
        )

    def _decide(self, one: str, other: str) -> None:
        node = self._node
        if node.closed or any(host not in (node.host, *node.hosts.known) for host in (one, other)):
            return
        # The same one, whoever reports first, and never the program's own.
        lost = max(host for host in (one, other) if host != node.host)
        kept = one if lost == other else other
        self._host_lost(lost, HostsParted(lost, kept))
