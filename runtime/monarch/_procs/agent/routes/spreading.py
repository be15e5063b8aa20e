"""Messages to many hosts that go from agent to agent, and the way of their replies."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

from monarch._procs.agent.folding import Folding
from monarch._procs.agent.routes.ordering import Ordering
from monarch._procs.agent.routes.router import Router
from monarch._procs.agent.routes.uplink import AgentUplink
from monarch._procs.session_folder import host_of
from monarch._wire import messages as m
from monarch.exceptions import ProtocolError

_LARGE = 64 << 10
"""Bytes of replies that go straight to the caller: it must take all of them anyway."""
_AGAIN, _TRIES = 0.1, 50
"""Seconds until a message is sent again to a host whose address has not come, and how often."""
_KEPT = 10_000
"""Answers that are kept until the caller has acknowledged them."""


class _Leg(NamedTuple):
    """The part of a Spread for one host."""

    host: str
    procs: list[str]
    number: int
    heard: list[int]


def _legs_of(spread: m.Spread) -> list[_Leg]:
    """Return the parts of a message for its hosts.

    Raises:
        ProtocolError: its parts do not fit together.
    """
    hosts: list[tuple[str, list[str]]] = m.unpack(spread.hosts)
    if not hosts or len(hosts) != len(spread.numbers):
        raise ProtocolError(f"a Spread to {len(hosts)} hosts has {len(spread.numbers)} numbers")
    heard = dict(spread.heard)
    return [
        _Leg(host, procs, number, heard.get(place, []))
        for place, ((host, procs), number) in enumerate(zip(hosts, spread.numbers, strict=True))
    ]


def _part_of(spread: m.Spread, legs: list[_Leg], via: str) -> m.Spread:
    """Return the message for some of its hosts."""
    hosts = m.pack([(leg.host, leg.procs) for leg in legs])
    heard = [(place, leg.heard) for place, leg in enumerate(legs) if leg.heard]
    return m.Spread(spread.src, spread.port, via, spread.fan, hosts, [leg.number for leg in legs], heard, spread.frames)


class Spreading:
    """The messages that an agent passes on, and the replies that it sends back.

    Args:
        router: the router of the agent.
        uplink: the uplink of the agent; answers do not overtake what goes by it.
        later: runs a function after some seconds.
        handle: handles the frames of a message.
        failed: reports frames that could not be handled.
        parted: called with a host that cannot be reached from here.
    """

    def __init__(
        self,
        router: Router,
        uplink: AgentUplink,
        later: Callable[[float, Callable[[], None]], None],
        handle: Callable[[list[Any]], None],
        failed: Callable[[list[Any], Exception], None],
        parted: Callable[[str], None],
    ) -> None:
        self._router = router
        self._uplink = uplink
        self._later = later
        self._proc = router.proc
        self._handle_now = handle
        self._failed = failed
        self._parted = parted
        self.ordering = Ordering(router.proc, later, self._tell)
        self.folding = Folding(router.proc, later, self._send)
        uplink.merging.before_deaths = self.folding.flush
        self._via: dict[tuple[str, int], str] = {}
        """The agent that folds the replies to a port of a caller."""
        self._kept: dict[int, tuple[str, str, list[Any]]] = {}
        """By number: the agent that has got them, the caller, and the replies as a Batch."""
        self._last = 0

    def _tell(self, dst: str, message: m.Received) -> None:
        self._uplink.mention(dst, [m.encode(message)])

    def _send(self, dst: str, frames: list[Any]) -> object:
        return self._router.send(dst, frames)

    def on_ordered(self, ordered: m.Ordered, frames: list[Any]) -> None:
        """Handle a message when all before it have been."""
        self.ordering.take(ordered.src, ordered.number, partial(self._handle, frames))

    def on_spread(self, spread: m.Spread, frames: list[Any]) -> None:
        """Pass a message on, and give it to the ranks of this host, when all before it have been handled."""
        legs = _legs_of(spread)
        self.ordering.take(spread.src, legs[0].number, lambda: self._pass_and_give(spread, legs, frames))

    def _pass_and_give(self, spread: m.Spread, legs: list[_Leg], frames: list[Any]) -> None:
        try:
            self._serve(spread, legs, frames)
        except Exception as error:
            cast = m.Cast(spread.src, legs[0].procs, spread.port, len(frames))
            self._failed([m.encode(cast), *frames], error)

    def _handle(self, frames: list[Any]) -> None:
        try:
            self._handle_now(frames)
        except Exception as error:
            # Later messages are handled all the same.
            self._failed(frames, error)

    def _serve(self, spread: m.Spread, legs: list[_Leg], frames: list[Any]) -> None:
        own, *others = legs
        for number in own.heard:
            self._kept.pop(number, None)
        via = spread.via
        if others:
            folds = bool(spread.port and not spread.fan)
            passed = self._pass_on(spread, others, self._proc if folds else via, frames)
            if folds:
                via = self._proc
                self.folding.begin(spread.src, spread.port, [self._proc, *passed])
        if via and spread.port and self._router.knows(via):
            # Otherwise the connection to it broke, and the replies go straight to the caller.
            self._via[spread.src, spread.port] = via
            if via != self._proc:
                # To notice its loss also before there are replies.
                self._router.connect(host_of(via))
        self._handle([m.encode(m.Cast(spread.src, own.procs, spread.port, len(frames))), *frames])

    def _pass_on(self, spread: m.Spread, legs: list[_Leg], via: str, frames: list[Any]) -> list[str]:
        """Send it to the next agents, and return them."""
        count = min(spread.fan or len(legs), len(legs))
        ends = [len(legs) * place // count for place in range(count + 1)]
        passed: list[str] = []
        for begin, end in pairwise(ends):
            child = f"{legs[begin].host}/agent"
            part = m.encode(_part_of(spread, legs[begin:end], via))
            if self._send(child, [part, *frames]):
                passed.append(child)
            elif legs[begin].number:
                # Its sender has kept it for them.
                self._parted(legs[begin].host)
            else:
                self._unknown(spread, legs[begin:end], frames)
        return passed

    def _unknown(self, spread: m.Spread, legs: list[_Leg], frames: list[Any], tries: int = 0) -> None:
        """Pass a message without a number on when the address of the next host has come: it may have overtaken that."""
        part = m.encode(_part_of(spread, legs, spread.via))
        if not self._send(f"{legs[0].host}/agent", [part, *frames]) and tries < _TRIES:
            self._later(_AGAIN, lambda: self._unknown(spread, legs, frames, tries + 1))

    def answer(self, dst: str, port: int, batch: list[Any], last: bool) -> None:
        """Send the replies of ranks of this host on their way.

        Args:
            dst: the caller.
            port: its port.
            batch: a Batch with its frames; empty if there are no replies to send.
            last: whether no rank owes a reply any more.
        """
        via = self._via.pop((dst, port), "") if last else self._via.get((dst, port), "")
        if not via:
            if batch:
                self._send(dst, batch)
            return
        if batch and sum(map(len, batch)) > _LARGE:
            self._send(dst, batch)
            batch = []
        if not batch and not last:
            return
        head = m.decode(batch[0]) if batch else None
        parts = head.parts if isinstance(head, m.Batch) else []
        received = self.ordering.told(dst)
        if via == self._proc:
            self.folding.add(self._proc, dst, port, 0, last, parts, batch[1:], received)
            return
        number = 0
        if batch:
            number = self._last = self._last + 1
            self._kept[number] = (via, dst, batch)
            while len(self._kept) > _KEPT:
                del self._kept[next(iter(self._kept))]
        self._uplink.before_answers(via)
        answers = m.encode(m.Answers(self._proc, dst, port, number, last, parts, len(batch[1:]), received))
        if not self._send(via, [answers, *batch[1:]]):
            self.lost(host_of(via))

    def on_answers(self, answers: m.Answers, frames: list[Any]) -> None:
        """Fold the replies of the ranks of another host."""
        number, received = answers.number, answers.received
        self.folding.add(answers.src, answers.dst, answers.port, number, answers.last, answers.parts, frames, received)

    def avoid(self, agent: str) -> None:
        """Send callers answers straight from now on, and what another agent may not have passed on."""
        for (dst, port), via in self._via.items():
            if via == agent:
                # It need not wait for them.
                owes_none = m.Answers(self._proc, dst, port, 0, True, [], 0, 0)
                self._router.post(agent, [m.encode(owes_none)])
        self.lost(host_of(agent))

    def lost(self, host: str) -> None:
        """Send the caller itself what an agent may not have passed on."""
        agent = f"{host}/agent"
        self._via = {key: via for key, via in self._via.items() if via != agent}
        for number, (via, dst, batch) in list(self._kept.items()):
            if via == agent:
                del self._kept[number]
                self._send(dst, batch)
        self.folding.lost(agent)
