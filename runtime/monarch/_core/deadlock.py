"""Finding actors that wait for each other in a circle, by probes that follow the waits.

The method is edge chasing (Chandy, Misra and Haas, "Distributed Deadlock Detection", 1983) in the AND model:
an actor that waits does so for all of its requests. A probe starts at an actor that waits, goes to each actor
that it waits for, and on from there if that one waits too. If it comes back to its start, there is a circle.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from typing import Literal, NamedTuple, TypeAlias

State: TypeAlias = Literal["queued", "running", "explicit"]
"""How a request stands at its target: it waits for its turn, it is being handled, or it is being handled by
an endpoint with an explicit response port, through which anyone may answer."""

# How many initiators a wait remembers; enough that one is forgotten only long after its probes are gone.
_REMEMBERED = 1 << 16


class Request(NamedTuple):
    """A request that an actor's reply is awaited for."""

    proc: str
    """The process that made it."""
    port: int
    """Where in that process the reply goes."""
    target: str
    """The process of the actor that is to answer."""
    actor: str
    """The key of that actor in its process."""


Text: TypeAlias = Callable[[Request], str]
"""Says in words who waits for whom by a request: ``a[gpus=0].ping waits for b[gpus=0].pong``."""


class Probe(NamedTuple):
    """Tells the target of a request that the initiator waits, through a chain of waits, for that request."""

    initiator_proc: str
    initiator_actor: str
    wait: int
    """The initiator's wait, a number of its process."""
    round: int
    """How often the initiator has asked during this wait."""
    request: Request
    """The last of the chain; the probe is to be sent to its ``target``."""
    path: tuple[str, ...]
    """A text for each wait of the chain, the initiator's first."""


class Deadlock(NamedTuple):
    """A wait that can never end, because it is part of a circle."""

    wait: int
    path: tuple[str, ...]
    """A text for each wait of the circle, such as ``a.ping waits for b.pong``; its first is this wait."""

    def message(self) -> str:
        """The text of the error that this wait fails with."""
        if len(self.path) == 1:
            found = "an actor waits for itself, and it handles one message at a time:"
        else:
            found = f"{len(self.path)} actors wait for each other in a circle, so none of them can go on:"
        advice = (
            "Make one of these endpoints async and concurrent, @endpoint(concurrent=True), and await its call; "
            "or do not wait for the reply there."
        )
        return "\n".join([found, *(f"  {hop}" for hop in self.path), advice])


class _Wait:
    """A wait of one actor."""

    __slots__ = ("actor", "number", "requests", "round", "seen", "text")

    def __init__(self, number: int, actor: str, requests: Iterable[Request], text: Text) -> None:
        self.number = number
        self.actor = actor
        # Those not answered yet; a dict, for its order.
        self.requests = dict.fromkeys(requests)
        self.text = text
        self.round = 0
        # Of each initiator, the wait and round of its last probe that was forwarded from here.
        self.seen: OrderedDict[tuple[str, str], tuple[int, int]] = OrderedDict()

    def is_new(self, probe: Probe) -> bool:
        """Whether to forward a probe from here: once a round, and none of an earlier round after that."""
        initiator = (probe.initiator_proc, probe.initiator_actor)
        stamp = (probe.wait, probe.round)
        if self.seen.get(initiator, (0, 0)) >= stamp:
            return False
        self.seen[initiator] = stamp
        self.seen.move_to_end(initiator)
        if len(self.seen) > _REMEMBERED:
            self.seen.popitem(last=False)
        return True

    def onward(self, probe: Probe) -> Iterator[Probe]:
        """The probe, taken a step further along each request of this wait."""
        for request in self.requests:
            yield probe._replace(request=request, path=(*probe.path, self.text(request)))


