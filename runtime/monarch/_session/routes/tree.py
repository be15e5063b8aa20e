"""With many hosts, the program has connections to a few, and these relay the others.

A relayed host lives while the connection to its parent lasts. If that breaks, or the parent is lost, the program
connects to it again before anybody is declared dead.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import zmq

from monarch._core.causes import HostLost
from monarch._node.node import Node
from monarch._node.peers.gateway import Gateway, RelayedLink
from monarch._wire import messages as m

_APART, _APART_LONGEST = 10.0, 640.0
"""Seconds for which a host is not relayed again by one that it could not be reached by; each time in a row twice as
long."""
_AGAIN = 0.5
"""Seconds until a connection is tried again for which there was no descriptor."""
_ENDING_S = 5.0
"""Seconds for the news to a host that it counts as lost."""


class Tree:
    """Which hosts relay which. For the receiving thread.

    Args:
        node: the node of this program.
        watch: watches the connection to a host.
        unwatch: watches it no more.
        straightened: called with a host to which there is a connection again.
        again: called when a host may be relayed again.
    """

    def __init__(
        self,
        node: Node,
        watch: Callable[[str], None],
        unwatch: Callable[[str], None],
        straightened: Callable[[Gateway], None],
        again: Callable[[], None],
    ) -> None:
        self._node = node
        self._watch = watch
        self._unwatch = unwatch
        self._straightened = straightened
        self._again = again
        self.parents: dict[str, str] = {}
        """By relayed host, its parent."""
        self._barred: dict[tuple[str, str], tuple[float, float]] = {}
        """Pairs of a host and a parent, until when it is not relayed there, and for how many seconds in all."""
        self._former: dict[str, tuple[str, str]] = {}
        """Hosts that count as lost, with address and key: one that was only stopped asks for a connection."""
        self._refused: dict[str, float] = {}
        """When they were last told so."""
        node.hosts.spreads.on_late = lambda gateway: self.detour(gateway.host)

    def may_relay(self, host: str, parent: str) -> bool:
        """Return whether another host may relay one: not if that is a bad way to it."""
        until, _ = self._barred.get((host, parent), (0.0, 0.0))
        return until <= time.monotonic()

    def relay(self, gateway: Gateway, parent: Gateway) -> None:
        """Close the connection to a host, which has said that another one relays it."""
        self.parents[gateway.host] = parent.host
        self._unwatch(gateway.host)
        self._node.hosts.spreads.relay(gateway, RelayedLink(gateway.host, parent))

    def straighten(self, host: str) -> None:
        """Connect to a relayed host. If that fails, it counts as lost."""
        hosts = self._node.hosts
        gateway = hosts.gateways.get(host)
        if host in self.parents and gateway is not None and host in hosts.known:
            try:
                link = hosts.connect(host, hurries=True)
            except (OSError, zmq.ZMQError):
                # Too many open files, for now.
                self._node.receive_loop.call_later(_AGAIN, lambda: self.straighten(host))
                return
            del self.parents[host]
            hosts.spreads.straighten(gateway, link)
            self._watch(host)
            self._straightened(gateway)

    def detour(self, host: str) -> None:
        """Connect to a host that could not be reached by its parent."""
        parent = self.parents.get(host, "")
        if parent:
            self.bar(host, parent)
            self.straighten(host)

    def bar(self, host: str, parent: str) -> None:
        """Keep a host from connecting through another one for a while, and from getting messages through it."""
        now = time.monotonic()
        until, seconds = self._barred.get((host, parent), (-_APART_LONGEST, _APART / 2))
        if until > now:
            return
        seconds = min(2 * seconds, _APART_LONGEST) if now < until + seconds else _APART
        self._barred[host, parent] = now + seconds, seconds
        gateway = self._node.hosts.gateways.get(host)
        if gateway is not None:
            self._node.hosts.spreads.set_apart(gateway, seconds)
        gateway = self._node.hosts.gateways.get(parent)
        if gateway is not None:
            # Not before it does something again, even if that takes longer.
            self._node.hosts.spreads.prove(gateway)
        self._node.receive_loop.call_later(seconds, self._again)

    def parted(self, one: str, other: str) -> bool:
        """Connect to a host that has lost the connection to its parent, or that its parent has lost.

        Returns:
            Whether one of the two relays the other, or did until just now.
        """
        self.refuse(one)
        for host, parent in ((one, other), (other, one)):
            if self.parents.get(host) == parent:
                self.detour(host)
        return not (self.may_relay(one, other) and self.may_relay(other, one))

    def lost(self, host: str) -> None:
        """Connect to the hosts that a lost one relays, and tell that one, if it is relayed and alive after all."""
        for child, parent in list(self.parents.items()):
            if parent == host:
                self.straighten(child)
        for child, parent in list(self._barred):
            gateway = self._node.hosts.gateways.get(child)
            if parent == host and gateway is not None:
                del self._barred[child, parent]
                self._node.hosts.spreads.set_apart(gateway, 0.0)
        known = self._node.hosts.known.get(host)
        if known is not None and self._node.hosts.spreads.least:
            self._former[host] = known
        gateway = self._node.hosts.gateways.get(host)
        if self.parents.pop(host, "") and gateway is not None:
            gateway.link.send(self._farewell(host))

    def refuse(self, host: str) -> None:
        """Tell a host that counts as lost so, as it lives and sends messages."""
        hosts, now = self._node.hosts, time.monotonic()
        if host in hosts.known or host not in self._former or hosts.keys is None:
            return
        if now < self._refused.get(host, -_ENDING_S) + _ENDING_S:
            return
        self._refused[host] = now
        try:
            link = hosts.connect_to(host, self._former[host])
        except (OSError, zmq.ZMQError):
            # Too many open files, for now: it asks again.
            del self._refused[host]
            return
        link.send(self._farewell(host))
        link.close(int(_ENDING_S * 1000))

    def _farewell(self, host: str) -> bytes:
        return m.encode(m.Dead(self._node.proc, HostLost(host), False, []))

    def forget(self, host: str) -> None:
        """Forget a host that is attached by a new connection."""
        self.parents.pop(host, None)
        self._former.pop(host, None)
        self._refused.pop(host, None)
