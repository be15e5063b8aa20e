"""Messages to many hosts that go from agent to agent, so that this process sends few of them itself.

Messages to one host then come by different ways. So all of them have numbers, the agent of the host handles them in
that order, and each once: what may have been lost with an agent on its way is sent again, straight to its host.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from threading import Event, RLock
from typing import Any, Protocol

from monarch._core.causes import HostLost
from monarch._procs.session_folder import host_of
from monarch._wire import messages as m
from monarch._wire.tcp import LEASE_S

BULK = 1 << 20
"""Bytes from which a message goes to one host, and from there to the others."""
_FAN = 2
"""The number of hosts that each host passes such a message on to."""
_SETTLED = 0.5
"""Seconds after its first number until a host gets messages by way of others."""
_LOOK = 1.0
"""Seconds between checks for messages that have not arrived."""
_WAYS = 8
"""Ways that are kept."""
_ENTRIES = 8
"""The most hosts at which large messages begin their way, in turn: each way is a set of connections among hosts."""
_APART = 60.0
"""Seconds for which a host gets its messages from this process, after one did not arrive by way of another host."""


class Link(Protocol):
    """The socket of a connection."""

    def send(self, frame: bytes, more: Sequence[Any] = (), /) -> None: ...


class Gateway(Protocol):
    """A connection to another host; see ``monarch._node.peers``."""

    host: str
    settled: float
    last: int
    arrived: int
    heard: list[int]
    relay: str
    group: int
    spreads: Spreads | None
    closed: Event

    @property
    def link(self) -> Link: ...
    def cast(self, src: str, procs: list[str], port: int, frames: Sequence[Any]) -> None: ...


Far = Sequence[tuple[Gateway, list[str]]]
"""The receivers of a message on other hosts."""


def _group_of(receiver: tuple[Gateway, list[str]]) -> int:
    return receiver[0].group


def is_settled(gateway: Gateway) -> bool:
    """Return whether a host may get messages by way of others, and pass them on."""
    return bool(gateway.arrived) and gateway.settled < time.monotonic() and not gateway.closed.is_set()


class _One:
    """A message to one host."""

    __slots__ = ("frames", "gateway", "number")

    def __init__(self, gateway: Gateway, frames: Sequence[Any]) -> None:
        self.gateway = gateway
        self.frames = frames
        self.number = 0

    def send(self, spreads: Spreads) -> None:
        gateway = self.gateway
        if not self.number:
            # Both assignments or none, as no handler of a signal runs in between.
            self.number = gateway.last = gateway.last + 1
        gateway.link.send(m.encode(m.Ordered(spreads.proc, self.number, len(self.frames))), self.frames)


class _Way:
    """The receivers of a message, in parts of which each is sent to its first host."""

    __slots__ = ("ends", "fan", "far", "gateways", "packed")

    def __init__(self, far: Far, ends: list[int], fan: int) -> None:
        self.far = far
        self.gateways = [gateway for gateway, _ in far]
        self.ends = ends
        """Where the parts begin and end."""
        self.fan = fan
        """As in Spread."""
        hosts = [(gateway.host, procs) for gateway, procs in far]
        self.packed = [m.pack(hosts[begin:end]) for begin, end in pairwise(ends)]
        """The hosts of each part, as in Spread."""

    def relay(self, place: int) -> str:
        """Return the host by way of which a host gets the message."""
        return self.gateways[self.ends[bisect_right(self.ends, place) - 1]].host


class _Many:
    """A message to many hosts. Sending it can be interrupted, and begun again."""

    __slots__ = ("again", "arrived", "begun", "far", "frames", "numbers", "port", "way")

    def __init__(self, way: _Way, port: int, frames: Sequence[Any]) -> None:
        self.way = way
        self.far = way.far
        self.port = port
        self.frames = frames
        self.numbers = [0] * len(way.far)
        self.arrived = 0
        """How many hosts, from the first, are known to have it."""
        self.begun = 0.0
        self.again = False
        """Whether it was sent again because hosts did not have it in time."""

    def send(self, spreads: Spreads) -> None:
        way, numbers = self.way, self.numbers
        gateways = way.gateways
        for place, gateway in enumerate(gateways):
            if not numbers[place]:
                numbers[place] = gateway.last = gateway.last + 1
        if not self.begun:
            self.begun = time.monotonic()
            spreads.keep(self)
        for (begin, end), packed in zip(pairwise(way.ends), way.packed, strict=True):
            part = gateways[begin:end]
            relay = part[0].host
            heard: list[tuple[int, list[int]]] = []
            for place, gateway in enumerate(part):
                if gateway.heard:
                    heard.append((place, gateway.heard))
                    gateway.heard = []
                if gateway.relay != relay:
                    gateway.relay = relay
                    spreads.by_relay.setdefault(relay, set()).add(gateway.host)
            head = m.Spread(spreads.proc, self.port, "", way.fan, packed, numbers[begin:end], heard, len(self.frames))
            part[0].link.send(m.encode(head), self.frames)

    def send_straight(self, spreads: Spreads, place: int) -> None:
        """Send it to one of its hosts once more, unless that is known to have it."""
        gateway, procs = self.far[place]
        number = self.numbers[place]
        if number > gateway.arrived and not gateway.closed.is_set():
            cast = m.encode(m.Cast(spreads.proc, procs, self.port, len(self.frames)))
            gateway.link.send(m.encode(m.Ordered(spreads.proc, number, len(self.frames) + 1)), [cast, *self.frames])

    def has_arrived(self) -> bool:
        """Return whether all hosts that are left have it."""
        far, numbers = self.far, self.numbers
        while self.arrived < len(far):
            gateway = far[self.arrived][0]
            if gateway.arrived < numbers[self.arrived] and not gateway.closed.is_set():
                return False
            self.arrived += 1
        return True


class Spreads:
    """Sends messages to the hosts that have numbers.

    Args:
        proc: id of this process.
        gateways: the connections, by host.
    """

    def __init__(self, proc: str, gateways: Mapping[str, Gateway]) -> None:
        self.proc = proc
        self.least = 0
        """The number of hosts from which on messages go from host to host; 0 if they never do. Set once."""
        self._gateways = gateways
        # Guards the order of sending, all of the below, and the numbers of gateways.
        self._lock = RLock()
        self._queue: deque[_One | _Many] = deque()
        """Messages that are being sent. Any thread appends; a signal handler or a __del__ may do so in the middle."""
        self._kept: deque[_Many] = deque()
        """Messages that some of their hosts may not have."""
        self.by_relay: dict[str, set[str]] = {}
        """The hosts that have got messages by way of each host."""
        self._ways: list[tuple[Far, _Way]] = []
        """Ways to the receivers of recent messages, the newest first: making one takes time for each process."""
        self._grouped: Sequence[Gateway] = ()
        """The hosts that have groups."""
        self._next_entry = 0
        self._waits = False
        self.later: Callable[[float, Callable[[], None]], object] = lambda _, __: None
        """Runs a function in the receiving thread after some seconds. Set once, before ``least``."""
        self.lease = LEASE_S

    def group(self, gateways: Sequence[Gateway]) -> None:
        """Let messages to these hosts go by way of one another, in about as many groups as there are hosts in each.

        The groups stay, whichever hosts a message is for: a host connects to those of its group only.
        """
        size = math.isqrt(max(0, len(gateways) - 1)) + 1
        with self._lock:
            self._ways.clear()
            self._grouped = gateways
        for place, gateway in enumerate(gateways):
            gateway.group = place // size
            self.number(gateway)

    def groups(self) -> list[list[Gateway]]:
        """Return the hosts that are left of each group, in order."""
        groups: dict[int, list[Gateway]] = {}
        for gateway in self._grouped:
            if not gateway.closed.is_set():
                groups.setdefault(gateway.group, []).append(gateway)
        return list(groups.values())

    def number(self, gateway: Gateway) -> None:
        """Give numbers to all messages of a connection from now on; the next one goes straight."""
        if gateway.spreads is None:
            gateway.settled = time.monotonic() + _SETTLED
            gateway.spreads = self

    def send(self, gateway: Gateway, frames: Sequence[Any]) -> None:
        """Send a message straight to a host, after those that were sent before it."""
        self._queue.append(_One(gateway, frames))
        self._flush()

    def cast(self, far: Far, port: int, frames: Sequence[Any]) -> None:
        """Send one message to procs of many hosts."""
        fit = [each for each in far if is_settled(each[0])]
        bulk = sum(map(len, frames)) >= BULK
        if len(fit) < (2 if bulk else max(2, self.least)):
            fit = []
        if bulk and fit:
            turned = self._turned(fit)
            self._queue.append(_Many(_Way(turned, [0, len(turned)], _FAN), port, frames))
        elif fit:
            with self._lock:
                way = self._way(far, fit)
            self._queue.append(_Many(way, port, frames))
        if len(fit) < len(far):
            chosen = {id(gateway) for gateway, _ in fit}
            for gateway, procs in far:
                if id(gateway) not in chosen:
                    cast = m.encode(m.Cast(self.proc, procs, port, len(frames)))
                    if gateway.spreads is None:
                        gateway.link.send(cast, frames)
                    else:
                        self._queue.append(_One(gateway, [cast, *frames]))
        self._flush()

    def pass_on(self, far: Far, frame: bytes) -> None:
        """Send a large message to procs of some hosts, in any order with others: once from here, by way of them.

        Nothing is kept. The sender sends it again if a host is lost.
        """
        if len(far) < 2:
            for gateway, procs in far:
                gateway.cast(self.proc, procs, 0, [frame])
            return
        far = self._turned(far)
        hosts = m.pack([(gateway.host, procs) for gateway, procs in far])
        far[0][0].link.send(m.encode(m.Spread(self.proc, 0, "", _FAN, hosts, [0] * len(far), [], 1)), [frame])

    def _way(self, far: Far, fit: list[tuple[Gateway, list[str]]]) -> _Way:
        """Return the way of a message to hosts, those of ``far`` that are fit; that to all of them is kept."""
        for place, (known, way) in enumerate(self._ways):
            if known is far and len(way.far) == len(fit):
                if place:
                    self._ways.insert(0, self._ways.pop(place))
                return way
        ordered = sorted(fit, key=_group_of)
        ends = [place for place in range(1, len(fit)) if ordered[place][0].group != ordered[place - 1][0].group]
        way = _Way(ordered, [0, *ends, len(fit)], 0)
        if len(fit) == len(far):
            self._ways.insert(0, (far, way))
            del self._ways[_WAYS:]
        return way

    def _turned(self, far: Far) -> list[tuple[Gateway, list[str]]]:
        """Return the receivers of a large message, so that it begins its way at other hosts than the one before."""
        self._next_entry += 1
        at = len(far) * (self._next_entry % min(len(far), _ENTRIES)) // min(len(far), _ENTRIES)
        return [*far[at:], *far[:at]]

    def _flush(self) -> None:
        with self._lock:
            while self._queue:
                first = self._queue[0]
                try:
                    first.send(self)
                except Exception:
                    self._done(first)
                    raise
                self._done(first)

    def _done(self, first: _One | _Many) -> None:
        # Code that ran in the middle may have sent it already.
        if self._queue and self._queue[0] is first:
            self._queue.popleft()

    def keep(self, many: _Many) -> None:
        """Keep a message until its hosts have it; with the lock held."""
        while self._kept and self._kept[0].has_arrived():
            self._kept.popleft()
        self._kept.append(many)
        if not self._waits:
            self._waits = True
            self.later(_LOOK, self._look)

    # In the receiving thread

    def received(self, received: m.Received, _: object) -> None:
        """Note what a host has."""
        gateway = self._gateways.get(host_of(received.src))
        if gateway is not None:
            gateway.arrived = max(gateway.arrived, received.number)

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

    def lost(self, host: str) -> None:
        """Send what a lost host may not have passed on, and let others send what it has not passed on to here."""
        with self._lock:
            for many in list(self._kept):
                for place in range(len(many.far)):
                    if many.way.fan or many.way.relay(place) == host:
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
            late = time.monotonic() - self.lease
            for many in list(self._kept):
                if many.begun < late and not many.again:
                    many.again = True
                    for place in range(len(many.far)):
                        self._send_apart(many, place)
            self._waits = bool(self._kept)
            if self._waits:
                self.later(_LOOK, self._look)

    def _send_apart(self, many: _Many, place: int) -> None:
        gateway = many.far[place][0]
        if gateway.arrived < many.numbers[place]:
            gateway.settled = time.monotonic() + _APART
            many.send_straight(self, place)
