"""Messages to many hosts that go from agent to agent, so that this process sends few of them itself.

Messages to one host then come by different ways. So all of them have numbers, the agent of the host handles them in
that order, and each once: what may have been lost with an agent on its way is sent again, straight to its host.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from monarch._node.spreads.arrivals import Arrivals
from monarch._node.spreads.gateway_like import Far, GatewayLike, is_settled
from monarch._node.spreads.outgoing import BULK, ToMany, ToOne
from monarch._node.spreads.relay_plan import RelayPlan, group_of, led
from monarch._wire import messages as m

_FAN = 2
"""The number of hosts that each host passes such a message on to."""
_SETTLED = 0.5
"""Seconds after its first number until a host gets messages by way of others."""
_PLANS = 8
"""Relay plans that are kept."""
_ENTRIES = 8
"""The most hosts at which large messages begin their way, in turn: each way is a set of connections among hosts."""


class Spreads(Arrivals):
    """Sends messages to the hosts that have numbers.

    Args:
        proc: id of this process.
        gateways: the connections, by host.
    """

    def __init__(self, proc: str, gateways: Mapping[str, GatewayLike]) -> None:
        super().__init__(proc, gateways)
        self.least = 0
        """The number of hosts from which on messages go from host to host; 0 if they never do. Set once."""
        # Under the lock.
        self._queue: deque[ToOne | ToMany] = deque()
        """Messages that are being sent. Any thread appends; a signal handler or a __del__ may do so in the middle."""
        self._plans: list[tuple[Far, RelayPlan]] = []
        """Relay plans of recent messages, the newest first: making one takes time for each process."""
        self._grouped: Sequence[GatewayLike] = ()
        """The hosts that have groups."""
        self._next_entry = 0

    def group(self, gateways: Sequence[GatewayLike]) -> None:
        """Send messages to these hosts through one another, in about as many groups as there are hosts in each.

        The groups stay, whichever hosts a message is for: a host connects to those of its group only.
        """
        size = math.isqrt(max(0, len(gateways) - 1)) + 1
        with self._lock:
            self._plans.clear()
            self._grouped = gateways
        for place, gateway in enumerate(gateways):
            gateway.group = place // size
            self.number(gateway)

    def groups(self) -> list[list[GatewayLike]]:
        """Return the hosts that are left of each group, in order."""
        groups: dict[int, list[GatewayLike]] = {}
        for gateway in self._grouped:
            if not gateway.closed.is_set():
                groups.setdefault(gateway.group, []).append(gateway)
        return list(groups.values())

    def number(self, gateway: GatewayLike) -> None:
        """Give numbers to all messages of a connection from now on; the next one goes straight."""
        if gateway.spreads is None:
            gateway.settled = time.monotonic() + _SETTLED
            gateway.spreads = self

    def send(self, gateway: GatewayLike, frames: Sequence[Any]) -> None:
        """Send a message straight to a host, after those that were sent before it."""
        self._queue.append(ToOne(gateway, frames))
        self._flush()

    def cast(self, far: Far, port: int, frames: Sequence[Any]) -> None:
        """Send one message to procs of many hosts."""
        fit = [each for each in far if is_settled(each[0])]
        bulk = sum(map(len, frames)) >= BULK
        if len(fit) < (2 if bulk else max(2, self.least)):
            fit = []
        if bulk and fit:
            turned = self._turned(fit)
            self._queue.append(ToMany(RelayPlan(turned, [0, len(turned)], _FAN), port, frames))
        elif fit:
            with self._lock:
                plan = self._plan(far, fit)
            self._queue.append(ToMany(plan, port, frames))
        if len(fit) < len(far):
            chosen = {id(gateway) for gateway, _ in fit}
            for gateway, procs in far:
                if id(gateway) not in chosen:
                    cast = m.encode(m.Cast(self.proc, procs, port, len(frames)))
                    if gateway.spreads is None:
                        gateway.link.send(cast, frames)
                    else:
                        self._queue.append(ToOne(gateway, [cast, *frames]))
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

    def _plan(self, far: Far, fit: list[tuple[GatewayLike, list[str]]]) -> RelayPlan:
        """Return the relay plan of a message to hosts, those of ``far`` that are fit; that to all of them is kept."""
        for place, (known, plan) in enumerate(self._plans):
            if known is far and plan.fit == len(fit):
                if place:
                    self._plans.insert(0, self._plans.pop(place))
                return plan
        ordered = sorted(fit, key=group_of)
        ordered = led(ordered)
        ends = [place for place in range(1, len(ordered)) if ordered[place][0].group != ordered[place - 1][0].group]
        plan = RelayPlan(ordered, [0, *ends, len(ordered)], 0)
        plan.fit = len(fit)
        if len(fit) == len(far):
            self._plans.insert(0, (far, plan))
            del self._plans[_PLANS:]
        return plan

    def _turned(self, far: Far) -> list[tuple[GatewayLike, list[str]]]:
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

    def _done(self, first: ToOne | ToMany) -> None:
        # Code that ran in the middle may have sent it already.
        if self._queue and self._queue[0] is first:
            self._queue.popleft()

    # The connections, in the receiving thread

    def relay(self, gateway: GatewayLike, link: Any) -> None:
        """Let all messages to a host go by another one, by which it has said that it will get them."""
        with self._lock:
            before, gateway.link = gateway.link, link
            self._plans.clear()
        # Later messages are kept, so nothing is lost if this connection breaks just now.
        before.close(int(self.lease * 1000))

    def straighten(self, gateway: GatewayLike, link: Any) -> None:
        """Send all messages to a host over a connection again, starting with those that it may not have."""
        with self._lock:
            gateway.link, gateway.keeps = link, False
            self._plans.clear()
            self._trim(gateway)
            for one in gateway.kept:
                one.send_straight(self)
            for many in list(self._kept):
                passes_on = not many.plan.fan
                for place, (each, _) in enumerate(many.far):
                    if each is gateway or (passes_on and many.plan.relay(place) == gateway.host):
                        many.send_straight(self, place)

    def set_apart(self, gateway: GatewayLike, seconds: float) -> None:
        """Send messages to a host through others only after some seconds."""
        with self._lock:
            gateway.settled = time.monotonic() + seconds
            self._plans.clear()

    def prove(self, gateway: GatewayLike) -> None:
        """Send messages through a host only once it has confirmed all so far; from any thread."""
        if gateway.spreads is not None and not gateway.closed.is_set():
            # The host says at once what it has.
            self.cast([(gateway, [f"{gateway.host}/agent"])], 0, [m.encode(m.Signal(self.proc, [], 0))])
            with self._lock:
                gateway.due = gateway.last
                self._plans.clear()
