"""Decisions after deaths in a mesh: who judges them, when ranks restart, what fails. No I/O, no clock."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from monarch.exceptions import ArgumentError

_LONGEST = 30.0
"""Maximum seconds of back-off."""


@dataclass(frozen=True)
class Restart:
    """When dead ranks of a mesh restart automatically.

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
                f"restart rule: expected most >= 1, within > 0 and backoff >= 0, got "
                f"most={self.most}, within={self.within}, backoff={self.backoff}"
            )


@dataclass(frozen=True)
class Collect:
    """Collect failures of one cause: call ``collect`` soon."""


@dataclass(frozen=True)
class Begin:
    """Restart these ranks after some seconds: the first attempt, or another one."""

    ranks: tuple[int, ...]
    after: float
    attempt: int


@dataclass(frozen=True)
class Judge:
    """Ask the supervisors of the mesh about these ranks; call ``judged`` for each."""

    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Fail:
    """The death of these ranks is unhandled: all calls to the mesh fail, and if no caller learns of it that way, it
    escalates."""

    ranks: tuple[int, ...]


Command: TypeAlias = Collect | Begin | Judge | Fail


@dataclass
class Supervision:
    """The ranks of one mesh, as the owner sees them. Each method takes an event and returns the actions.

    A process is named together with its rank: news of a replaced process is ignored.
    """

    restart: Restart | None = None
    living: dict[int, str] = field(default_factory=dict[int, str])
    dead: dict[int, str] = field(default_factory=dict[int, str])
    """Ranks whose process died and was not replaced, with its name."""
    _collecting: bool = False
    _fresh: list[int] = field(default_factory=list[int])
    """Dead ranks without a decision."""
    _open: list[dict[int, str]] = field(default_factory=list[dict[int, str]])
    """Judgements under way: the names of the dead processes by rank."""
    _unhandled: list[list[int]] = field(default_factory=list[list[int]])
    """For each of these: the ranks judged, and the unhandled ones."""
    _restarts: deque[float] = field(default_factory=deque[float])
    _starting: dict[int, str] = field(default_factory=dict[int, str])
    """Ranks about to restart, with the names of the dead processes."""

    @property
    def settling(self) -> bool:
        """Whether a decision about some ranks is pending."""
        return bool(self._fresh or self._open or self._starting)

    def joined(self, rank: int, name: str) -> list[Command]:
        """Note that a process has the place of this rank from now on."""
        commands = self.left(rank)
        self.living[rank] = name
        return commands

    def left(self, rank: int) -> list[Command]:
        """Forget a rank that the mesh no longer has, or that has another process: open decisions are moot."""
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
        """Note that a process has died."""
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
        """Decide about recent deaths; ``now`` in seconds of any monotonic clock."""
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
        """Plan a restart, if the rule allows another; also for actors that failed in live processes."""
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
        """Note that a restart failed: the supervisors decide about the ranks that are still dead."""
        left = [rank for rank in ranks if self._starting.pop(rank, None) is not None and rank in self.dead]
        return self._ask(left) if left else []

    def _ask(self, ranks: list[int]) -> list[Command]:
        self._open.append({rank: self.dead[rank] for rank in ranks})
        self._unhandled.append([])
        return [Judge(tuple(ranks))]

    def judged(self, rank: int, name: str, handled: bool) -> list[Command]:
        """Note a supervisor's decision about the death of a process."""
        for batch, unhandled in zip(list(self._open), self._unhandled, strict=True):
            if batch.get(rank) == name:
                del batch[rank]
                if not handled:
                    unhandled.append(rank)
                return self._close(batch)
        return []

    def _close(self, batch: dict[int, str]) -> list[Command]:
        """End a judgement once all of it is judged."""
        if batch:
            return []
        at = next(index for index, each in enumerate(self._open) if each is batch)
        del self._open[at]
        unhandled = self._unhandled.pop(at)
        return [Fail(tuple(sorted(unhandled)))] if unhandled else []
