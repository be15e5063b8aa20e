"""Ranks that wait in a collective for ranks that have finished. No I/O, no clock.

A finished rank has not joined a collective if it has begun fewer in that group. Point-to-point operations count as
well, so counts may also differ legitimately: a wait in a collective that ranks may leave early (``gather``) is reported
only once no rank is left that could be slow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from monarch._core.fail_fast import CallState

SYMMETRIC = frozenset(
    {
        "barrier", "all_reduce", "all_reduce_coalesced", "all_gather", "all_gather_single", "all_gather_into_tensor",
        "all_gather_coalesced", "all_gather_object", "reduce_scatter", "reduce_scatter_single",
        "reduce_scatter_tensor", "all_to_all", "all_to_all_single",
    }
)  # fmt: skip
"""Collectives that no rank leaves before all have joined."""

_AGAIN = 10.0
"""Factor between the waiting times of two reports of one wait."""


class CollectiveWait(NamedTuple):
    """A collective that a rank waits in."""

    rank: int
    operation: str
    """Name of the torch function; empty if unknown."""
    group: str
    """torch's name of the process group."""
    members: tuple[int, ...]
    """Ranks of the group."""
    is_default: bool
    number: int
    """How many collectives the rank has begun in the group; 0 during group creation."""
    peers: tuple[int, ...] = ()
    """The peers of a point-to-point operation."""
    place: tuple[int, ...] = ()
    """Unchanged as long as the code does not move."""


@dataclass(frozen=True)
class UnjoinedRanks:
    """Ranks that wait in one collective, and ranks of its group that have finished without joining it."""

    waits: CollectiveWait
    """The wait of the first one."""
    ranks: tuple[int, ...]
    absent: tuple[int, ...]
    seconds: float
    """Minimum seconds that all of ``ranks`` were seen to wait."""


def never_joining(waits: CollectiveWait, finished: Mapping[int, CallState]) -> tuple[int, ...]:
    """Return the finished ranks that a rank waits for in vain; empty if others may still join, or if unknown."""
    if waits.peers:
        return waits.peers if all(peer in finished for peer in waits.peers) else ()
    others = {each for each in waits.members if each != waits.rank}
    absent = {each for each in others & finished.keys() if _has_not_joined(waits, finished[each])}
    may_be_slow = waits.operation not in SYMMETRIC and not others <= finished.keys()
    return () if may_be_slow else tuple(sorted(absent))


def _has_not_joined(waits: CollectiveWait, other: CallState) -> bool:
    return not waits.number or other.groups.get(waits.group, ((), 0))[1] < waits.number


class Unjoined:
    """The ranks of one mesh, some of which have finished while others wait.

    Args:
        limit: seconds of waiting before a rank is reported.
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._waits: dict[int, tuple[CollectiveWait, float]] = {}
        """By rank, what it waits in, and since when."""
        self._finished: dict[int, tuple[CallState, int]] = {}
        """By rank, its position, and in how many checks in a row nothing ran there."""
        self._next: dict[tuple[int, str, int, tuple[int, ...]], float] = {}
        """By reported wait, the seconds after which it is reported again."""
        self._now = 0.0
        """Time of the last note."""

    @property
    def members(self) -> set[int]:
        """Return the ranks of the groups that ranks wait in, without recently reported waits."""
        return {
            each
            for waits, since in self._waits.values()
            if self._now - since >= self._next.get(_key(waits), 0.0)
            for each in waits.members
        }

    def forget(self, rank: int) -> None:
        """Treat the next waits of a rank as new, since it runs another call than before, or none."""
        self._waits.pop(rank, None)
        self._next = {key: seconds for key, seconds in self._next.items() if key[0] != rank}

    def waiting(self, rank: int, waits: CollectiveWait | None, now: float) -> None:
        """Note the report of an unfinished rank: the collective that it waits in, if any."""
        self._now = now
        known = self._waits.get(rank)
        if waits is None:
            self._waits.pop(rank, None)
        elif known is None or known[0] != waits:
            self._waits[rank] = waits, now
        self._finished.pop(rank, None)

    def standing(self, rank: int, standing: CallState) -> None:
        """Note the report of a rank that owes nothing."""
        self._waits.pop(rank, None)
        if standing.busy:
            self._finished.pop(rank, None)
            return
        before, looks = self._finished.get(rank, (standing, 0))
        self._finished[rank] = standing, looks + 1 if before.groups == standing.groups else 1

    def findings(self, now: float) -> list[UnjoinedRanks]:
        """Return new findings, and those that last ten times as long as when they were reported."""
        # A single check may overtake a call that is on its way there.
        finished = {rank: standing for rank, (standing, looks) in self._finished.items() if looks > 1}
        groups: dict[tuple[str, str, int, tuple[int, ...]], list[tuple[CollectiveWait, float]]] = {}
        for waits, since in self._waits.values():
            absent = never_joining(waits, finished)
            if absent and now - since >= self._next.get(_key(waits), self._limit):
                self._next[_key(waits)] = (now - since) * _AGAIN
                key = (waits.operation, waits.group, waits.number, absent)
                groups.setdefault(key, []).append((waits, since))
        return [self._finding(each, absent, now) for (_, _, _, absent), each in groups.items()]

    def _finding(
        self, several: list[tuple[CollectiveWait, float]], absent: tuple[int, ...], now: float
    ) -> UnjoinedRanks:
        ranks = tuple(sorted(waits.rank for waits, _ in several))
        return UnjoinedRanks(several[0][0], ranks, absent, now - max(since for _, since in several))


def _key(waits: CollectiveWait) -> tuple[int, str, int, tuple[int, ...]]:
    return waits.rank, waits.group, waits.number, waits.place
