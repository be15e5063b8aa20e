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
_PATIENCE = 0.5
"""Part of a lease in which a message arrives by way of another host, or this process connects to its host. Hosts say
within about 1 s what they have."""
SLOW = 4 << 20
"""Bytes in a second that arrive at least: large messages have more time."""
_APART, _APART_LONGEST = 10.0, 640.0
"""Seconds for which a host gets its messages from this process, after one did not arrive by way of another host; each
time in a row twice as long."""


class Link(Protocol):
    """The socket of a connection."""

    def send(self, frame: bytes, more: Sequence[Any] = (), /) -> None: ...


class Gateway(Protocol):
    """A connection to another host; see ``monarch._node.peers``."""

    host: str
    settled: float
    last: int
    arrived: int
    due: int
    heard: list[int]
    relay: str
    group: int
    spreads: Spreads | None
    closed: Event
    keeps: bool
    kept: deque[Any]
    spare: Any

    link: Any

    @property
    def parent(self) -> Gateway | None: ...
    def cast(self, src: str, procs: list[str], port: int, frames: Sequence[Any]) -> None: ...


Far = Sequence[tuple[Gateway, list[str]]]
"""The receivers of a message on other hosts."""


def _group_of(receiver: tuple[Gateway, list[str]]) -> int:
    return receiver[0].group


def _led(ordered: list[tuple[Gateway, list[str]]]) -> list[tuple[Gateway, list[str]]]:
    """Return the receivers of a message by their groups, each of which begins with a host that has a connection.

    That may be one that only passes it on.
    """
    leaders: dict[int, Gateway] = {}
    for gateway, _ in ordered:
        parent = gateway.parent
        if parent is not None and is_settled(parent):
            leaders[gateway.group] = parent
    if not leaders:
        return ordered
    groups: dict[int, list[tuple[Gateway, list[str]]]] = {}
    for each in ordered:
        groups.setdefault(each[0].group, []).append(each)
    for group, members in groups.items():
        leader = leaders.get(group)
        if leader is None or leader.group != group:
            continue
        at = next((place for place, (gateway, _) in enumerate(members) if gateway is leader), -1)
        nobody: list[str] = []
        members.insert(0, members.pop(at) if at >= 0 else (leader, nobody))
    return [each for members in groups.values() for each in members]


def is_settled(gateway: Gateway) -> bool:
    """Return whether a host may get messages through others, and forward them."""
    if not gateway.arrived or gateway.arrived < gateway.due:
        return False
    return gateway.settled < time.monotonic() and not gateway.closed.is_set()


class _One:
    """A message to one host."""

    __slots__ = ("begun", "frames", "gateway", "number", "size")

    def __init__(self, gateway: Gateway, frames: Sequence[Any]) -> None:
        self.gateway = gateway
        self.frames = frames
        self.number = 0
        self.begun = 0.0
        self.size = 0
        """Bytes, once it is kept."""

    def send(self, spreads: Spreads) -> None:
        gateway = self.gateway
        if not self.number:
            # Both assignments or none, as no handler of a signal runs in between.
            self.number = gateway.last = gateway.last + 1
        if gateway.keeps and not self.begun:
            self.begun = time.monotonic()
            self.size = sum(map(len, self.frames))
            gateway.kept.append(self)
            spreads.keep_one(gateway)
        # The parent of a host has work of its own.
        is_bulk = self.size >= BULK and gateway.parent is not None
        self._send(spreads, spreads.spare(gateway) if is_bulk else gateway.link)

    def _send(self, spreads: Spreads, link: Any) -> None:
        link.send(m.encode(m.Ordered(spreads.proc, self.number, len(self.frames))), self.frames)

    def send_straight(self, spreads: Spreads) -> None:
        """Send it once more."""
        self._send(spreads, self.gateway.link)


