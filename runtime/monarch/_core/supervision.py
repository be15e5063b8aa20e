"""What becomes of the deaths in a mesh: who judges them, when ranks are started again, what fails. No I/O, no clock."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from monarch.exceptions import ArgumentError

_LONGEST = 30.0
"""Seconds of back-off at most."""


@dataclass(frozen=True)
class Restart:
    """When the ranks of a mesh that have died are started again without anybody being asked.

    Attributes:
        most: so many times.
        within: in so many seconds; a failure beyond that is for the supervisors of the mesh.
        backoff: seconds before the first restart; each one that follows within the time takes twice as long.
    """

    most: int = 3
    within: float = 60.0
    backoff: float = 0.1

    def __post_init__(self) -> None:
        if self.most < 1 or not self.within > 0 or not 0 <= self.backoff < math.inf:
            raise ArgumentError(
                f"a mesh is restarted at least once, within some seconds, after a back-off that is not negative; "
                f"not most={self.most}, within={self.within}, backoff={self.backoff}"
            )


@dataclass(frozen=True)
class Collect:
    """Failures of one cause come together: ``collect`` is to be called soon."""


@dataclass(frozen=True)
class Begin:
    """These ranks are to be started again after some seconds: the first, or one more, attempt."""

    ranks: tuple[int, ...]
    after: float
    attempt: int


@dataclass(frozen=True)
class Judge:
    """Those who supervise the mesh are to be asked about these ranks; ``judged`` is to be called for each."""

    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Fail:
    """Nobody handles the death of these ranks: all calls to the mesh fail, and if nobody hears of it so, it goes up."""

    ranks: tuple[int, ...]


Command: TypeAlias = Collect | Begin | Judge | Fail


@dataclass
class Supervision:
    """The ranks of one mesh as its owner sees them. Each method takes an event and says what is to be done.

    A process is named together with its rank: news of one that was replaced are no news.
    """

    restart: Restart | None = None
    living: dict[int, str] = field(default_factory=dict[int, str])
    dead: dict[int, str] = field(default_factory=dict[int, str])
    """Ranks whose process has died and was not replaced, with its name."""
    _collecting: bool = False
    _fresh: list[int] = field(default_factory=list[int])
    """Ranks that have died, and of which nobody has decided anything yet."""
    _open: list[dict[int, str]] = field(default_factory=list[dict[int, str]])
    """Judgements under way: the names of the dead by rank."""
    _unhandled: list[list[int]] = field(default_factory=list[list[int]])
    """Of each of these, the ranks that were judged, and that nobody handles."""
    _restarts: deque[float] = field(default_factory=deque[float])
    _starting: dict[int, str] = field(default_factory=dict[int, str])
    """Ranks that are to be started again, with the names of the dead."""

    @property
    def settling(self) -> bool:
        """Whether it is not decided yet what becomes of some ranks."""
        return bool(self._fresh or self._open or self._starting)

    def joined(self, rank: int, name: str) -> list[Command]:
        """A process has the place of this rank from now on."""
        commands = self.left(rank)
        self.living[rank] = name
        return commands

    def left(self, rank: int) -> list[Command]:
        """The mesh has no such rank any more, or has another process there: what was open about it is moot."""
        self.living.pop(rank, None)
        self.dead.pop(rank, None)
        self._starting.pop(rank, None)
        if rank in self._fresh:
            self._fresh.remove(rank)
        commands: list[Command] = []
        for batch in list(self._open):
            if batch.pop(rank, None) is not None:
                commands.extend(self._close(batch))
        for unhandled in self._unhandled:
            if rank in unhandled:
                unhandled.remove(rank)
        return commands

    def died(self, rank: int, name: str, expected: bool) -> list[Command]:
        """A process has died."""
        if self.living.get(rank) != name:
            return []
        del self.living[rank]
        self.dead[rank] = name
        if expected:
            return []
        self._fresh.append(rank)
        asked, self._collecting = self._collecting, True
        return [] if asked else [Collect()]

    def collect(self, now: float) -> list[Command]:
        """Decides about those that have died lately; ``now`` in seconds of any clock that only goes on."""
        fresh, self._fresh = sorted(self._fresh), []
        self._collecting = False
        if not fresh:
            return []
        begin = self.allow(fresh, now)
        if begin is None:
            return self._ask(fresh)
        self._starting.update({rank: self.dead[rank] for rank in fresh})
        return [begin]

    def allow(self, ranks: Sequence[int], now: float) -> Begin | None:
        """A restart, if the rule has one left; also for actors that have failed in processes that live."""
        rule = self.restart
        if rule is None:
            return None
        while self._restarts and self._restarts[0] <= now - rule.within:
            self._restarts.popleft()
        if len(self._restarts) >= rule.most:
            return None
        after = min(_LONGEST, rule.backoff * 2.0 ** len(self._restarts))
        self._restarts.append(now)
        return Begin(tuple(ranks), after, len(self._restarts))

    def not_restarted(self, ranks: Sequence[int]) -> list[Command]:
        """A restart has failed: it is for the supervisors to say what becomes of those that are still dead."""
        left = [rank for rank in ranks if self._starting.pop(rank, None) is not None and rank in self.dead]
        return self._ask(left) if left else []

    def _ask(self, ranks: list[int]) -> list[Command]:
        self._open.append({rank: self.dead[rank] for rank in ranks})
        self._unhandled.append([])
        return [Judge(tuple(ranks))]

    def judged(self, rank: int, name: str, handled: bool) -> list[Command]:
        """Somebody who supervises has said whether the death of a process is dealt with."""
        for batch, unhandled in zip(list(self._open), self._unhandled, strict=True):
            if batch.get(rank) == name:
                del batch[rank]
                if not handled:
                    unhandled.append(rank)
                return self._close(batch)
        return []

    def _close(self, batch: dict[int, str]) -> list[Command]:
        """The end of a judgement, if all of it were judged."""
        if batch:
            return []
        at = next(index for index, each in enumerate(self._open) if each is batch)
        del self._open[at]
        unhandled = self._unhandled.pop(at)
        return [Fail(tuple(sorted(unhandled)))] if unhandled else []
