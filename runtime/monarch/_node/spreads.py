"""Messages to many hosts that go from agent to agent, so that this process sends few of them itself.

Messages to one host then come by different ways. So all of them have numbers, the agent of the host handles them in
that order, and each once: what may have been lost with an agent on its way is sent again, straight to its host.
"""

from __future__ import annotations

import math
import time
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
    spreads: Spreads | None
    closed: Event

    @property
    def link(self) -> Link: ...
    def cast(self, src: str, procs: list[str], port: int, frames: Sequence[Any]) -> None: ...


Far = Sequence[tuple[Gateway, list[str]]]
"""The receivers of a message on other hosts."""


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


class _Many:
    """A message to many hosts. Sending it can be interrupted, and begun again."""

    __slots__ = ("again", "arrived", "begun", "far", "frames", "groups", "numbers", "port", "relays")

    def __init__(self, far: Far, port: int, frames: Sequence[Any], groups: int) -> None:
        self.far = far
        self.port = port
        self.frames = frames
        self.groups = groups
        """The number of hosts that it is sent to from here."""
        self.numbers = [0] * len(far)
        self.relays: list[str] = [""] * len(far)
        """The host by way of which each host gets it."""
        self.arrived = 0
        """How many hosts, from the first, are known to have it."""
        self.begun = 0.0
        self.again = False
        """Whether it was sent again because hosts did not have it in time."""

    def send(self, spreads: Spreads) -> None:
        far, numbers = self.far, self.numbers
        for place, (gateway, _) in enumerate(far):
            if not numbers[place]:
                numbers[place] = gateway.last = gateway.last + 1
        if not self.begun:
            self.begun = time.monotonic()
            spreads.keep(self)
        fan = 0 if self.groups > 1 else _FAN
        ends = [len(far) * place // self.groups for place in range(self.groups + 1)]
        for begin, end in pairwise(ends):
            legs: list[tuple[str, int, list[int], list[str]]] = []
            relay = far[begin][0].host
            for place in range(begin, end):
                gateway, procs = far[place]
                legs.append((gateway.host, numbers[place], gateway.heard, procs))
                gateway.heard = []
                self.relays[place] = relay
                if gateway.relay != relay:
                    gateway.relay = relay
                    spreads.by_relay.setdefault(relay, set()).add(gateway.host)
            head = m.encode(m.Spread(spreads.proc, self.port, "", fan, legs, len(self.frames)))
            far[begin][0].link.send(head, self.frames)

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
        self._next_entry = 0
        self._waits = False
        self.later: Callable[[float, Callable[[], None]], object] = lambda _, __: None
        """Runs a function in the receiving thread after some seconds. Set once, before ``least``."""
        self.lease = LEASE_S

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
        now = time.monotonic()
        fit = [each for each in far if each[0].arrived and each[0].settled < now and not each[0].closed.is_set()]
        bulk = sum(map(len, frames)) >= BULK
        if len(fit) < (2 if bulk else max(2, self.least)):
            fit = []
        if fit:
            if bulk:
                self._next_entry += 1
                at = self._next_entry % len(fit)
                fit = fit[at:] + fit[:at]
            self._queue.append(_Many(fit, port, frames, 1 if bulk else math.isqrt(len(fit) - 1) + 1))
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
        self._next_entry += 1
        at = self._next_entry % len(far)
        legs = [(gateway.host, 0, list[int](), procs) for gateway, procs in [*far[at:], *far[:at]]]
        far[at][0].link.send(m.encode(m.Spread(self.proc, 0, "", _FAN, legs, 1)), [frame])

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

    def heard(self, hosts: Sequence[tuple[str, int]]) -> None:
        """Note that answers have arrived, by host and number; the next message to the host says so."""
        with self._lock:
            for host, number in hosts:
                gateway = self._gateways.get(host)
                if gateway is not None:
                    gateway.heard.append(number)

    def lost(self, host: str) -> None:
        """Send what a lost host may not have passed on, and let others send what it has not passed on to here."""
        with self._lock:
            for many in list(self._kept):
                for place, relay in enumerate(many.relays):
                    if relay == host or many.groups == 1:
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
