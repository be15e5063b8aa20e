"""When the ranks of a call are freed, because another rank of it has failed that they wait for. No I/O, no clock.

A rank waits in vain once it has begun more collectives in a group than a member that has failed: that one begins no
more. Each rank is looked at twice, so that one that goes on by itself is left alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

COLLECT = 0.05
"""Seconds after a failure in which those that fail alike, or end, are heard."""
CONFIRM = 0.1
"""Seconds after which a rank that waits in vain is looked at again."""
TELL = 0.4
"""Seconds after which a failure is shown, if other ranks still run."""
PERIOD = 1.0
"""Seconds between two looks at most."""
STUBBORN = 0.5
"""Seconds after which a rank that was freed and did not move is interrupted."""


class Standing(NamedTuple):
    """Where a rank is in a call, as it says itself."""

    rank: int
    """Its rank in the process groups."""
    groups: dict[str, tuple[tuple[int, ...], int]]
    """Of each group by name: its members, and how many collectives the rank has begun in it."""
    making: tuple[tuple[int, ...], ...] = ()
    """Members of the groups that the rank is making."""
    place: tuple[int, ...] = ()
    """Equal as long as the code of the call does not move."""
    sleeps: bool = False
    """Whether the code of the call is in a sleep."""
    generation: int = 0
    """Number of the round in which its groups were made."""
    idle: bool = False
    """Whether the call neither runs there nor waits for its turn."""
    busy: bool = False
    """Whether any call runs there, or waits for its turn, which may join what others wait in."""


def waits_in_vain(standing: Standing, failed: Iterable[Standing]) -> bool:
    """Whether a rank has begun a collective, or the making of a group, that a failed one never joins."""
    for other in failed:
        if other.rank == standing.rank:
            continue
        for name, (members, count) in standing.groups.items():
            if other.rank in members and count > other.groups.get(name, ((), 0))[1]:
                return True
        for members in standing.making:
            has_made = any(known == members for known, _ in other.groups.values())
            if not members or (other.rank in members and not has_made):
                return True
    return False


@dataclass(frozen=True)
class Look:
    """Call ``standing`` with where these are, the failed ones first."""

    positions: tuple[int, ...]


@dataclass(frozen=True)
class Free:
    """Abort what these wait in."""

    positions: tuple[int, ...]


@dataclass(frozen=True)
class Interrupt:
    """Interrupt the code of these: they were freed, and did not move."""

    positions: tuple[int, ...]


@dataclass(frozen=True)
class Tell:
    """The failures so far are to be shown, since others still run."""


Command: TypeAlias = Look | Free | Interrupt | Tell


class FailFast:
    """Calls in which ranks have failed while others run. Positions are those of the view that was addressed.

    Args:
        count: how many ranks were called.
        now: when the first of them failed.
        calls: of each position, the number of its call, if there are several. A rank that has failed in another call
            is waited for in vain only while nothing runs there.
    """

    def __init__(self, count: int, now: float, calls: Sequence[int] = ()) -> None:
        self.freed: set[int] = set()
        """Those that were freed."""
        self._calls = list(calls) or [0] * count
        self._begun = now
        self._due = now + COLLECT
        self._period = CONFIRM
        self._told = False
        self._failed: set[int] = set()
        self._left = set(range(count))
        self._standings: dict[int, Standing] = {}
        self._at_rest: dict[int, int] = {}
        """How often in a row nothing ran at a position, since the last call was added."""
        self.generation = 0
        """The newest round of which a group is of no use any more."""
        self._cut: dict[int, tuple[tuple[int, ...], float]] = {}
        """Of those that were freed: where they were, and when."""
        self._interrupted: set[int] = set()
        self._in_vain: set[int] = set()
        """Those that waited in vain when they were looked at last."""

    def generation_of(self, position: int) -> int:
        """The round in which a rank has made its groups, as it has said last."""
        return self._standings[position].generation

    @property
    def over(self) -> bool:
        """Whether all have ended."""
        return not self._left

    @property
    def watched(self) -> tuple[int, ...]:
        """Those that have failed, and those that have not ended."""
        return (*sorted(self._failed), *sorted(self._left))

    @property
    def frees(self) -> bool:
        """Whether some are about to be freed, or were and have not ended yet."""
        return bool(self._in_vain & self._left)

    @property
    def due(self) -> float:
        """When to call ``tick``."""
        return self._due

    def add(self, call: int, count: int, now: float) -> None:
        """Another call is under way, whose positions come after those that there are."""
        first = len(self._calls)
        self._calls += [call] * count
        self._left.update(range(first, first + count))
        # What was said before may be older than the call.
        self._at_rest.clear()
        self._due = min(self._due, now + COLLECT)

    def failed(self, position: int) -> None:
        """The code of a rank has raised."""
        self._failed.add(position)
        self.ended(position)

    def ended(self, position: int) -> None:
        """A rank has answered, or has died."""
        self._left.discard(position)

    def tick(self, now: float) -> list[Command]:
        """It is time to look."""
        if self.over or now < self._due:
            return []
        commands: list[Command] = [Look(self.watched)]
        if not self._told and now >= self._begun + TELL:
            self._told = True
            commands.append(Tell())
        self._due = now + self._period
        self._period = min(PERIOD, self._period * 2)
        return commands

    def standing(self, position: int, standing: Standing, now: float) -> list[Command]:
        """A rank says where it is."""
        before, self._standings[position] = self._standings.get(position), standing
        self._at_rest[position] = 0 if standing.busy else self._at_rest.get(position, 0) + 1
        if standing.idle and before is not None and before.idle:
            # Nobody may be there to hear its answer. One look alone may be faster than a call by somebody else.
            self.ended(position)
        failed = [self._standings[each] for each in self._never_joining(position)]
        self._in_vain.discard(position)
        if position not in self._left or standing.idle or standing.sleeps or not waits_in_vain(standing, failed):
            return []
        self._in_vain.add(position)
        if before != standing:
            # It may be on its way. One that computes is seen to move, and is not asked more often for that.
            if before is None or (before.groups, before.making) != (standing.groups, standing.making):
                self._due = min(self._due, now + CONFIRM)
            return []
        place, when = self._cut.get(position, ((), 0.0))
        if place != standing.place or position not in self._cut:
            self._cut[position] = standing.place, now
            self.freed.add(position)
            # Of those that are freed only: others may be in groups that were made since.
            self.generation = max(self.generation, standing.generation)
            return [Free((position,))]
        if now >= when + STUBBORN and position not in self._interrupted:
            self._interrupted.add(position)
            return [Interrupt((position,))]
        return []

    def _never_joining(self, position: int) -> list[int]:
        """The positions that have failed, and will not join what this one waits in."""
        call = self._calls[position]
        known = [each for each in sorted(self._failed) if each in self._standings]
        # One look alone may be faster than a call that is on its way there.
        return [each for each in known if self._calls[each] == call or self._at_rest.get(each, 0) > 1]
