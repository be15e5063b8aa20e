"""A message to one or to many hosts, with the numbers that it has there."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Protocol

from monarch._node.spreads.gateway_like import GatewayLike
from monarch._node.spreads.relay_plan import RelayPlan
from monarch._wire import messages as m

BULK = 1 << 20
"""Bytes from which a message goes to one host, and from there to the others."""


class Keeper(Protocol):
    """Keeps messages until they have arrived; see ``Spreads``."""

    proc: str
    by_relay: dict[str, set[str]]

    def keep(self, many: Any) -> None: ...
    def keep_one(self, gateway: GatewayLike) -> None: ...
    def spare(self, gateway: GatewayLike) -> Any: ...


class ToOne:
    """A message to one host."""

    __slots__ = ("begun", "frames", "gateway", "number", "size")

    def __init__(self, gateway: GatewayLike, frames: Sequence[Any]) -> None:
        self.gateway = gateway
        self.frames = frames
        self.number = 0
        self.begun = 0.0
        self.size = 0
        """Bytes, once it is kept."""

    def send(self, spreads: Keeper) -> None:
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

    def _send(self, spreads: Keeper, link: Any) -> None:
        link.send(m.encode(m.Ordered(spreads.proc, self.number, len(self.frames))), self.frames)

    def send_straight(self, spreads: Keeper) -> None:
        """Send it once more."""
        self._send(spreads, self.gateway.link)


class ToMany:
    """A message to many hosts. Sending it can be interrupted, and begun again."""

    __slots__ = ("again", "arrived", "begun", "far", "frames", "numbers", "plan", "port", "straight")

    def __init__(self, plan: RelayPlan, port: int, frames: Sequence[Any]) -> None:
        self.plan = plan
        self.far = plan.far
        self.port = port
        self.frames = frames
        self.numbers = [0] * len(plan.far)
        self.arrived = 0
        """How many hosts, from the first, are known to have it."""
        self.begun = 0.0
        self.again = False
        """Whether it was sent again because hosts did not have it in time."""
        self.straight: set[int] = set()
        """The places of hosts that were sent it once more: it does not depend on others there."""

    def send(self, spreads: Keeper) -> None:
        plan, numbers = self.plan, self.numbers
        gateways = plan.gateways
        for place, gateway in enumerate(gateways):
            if not numbers[place]:
                numbers[place] = gateway.last = gateway.last + 1
        if not self.begun:
            self.begun = time.monotonic()
            spreads.keep(self)
        for (begin, end), packed in zip(pairwise(plan.ends), plan.packed, strict=True):
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
            head = m.Spread(spreads.proc, self.port, "", plan.fan, packed, numbers[begin:end], heard, len(self.frames))
            part[0].link.send(m.encode(head), self.frames)

    def send_straight(self, spreads: Keeper, place: int) -> None:
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