class Waits:
    """The waits of the actors of one process, and the probes that follow them.

    There is no false alarm as long as waits end by their replies only: what a probe has seen of a circle can
    change only when an actor ahead of it answers, and each of those waits too. So a wait that may end in
    another way, such as one with a timeout, had better not be begun here.

    A circle is found by the first member that asks for probes once it is closed: once all its members have
    begun their waits and the requests have arrived. As nobody knows when that is, ask again from time to
    time. That also makes up for a probe that was lost or came before its request.

    One ask makes at most one probe for each request waited for, in all processes together.

    This does no I/O and has no lock: the caller sends and delivers the probes, and makes one call at a time.
    ``state`` and ``text`` are called back during these calls.

    Args:
        proc: the id of this process.
        state: how a request to an actor of this process stands here; None if it is not here, or answered.
    """

    def __init__(self, proc: str, state: Callable[[Request], State | None]) -> None:
        self._proc = proc
        self._state = state
        self._numbers = count(1)
        self._waits: dict[int, _Wait] = {}
        self._by_actor: dict[str, _Wait] = {}

    def begin(self, actor: str, requests: Iterable[Request], text: Text) -> int:
        """An actor, one that handles one message at a time, is blocked until all the requests are answered.

        Args:
            actor: its key in this process.
            requests: those that have no reply yet.
            text: the wait for one of them in words; asked only when a probe passes.

        Returns:
            A number for this wait, ascending in this process.

        Raises:
            ValueError: the actor is in a wait already.
        """
        if actor in self._by_actor:
            raise ValueError(f"actor {actor!r} is in a wait already")
        wait = _Wait(next(self._numbers), actor, requests, text)
        self._waits[wait.number] = self._by_actor[actor] = wait
        return wait.number

    def requests(self, wait: int) -> list[Request]:
        """The requests of a wait that have no reply yet; none if it has ended."""
        found = self._waits.get(wait)
        return list(found.requests) if found is not None else []

    def answered(self, wait: int, request: Request) -> None:
        """A reply has come. It does no harm if the wait has ended."""
        found = self._waits.get(wait)
        if found is not None:
            found.requests.pop(request, None)

    def end(self, wait: int) -> None:
        """The actor goes on, for whatever reason. It does no harm if the wait has ended."""
        found = self._waits.pop(wait, None)
        if found is not None:
            del self._by_actor[found.actor]

    def probes(self, wait: int) -> tuple[list[Probe], Deadlock | None]:
        """Asks whether a wait is part of a circle.

        Returns:
            The probes to send, each to the target of its request; and the circle, if one lies within this
            process. In that case the wait is over here.
        """
        found = self._waits.get(wait)
        if found is None:
            return [], None
        found.round += 1
        none = Request(self._proc, 0, self._proc, found.actor)
        start = Probe(self._proc, found.actor, wait, found.round, none, ())
        return self._chase(found.onward(start))

    def receive(self, probe: Probe) -> tuple[list[Probe], Deadlock | None]:
        """Takes a probe that has arrived.

        Returns:
            The probes to send, each to the target of its request; and the circle that this one has gone
            round, if it has. In that case the wait named there is over here.
        """
        return self._chase([probe])

    def _chase(self, probes: Iterable[Probe]) -> tuple[list[Probe], Deadlock | None]:
        """Follows the probes of one initiator as far as this process reaches."""
        leaving: list[Probe] = []
        arrived = deque(probes)
        while arrived:
            probe = arrived.popleft()
            if probe.request.target != self._proc:
                leaving.append(probe)
                continue
            found = self._by_actor.get(probe.request.actor)
            # An actor that is not blocked may still answer, and through an explicit port so may others.
            if found is None or self._state(probe.request) not in ("queued", "running"):
                continue
            if (probe.initiator_proc, probe.initiator_actor) != (self._proc, found.actor):
                if found.is_new(probe):
                    arrived.extend(found.onward(probe))
            elif probe.wait == found.number:
                # Over at once: it is about to fail, so no other member need be told because of it.
                self.end(found.number)
                return [], Deadlock(found.number, probe.path)
        return leaving, None
