"""Messages that are kept until their hosts have them, and sent again where they may have been lost."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from threading import RLock
from typing import Any

from monarch._core.causes import HostLost
from monarch._node.spreads.gateway_like import GatewayLike
from monarch._node.spreads.outgoing import BULK, ToMany
from monarch._procs.session_folder import host_of
from monarch._wire import messages as m
from monarch._wire.tcp import LEASE_S

_LOOK = 1.0
"""Seconds between checks for messages that have not arrived."""
_PATIENCE = 0.5
"""Part of a lease in which a message arrives by way of another host, or this process connects to its host. Hosts say
within about 1 s what they have."""
SLOW = 4 << 20
"""Bytes in a second that arrive at least: large messages have more time."""
_APART, _APART_LONGEST = 10.0, 640.0
"""Seconds for which a host gets its messages from this process, after one did not arrive by way of another host; each
time in a row twice as long."""


class Arrivals:
    """Keeps messages until their hosts have them, and sends again what may have been lost on the way.

    Args:
        proc: id of this process.
        gateways: the connections, by host.
    """

    def __init__(self, proc: str, gateways: Mapping[str, GatewayLike]) -> None:
        self.proc = proc
        self._gateways = gateways
        # Guards the order of sending, all of the below, what Spreads adds, and the numbers of gateways.
        self._lock = RLock()
        self._kept: deque[ToMany] = deque()
        """Messages that some of their hosts may not have."""
        self.by_relay: dict[str, set[str]] = {}
        """The hosts that have got messages by way of each host."""
        self._keeping: dict[str, GatewayLike] = {}
        """By host, connections of which messages are kept that were for that host alone."""
        self._apart: dict[str, tuple[float, float]] = {}
        """By host, until when it gets its messages from this process, and for how many seconds in all."""
        self._waits = False
        self.later: Callable[[float, Callable[[], None]], object] = lambda _, __: None
        """Runs a function in the receiving thread after some seconds. Set once, before ``least``."""
        self.connect: Callable[[str], Any] = lambda host: None
        """Returns another connection to a host. Set once, before ``least``."""
        self.on_late: Callable[[GatewayLike], None] = lambda gateway: None
        """Called in the receiving thread with a host that has no connection, and has not got a message in time. Set
        once, before ``least``."""
        self.lease = LEASE_S
        self.breaks = 0
        """How often a connection between hosts broke. Leader only writes."""

    def keep(self, many: ToMany) -> None:
        """Keep a message until its hosts have it; with the lock held."""
        while self._kept and self._kept[0].has_arrived():
            self._kept.popleft()
        self._kept.append(many)
        self._look_later()

    def keep_one(self, gateway: GatewayLike) -> None:
        """Look whether what is kept for a host arrives; with the lock held."""
        self._keeping[gateway.host] = gateway
        self._look_later()

    def _look_later(self) -> None:
        if not self._waits:
            self._waits = True
            self.later(_LOOK, self._look)

    def spare(self, gateway: GatewayLike) -> Any:
        """Return a connection for large messages to a host that has none else, until they have arrived; with the lock
        held."""
        if gateway.spare is None:
            try:
                gateway.spare = self.connect(gateway.host)
            except Exception:
                # Too many open files, or the host is about to count as lost: by its parent, as other messages.
                return gateway.link
        return gateway.spare

    def _trim(self, gateway: GatewayLike) -> None:
        kept = gateway.kept
        while kept and kept[0].number <= gateway.arrived:
            kept.popleft()
        if not kept:
            self._keeping.pop(gateway.host, None)
            if gateway.spare is not None:
                gateway.spare.close(int(self.lease * 1000))
                gateway.spare = None

    # In the receiving thread

    def received(self, received: m.Received, _: object) -> None:
        """Note what a host has."""
        gateway = self._gateways.get(host_of(received.src))
        if gateway is not None:
            with self._lock:
                gateway.arrived = max(gateway.arrived, received.number)
                if gateway.kept:
                    self._trim(gateway)

    def heard(self, hosts: Sequence[tuple[str, int, int]]) -> None:
        """Note that answers have arrived, as in Folded; the next message to each host says so."""
        gateways = self._gateways
        with self._lock:
            for host, number, received in hosts:
                gateway = gateways.get(host)
                if gateway is None:
                    continue
                if number:
                    gateway.heard.append(number)
                if received > gateway.arrived:
                    gateway.arrived = received
                    if gateway.kept:
                        self._trim(gateway)

    def lost(self, host: str) -> None:
        """Send what a lost host may not have forwarded, and make others send what it has not forwarded to here."""
        with self._lock:
            for many in list(self._kept):
                for place in range(len(many.far)):
                    if many.plan.fan or many.plan.relay(place) == host:
                        many.send_straight(self, place)
            dead = m.encode(m.Dead(f"{host}/agent", HostLost(host), False, []))
            for other in self.by_relay.pop(host, set()):
                gateway = self._gateways.get(other)
                if gateway is not None:
                    gateway.relay = ""
                    if other != host and not gateway.closed.is_set():
                        gateway.link.send(dead)

    def parted(self, hosts: Sequence[str]) -> None:
        """Two hosts do not reach one another: send what may have been lost between them."""
        with self._lock:
            for many in list(self._kept):
                for place, (gateway, _) in enumerate(many.far):
                    if gateway.host in hosts:
                        self._send_apart(many, place)

    def _look(self) -> None:
        with self._lock:
            while self._kept and self._kept[0].has_arrived():
                self._kept.popleft()
            now = time.monotonic()
            late = now - self.lease
            lagging = self._lagging(now)
            for many in list(self._kept):
                if many.begun < late and not many.again:
                    many.again = True
                    for place, (gateway, _) in enumerate(many.far):
                        if gateway.parent is None:
                            self._send_apart(many, place)
                        elif gateway.arrived < many.numbers[place] and not gateway.closed.is_set():
                            lagging.append(gateway)
            self._waits = bool(self._kept or self._keeping)
            if self._waits:
                self.later(_LOOK, self._look)
        for gateway in {each.host: each for each in lagging}.values():
            self.on_late(gateway)

    def _lagging(self, now: float) -> list[GatewayLike]:
        """Return the hosts without a connection that have not got a message in time."""
        lagging: list[GatewayLike] = []
        for gateway in list(self._keeping.values()):
            if gateway.closed.is_set():
                gateway.kept.clear()
            self._trim(gateway)
            if gateway.kept and gateway.parent is not None:
                patience = self.lease * _PATIENCE + sum(one.size for one in gateway.kept) / SLOW
                if gateway.kept[0].begun < now - patience:
                    lagging.append(gateway)
        return lagging

    # Urgent messages; see hurrying.py

    def newest(self, gateways: Sequence[GatewayLike]) -> list[tuple[GatewayLike, int]]:
        """Return connections with the number of the last message by each; from any thread."""
        with self._lock:
            return [(gateway, gateway.last) for gateway in gateways]

    def may_take(self, gateway: GatewayLike, number: int) -> float | None:
        """Return when a host has the messages up to a number at the latest if large ones are on their way, in
        monotonic seconds; 0 if none are, None if it has all."""
        with self._lock:
            if gateway.arrived >= number or gateway.closed.is_set():
                return None
            large = [(one.begun, one.size) for one in gateway.kept if one.size >= BULK]
            for many in self._kept:
                gateways = many.plan.gateways
                on_way = many.plan.fan and gateway in gateways
                if on_way and many.numbers[gateways.index(gateway)] > gateway.arrived:
                    large.append((many.begun, sum(map(len, many.frames))))
            return min(begun for begun, _ in large) + sum(size for _, size in large) / SLOW if large else 0.0

    def avoid_way(self, gateway: GatewayLike) -> None:
        """Let a host get its messages from this process for a while, and first those that it may not have."""
        if gateway.parent is not None:
            self.on_late(gateway)
            return
        with self._lock:
            for many in list(self._kept):
                for place, (each, _) in enumerate(many.far):
                    if each is gateway and many.plan.relay(place) != gateway.host:
                        self._send_apart(many, place)

    def _send_apart(self, many: ToMany, place: int) -> None:
        gateway = many.far[place][0]
        if gateway.arrived >= many.numbers[place] or place in many.straight:
            return
        many.send_straight(self, place)
        # It may itself be what hangs, and is then no way for others when the time is over.
        gateway.due = gateway.last
        now = time.monotonic()
        until, seconds = self._apart.get(gateway.host, (-_APART_LONGEST, _APART / 2))
        if until <= now:
            seconds = min(2 * seconds, _APART_LONGEST) if now < until + seconds else _APART
            until = now + seconds
            self._apart[gateway.host] = until, seconds
        gateway.settled = max(gateway.settled, until)
