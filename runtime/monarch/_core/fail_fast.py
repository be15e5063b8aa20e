"""When to free the ranks of a call that wait for a failed rank. No I/O, no clock.

A rank waits in vain once it has begun more collectives in a group than a failed member: that member begins no more.
Each rank is checked twice, so that a rank that makes progress is left alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

COLLECT = 0.05
"""Seconds after a failure in which ranks that fail alike, or end, still report."""
CONFIRM = 0.1
"""Seconds until a rank that waits in vain is checked again."""
TELL = 0.4
"""Seconds until a failure is shown while other ranks still run."""
PERIOD = 1.0
"""Maximum seconds between two checks."""
STUBBORN = 0.5
"""Seconds until a rank that was freed but did not move is interrupted."""


class CallState(NamedTuple):
    """Where a rank is in a call, by its own report."""

    rank: int
    """Its rank in the process groups."""
    groups: dict[str, tuple[tuple[int, ...], int]]
    """By group name: its members, and how many collectives the rank has begun in it."""
    making: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Name and members of the groups that the rank is creating; without members, one that is unknown."""
    place: tuple[int, ...] = ()
    """Unchanged as long as the code of the call does not move."""
    sleeps: bool = False
    """Whether the code of the call sleeps."""
    generation: int = 0
    """Generation of its process groups."""
    idle: bool = False
    """Whether the call neither runs there nor waits for its turn."""
    busy: bool = False
    """Whether any call runs there, or waits for its turn, and so may join what others wait in."""
    made: tuple[str, ...] = ()
    """Names of the groups that the rank has created in this generation; ``groups`` may have them under other names."""
    gate: int = 0
    """Port of the only call that runs there, if it joins nothing until all calls with lower ports have ended."""


def waits_in_vain(standing: CallState, failed: Iterable[CallState]) -> bool:
    """Return whether a rank has begun a collective, or group creation, that a failed rank never joins."""
    for other in failed:
        if other.rank == standing.rank:
            continue
        for name, (members, count) in standing.groups.items():
            if other.rank in members and count > other.groups.get(name, ((), 0))[1]:
                return True
        for name, members in standing.making:
            if not members or (other.rank in members and name not in other.made):
                return True
    return False


@dataclass(frozen=True)
class Look:
    """Call ``standing`` with the state of these ranks, the failed ones first."""

    positions: tuple[int, ...]


@dataclass(frozen=True)
class Free:
    """Abort what these ranks wait in."""

    positions: tuple[int, ...]


@dataclass(frozen=True)
class Interrupt:
    """Interrupt the code of these ranks: they were freed but did not move."""

    positions: tuple[int, ...]


@dataclass(frozen=True)
class Tell:
    """Show the failures so far, since other ranks still run."""


Command: TypeAlias = Look | Free | Interrupt | Tell


class FailFast:
    """Calls in which some ranks failed while others run. Positions are those of the addressed view.

    Args:
        count: how many ranks were called.
        now: time of the first failure.
        calls: for each position, the number of its call, if there are several. A rank that failed in another call
            counts as absent only while nothing runs there, or only a call that waits for the end of this one.
        ports: the ports of the calls, by their numbers.
    """

    def __init__(self, count: int, now: float, calls: Sequence[int] = (), ports: Sequence[int] = ()) -> None:
        self.freed: set[int] = set()
        """Freed ranks."""
        self._calls = list(calls) or [0] * count
        self._ports = dict(enumerate(ports))
        self._begun = now
        self._due = now + COLLECT
        self._period = CONFIRM
        self._told = False
        self._failed: set[int] = set()
        self._left = set(range(count))
        self._standings: dict[int, CallState] = {}
        self._at_rest: dict[int, int] = {}
        """By position: how often in a row nothing ran there, since the last call was added."""
        self.generation = 0
        """The newest generation with an unusable group."""
        self._cut: dict[int, tuple[tuple[int, ...], float]] = {}
        """Of freed ranks: their state, and the time."""
        self._interrupted: set[int] = set()
        self._in_vain: set[int] = set()
        """Ranks that waited in vain at the last check."""

    def generation_of(self, position: int) -> int:
        """Return the generation of a rank's groups, by its last report."""
        return self._standings[position].generation

    @property
    def over(self) -> bool:
        """Whether all ranks have ended."""
        return not self._left

    @property
    def watched(self) -> tuple[int, ...]:
        """The failed ranks, and the running ones."""
        return (*sorted(self._failed), *sorted(self._left))

    @property
    def frees(self) -> bool:
        """Whether some ranks are about to be freed, or were freed and have not ended yet."""
        return bool(self._in_vain & self._left)

    @property
    def due(self) -> float:
        """When to call ``tick``."""
        return self._due

    def add(self, call: int, count: int, now: float, port: int = 0) -> None:
        """Add another call, whose positions come after the existing ones."""
        first = len(self._calls)
        self._ports[call] = port
        self._calls += [call] * count
        self._left.update(range(first, first + count))
        # Earlier reports may be older than the call.
        self._at_rest.clear()
        self._due = min(self._due, now + COLLECT)

    def failed(self, position: int) -> None:
        """Note that the code of a rank has raised."""
        self._failed.add(position)
        self.ended(position)

    def ended(self, position: int) -> None:
        """Note that a rank has answered, or has died."""
        self._left.discard(position)

    def tick(self, now: float) -> list[Command]:
        """Run the check that is due."""
        if self.over or now < self._due:
            return []
        commands: list[Command] = [Look(self.watched)]
        if not self._told and now >= self._begun + TELL:
            self._told = True
            commands.append(Tell())
        self._due = now + self._period
        self._period = min(PERIOD, self._period * 2)
        return commands

    def standing(self, position: int, standing: CallState, now: float) -> list[Command]:
        """Note a rank's report of its state."""
        before, self._standings[position] = self._standings.get(position), standing
        self._at_rest[position] = 0 if standing.busy and not standing.gate else self._at_rest.get(position, 0) + 1
        if standing.idle and before is not None and before.idle:
            # No caller may be waiting for its answer. A single check may overtake a call from elsewhere.
            self.ended(position)
        failed = [self._standings[each] for each in self._never_joining(position)]
        self._in_vain.discard(position)
        if position not in self._left or standing.idle or standing.sleeps or not waits_in_vain(standing, failed):
            return []
        self._in_vain.add(position)
        if before != standing:
            # It may be on its way. A rank that computes is seen to move, and is not asked more often for that.
            if before is None or (before.groups, before.making) != (standing.groups, standing.making):
                self._due = min(self._due, now + CONFIRM)
            return []
        place, when = self._cut.get(position, ((), 0.0))
        if place != standing.place or position not in self._cut:
            self._cut[position] = standing.place, now
            self.freed.add(position)
            # Only for ranks that are freed: others may be in groups that were created since.
            self.generation = max(self.generation, standing.generation)
            return [Free((position,))]
        if now >= when + STUBBORN and position not in self._interrupted:
            self._interrupted.add(position)
            return [Interrupt((position,))]
        return []

    def _never_joining(self, position: int) -> list[int]:
        """Return the failed positions that will not join what this rank waits in."""
        call = self._calls[position]
        known = [each for each in sorted(self._failed) if each in self._standings]
        # A single check may overtake a call that is on its way there.
        return [each for each in known if self._calls[each] == call or self._rests(each, call)]

    def _rests(self, failed: int, call: int) -> bool:
        """Return whether nothing runs at a position that might join a collective of a call."""
        standing, port = self._standings[failed], self._ports.get(call, 0)
        return self._at_rest.get(failed, 0) > 1 and (not standing.busy or 0 < port < standing.gate)