class _Way:
    """The receivers of a message, in parts of which each is sent to its first host."""

    __slots__ = ("ends", "fan", "far", "fit", "gateways", "packed")

    def __init__(self, far: Far, ends: list[int], fan: int) -> None:
        self.far = far
        self.gateways = [gateway for gateway, _ in far]
        self.ends = ends
        """Where the parts begin and end."""
        self.fan = fan
        """As in Spread."""
        self.fit = len(far)
        """The number of receivers, without hosts that only pass it on."""
        hosts = [(gateway.host, procs) for gateway, procs in far]
        self.packed = [m.pack(hosts[begin:end]) for begin, end in pairwise(ends)]
        """The hosts of each part, as in Spread."""

    def relay(self, place: int) -> str:
        """Return the host that forwards the message to a host."""
        return self.gateways[self.ends[bisect_right(self.ends, place) - 1]].host


class _Many:
    """A message to many hosts. Sending it can be interrupted, and begun again."""

    __slots__ = ("again", "arrived", "begun", "far", "frames", "numbers", "port", "straight", "way")

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
        self.straight: set[int] = set()
        """The places of hosts that were sent it once more: it does not depend on others there."""

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
            self.straight.add(place)
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
        self._keeping: dict[str, Gateway] = {}
        """By host, connections of which messages are kept that were for that host alone."""
        self._ways: list[tuple[Far, _Way]] = []
        """Ways to the receivers of recent messages, the newest first: making one takes time for each process."""
        self._grouped: Sequence[Gateway] = ()
        """The hosts that have groups."""
        self._next_entry = 0
        self._apart: dict[str, tuple[float, float]] = {}
        """By host, until when it gets its messages from this process, and for how many seconds in all."""
        self._waits = False
        self.later: Callable[[float, Callable[[], None]], object] = lambda _, __: None
        """Runs a function in the receiving thread after some seconds. Set once, before ``least``."""
        self.connect: Callable[[str], Any] = lambda host: None
        """Returns another connection to a host. Set once, before ``least``."""
        self.on_late: Callable[[Gateway], None] = lambda gateway: None
        """Called in the receiving thread with a host that has no connection, and has not got a message in time. Set
        once, before ``least``."""
        self.lease = LEASE_S
        self.breaks = 0
        """How often a connection between hosts broke. Leader only writes."""

    def group(self, gateways: Sequence[Gateway]) -> None:
        """Send messages to these hosts through one another, in about as many groups as there are hosts in each.

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
        """Send a large message once from here to procs of some hosts, which forward it, in any order with others.

        Nothing is kept. The sender sends it again if a host is lost.
        """
        if len(far) < 2:
            for gateway, procs in far:
                gateway.cast(self.proc, procs, 0, [frame])
            return
        with self._lock:
            far = self._turned(far)
            hosts = m.pack([(gateway.host, procs) for gateway, procs in far])
            far[0][0].link.send(m.encode(m.Spread(self.proc, 0, "", _FAN, hosts, [0] * len(far), [], 1)), [frame])

    def _way(self, far: Far, fit: list[tuple[Gateway, list[str]]]) -> _Way:
        """Return the way of a message to hosts, those of ``far`` that are fit; that to all of them is kept."""
        for place, (known, way) in enumerate(self._ways):
            if known is far and way.fit == len(fit):
                if place:
                    self._ways.insert(0, self._ways.pop(place))
                return way
        ordered = sorted(fit, key=_group_of)
        ordered = _led(ordered)
        ends = [place for place in range(1, len(ordered)) if ordered[place][0].group != ordered[place - 1][0].group]
        way = _Way(ordered, [0, *ends, len(ordered)], 0)
        way.fit = len(fit)
        if len(fit) == len(far):
            self._ways.insert(0, (far, way))
            del self._ways[_WAYS:]
        return way

    def _turned(self, far: Far) -> list[tuple[Gateway, list[str]]]:
        """Return the receivers of a large message, so that it begins its way at other hosts than the one before.

        It begins at one that has a connection to this process, if any has.
        """
        self._next_entry += 1
        places = [place for place, (gateway, _) in enumerate(far) if gateway.parent is None] or range(len(far))
        turn = self._next_entry % min(len(places), _ENTRIES)
        at = places[len(places) * turn // min(len(places), _ENTRIES)]
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
        self._look_later()

    def keep_one(self, gateway: Gateway) -> None:
        """Look whether what is kept for a host arrives; with the lock held."""
        self._keeping[gateway.host] = gateway
        self._look_later()

    def _look_later(self) -> None:
        if not self._waits:
            self._waits = True
            self.later(_LOOK, self._look)

    def spare(self, gateway: Gateway) -> Any:
        """Return a connection for large messages to a host that has none else, until they have arrived; with the lock
        held."""
        if gateway.spare is None:
            try:
                gateway.spare = self.connect(gateway.host)
            except Exception:
                # Too many open files, or the host is about to count as lost: by its parent, as other messages.
                return gateway.link
        return gateway.spare

    # The connections, in the receiving thread

    def hang(self, gateway: Gateway, link: Any) -> None:
        """Let all messages to a host go by another one, by which it has said that it will get them."""
        with self._lock:
            before, gateway.link = gateway.link, link
            self._ways.clear()
        # Later messages are kept, so nothing is lost if this connection breaks just now.
        before.close(int(self.lease * 1000))

    def straighten(self, gateway: Gateway, link: Any) -> None:
        """Send all messages to a host over a connection again, starting with those that it may not have."""
        with self._lock:
            gateway.link, gateway.keeps = link, False
            self._ways.clear()
            self._trim(gateway)
            for one in gateway.kept:
                one.send_straight(self)
            for many in list(self._kept):
                passes_on = not many.way.fan
                for place, (each, _) in enumerate(many.far):
                    if each is gateway or (passes_on and many.way.relay(place) == gateway.host):
                        many.send_straight(self, place)

    def _trim(self, gateway: Gateway) -> None:
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

    def _lagging(self, now: float) -> list[Gateway]:
        """Return the hosts without a connection that have not got a message in time."""
        lagging: list[Gateway] = []
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

    def newest(self, gateways: Sequence[Gateway]) -> list[tuple[Gateway, int]]:
        """Return connections with the number of the last message by each; from any thread."""
        with self._lock:
            return [(gateway, gateway.last) for gateway in gateways]

    def may_take(self, gateway: Gateway, number: int) -> float | None:
        """Return when a host has the messages up to a number at the latest if large ones are on their way, in
        monotonic seconds; 0 if none are, None if it has all."""
        with self._lock:
            if gateway.arrived >= number or gateway.closed.is_set():
                return None
            large = [(one.begun, one.size) for one in gateway.kept if one.size >= BULK]
            for many in self._kept:
                gateways = many.way.gateways
                on_way = many.way.fan and gateway in gateways
                if on_way and many.numbers[gateways.index(gateway)] > gateway.arrived:
                    large.append((many.begun, sum(map(len, many.frames))))
            return min(begun for begun, _ in large) + sum(size for _, size in large) / SLOW if large else 0.0

    def avoid_way(self, gateway: Gateway) -> None:
        """Let a host get its messages from this process for a while, and first those that it may not have."""
        if gateway.parent is not None:
            self.on_late(gateway)
            return
        with self._lock:
            for many in list(self._kept):
                for place, (each, _) in enumerate(many.far):
                    if each is gateway and many.way.relay(place) != gateway.host:
                        self._send_apart(many, place)

    def set_apart(self, gateway: Gateway, seconds: float) -> None:
        """Send messages to a host through others only after some seconds."""
        with self._lock:
            gateway.settled = time.monotonic() + seconds
            self._ways.clear()

    def prove(self, gateway: Gateway) -> None:
        """Send messages through a host only once it has confirmed all so far; from any thread."""
        if gateway.spreads is not None and not gateway.closed.is_set():
            # The host says at once what it has.
            self.cast([(gateway, [f"{gateway.host}/agent"])], 0, [m.encode(m.Signal(self.proc, [], 0))])
            with self._lock:
                gateway.due = gateway.last
                self._ways.clear()

    def _send_apart(self, many: _Many, place: int) -> None:
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
