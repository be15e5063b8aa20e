"""Deadlock detection between actors, by probes that follow their waits.

The method is edge chasing (Chandy, Misra and Haas, "Distributed Deadlock Detection", 1983) in the AND model: a waiting
actor waits for all of its requests. A probe starts at a waiting actor, goes to each actor that it waits for, and on
from there if that one waits too. If the probe comes back to its start, there is a deadlock.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from typing import Literal, NamedTuple, TypeAlias

State: TypeAlias = Literal["queued", "running", "explicit"]
"""State of a request at its target: waiting for its turn, being handled, or being handled by an endpoint with an
explicit response port, through which any actor may answer."""

# How many initiators a wait remembers; enough that one is forgotten only long after its probes are gone.
_REMEMBERED = 1 << 16


class PendingRequest(NamedTuple):
    """A request whose reply an actor waits for."""

    proc: str
    """The process that sent the request."""
    port: int
    """Port of the reply in that process."""
    target: str
    """The process of the actor that must answer."""
    actor: str
    """The key of that actor in its process."""


Text: TypeAlias = Callable[[PendingRequest], str]
"""Describe the wait: ``a[gpus=0].ping waits for b[gpus=0].pong``."""


class Probe(NamedTuple):
    """Tells the target of a request that the initiator waits for it through a chain of waits."""

    initiator_proc: str
    initiator_actor: str
    wait: int
    """The initiator's wait, as numbered in its process."""
    round: int
    """How often the initiator has probed during this wait."""
    request: PendingRequest
    """The last request of the chain; the probe goes to its ``target``."""
    path: tuple[str, ...]
    """A description of each wait of the chain, the initiator's first."""


class Deadlock(NamedTuple):
    """A wait that can never end, because it is part of a deadlock."""

    wait: int
    path: tuple[str, ...]
    """A description of each wait of the deadlock, such as ``a.ping waits for b.pong``, starting with this wait."""

    def message(self) -> str:
        """Return the text of the error that this wait fails with."""
        if len(self.path) == 1:
            headline = "an actor waits for itself but handles one message at a time:"
        else:
            headline = f"{len(self.path)} actors wait for each other:"
        advice = (
            "Make one of these endpoints async, declare it with @endpoint(concurrent=True) and await its call, "
            "or do not wait for its reply."
        )
        return "\n".join([headline, *(f"  {hop}" for hop in self.path), advice])


class _Wait:
    """One actor's wait."""

    __slots__ = ("actor", "number", "requests", "round", "seen", "text")

    def __init__(self, number: int, actor: str, requests: Iterable[PendingRequest], text: Text) -> None:
        self.number = number
        self.actor = actor
        # Unanswered requests; a dict, to keep their order.
        self.requests = dict.fromkeys(requests)
        self.text = text
        self.round = 0
        # By initiator: the wait and round of its last probe that was forwarded from here.
        self.seen: OrderedDict[tuple[str, str], tuple[int, int]] = OrderedDict()

    def is_new(self, probe: Probe) -> bool:
        """Return whether to forward a probe from here: once a round, and never for an earlier round."""
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
        """Yield the probe, one step further along each request of this wait."""
        for request in self.requests:
            yield probe._replace(request=request, path=(*probe.path, self.text(request)))


class WaitGraph:
    """The waits of the actors of one process, and the probes that follow them.

    There are no false alarms as long as waits end only by their replies: a chain that a probe has seen can change only
    when an actor ahead of it answers, and each of those waits too. So do not register a wait that may end in another
    way, such as one with a timeout.

    A deadlock is found by the first member that probes once it is complete: all its members have begun their waits and
    the requests have arrived. Nobody knows when that is, so probe again from time to time. That also makes up for a
    probe that was lost or came before its request.

    One ``ask`` makes at most one probe for each pending request, in all processes together.

    No I/O and no lock: the caller sends and delivers the probes, and makes one call at a time. ``state`` and ``text``
    are called back during these calls.

    Args:
        proc: the id of this process.
        state: the state of a request to an actor of this process; None if it is not here, or answered.
    """

    def __init__(self, proc: str, state: Callable[[PendingRequest], State | None]) -> None:
        self._proc = proc
        self._state = state
        self._numbers = count(1)
        self._waits: dict[int, _Wait] = {}
        self._by_actor: dict[str, _Wait] = {}

    def begin(self, actor: str, requests: Iterable[PendingRequest], text: Text) -> int:
        """Register that an actor, which handles one message at a time, is blocked until all requests are answered.

        Args:
            actor: its key in this process.
            requests: those without a reply.
            text: describes the wait for a request; called only when a probe passes.

        Returns:
            A number for this wait, ascending in this process.

        Raises:
            ValueError: the actor waits already.
        """
        if actor in self._by_actor:
            raise ValueError(f"actor {actor!r} is already waiting")
        wait = _Wait(next(self._numbers), actor, requests, text)
        self._waits[wait.number] = self._by_actor[actor] = wait
        return wait.number

    def requests(self, wait: int) -> list[PendingRequest]:
        """Return the unanswered requests of a wait; empty if it has ended."""
        entry = self._waits.get(wait)
        return list(entry.requests) if entry is not None else []

    def answered(self, wait: int, request: PendingRequest) -> None:
        """Note that a reply has arrived; does nothing if the wait has ended."""
        entry = self._waits.get(wait)
        if entry is not None:
            entry.requests.pop(request, None)

    def end(self, wait: int) -> None:
        """Note that the actor continues for any reason; does nothing if the wait has ended."""
        entry = self._waits.pop(wait, None)
        if entry is not None:
            del self._by_actor[entry.actor]

    def probes(self, wait: int) -> tuple[list[Probe], Deadlock | None]:
        """Check whether a wait is part of a deadlock.

        Returns:
            The probes to send, each to the target of its request; and the deadlock, if one lies within this
            process. In that case the wait has ended.
        """
        entry = self._waits.get(wait)
        if entry is None:
            return [], None
        entry.round += 1
        none = PendingRequest(self._proc, 0, self._proc, entry.actor)
        start = Probe(self._proc, entry.actor, wait, entry.round, none, ())
        return self._chase(entry.onward(start))

    def receive(self, probe: Probe) -> tuple[list[Probe], Deadlock | None]:
        """Process a probe that has arrived.

        Returns:
            The probes to send, each to the target of its request; and the deadlock that this one has
            closed, if it has. In that case the wait named there has ended.
        """
        return self._chase([probe])

    def _chase(self, probes: Iterable[Probe]) -> tuple[list[Probe], Deadlock | None]:
        """Follow the probes of one initiator as far as this process reaches."""
        leaving: list[Probe] = []
        arrived = deque(probes)
        while arrived:
            probe = arrived.popleft()
            if probe.request.target != self._proc:
                leaving.append(probe)
                continue
            entry = self._by_actor.get(probe.request.actor)
            # An actor that is not blocked may still answer; through an explicit port, so may others.
            if entry is None or self._state(probe.request) not in ("queued", "running"):
                continue
            if (probe.initiator_proc, probe.initiator_actor) != (self._proc, entry.actor):
                if entry.is_new(probe):
                    arrived.extend(entry.onward(probe))
            elif probe.wait == entry.number:
                # End this wait now: it is about to fail, so no other member need learn of it.
                self.end(entry.number)
                return [], Deadlock(entry.number, probe.path)
        return leaving, None
