"""The policy of Stop: which rank gets which rung of the ladder, and when. No I/O, no clock.

All ranks are on the same rung at the same time, so the ladder takes as long for 256 ranks as for one: an interrupt, an
abort of what they wait in, a second interrupt with a look at their state, and a restart of those that swallow
interrupts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto
from typing import TypeAlias

FREE_AT = 0.5
"""Seconds until ranks are freed from what they wait in."""
INSIST_AT = 0.8
"""Seconds until the others are interrupted again."""
LOOK_AT = 0.95
"""Seconds until ranks are asked for their state."""
LOOK_UNTIL = 1.2
"""Seconds until answers are no longer awaited."""
PATIENCE = 3.0
"""Seconds for the answers of ranks that wait for a CPU, and of host agents on a busy machine."""
PATIENCE_AFAR = 0.4
"""Seconds for the answers of host agents of other hosts: a busy one is not told from one that hangs."""
GRACE = 0.3
"""Seconds between the warning and the restart of a rank: it may have just come out of a C call."""
BOUND = LOOK_UNTIL + GRACE
"""Maximum seconds of the ladder, if ``tick`` is called when due and no rank waits for a CPU; on a busy machine its
lateness is added, so that ranks have as long to answer."""
_WITHOUT_CPU = 0.25
"""Fraction of the time that a rank waits for a CPU from which it has more time to answer."""
_ENOUGH_CPU = 0.1
"""Seconds of CPU that are enough for an answer. It takes several turns of the GIL, each within a few milliseconds if
the running code gives it up at all."""


class Activity(Enum):
    """The state of a rank that does not stop."""

    PYTHON = auto()
    """Its Python code keeps running after each interrupt."""
    CLEANING = auto()
    """It has taken the interrupt, and runs its ``except`` or ``finally`` code or what follows."""
    COMPUTING = auto()
    """It is in C code that computes, or sleeps for a while."""
    WAITING = auto()
    """It is in C code that waits: for a lock, a socket or another thread."""
    SILENT = auto()
    """It does not answer: it is in C code that holds the GIL."""
    UNKNOWN = auto()
    """Neither it nor its host agent answers."""
    SUSPENDED = auto()
    """Its process is suspended by a signal, or by a debugger."""
    DEVICE = auto()
    """Its process waits in the kernel for a disk or a device."""


class Ending(Enum):
    """How a stop ended for a rank."""

    INTERRUPTED = auto()
    """Its code ended by itself or by an interrupt."""
    FREED = auto()
    """Its code ended after what it waited in was aborted."""
    LEFT = auto()
    """It still runs."""
    RESTARTED = auto()
    """A new process has replaced it."""


class Freed(Enum):
    """The wait that a rank was freed from."""

    NOTHING = auto()
    COLLECTIVE = auto()
    """Its process groups; the next use creates them again."""
    CONNECTION = auto()
    """A connection that it waited on, such as one to a store."""
    WAIT = auto()
    """A wait within its process."""


@dataclass(frozen=True)
class Interrupt:
    """Interrupt these ranks for the first time."""

    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Free:
    """Abort what these ranks wait in, and call ``freed`` for each that had something to abort."""

    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Insist:
    """Interrupt these ranks again, to see whether they swallow interrupts."""

    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Look:
    """Call ``seen`` with the state of each of these ranks."""

    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Announce:
    """Tell the user that these ranks are about to be restarted, and that their variables are lost."""

    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Replace:
    """Replace these ranks with new processes."""

    ranks: tuple[int, ...]


Command: TypeAlias = Interrupt | Free | Insist | Look | Announce | Replace


class _Stage(Enum):
    POLITE = auto()
    FREEING = auto()
    INSISTING = auto()
    LOOKING = auto()
    GRACE = auto()
    OVER = auto()


_LASTS = {
    _Stage.POLITE: FREE_AT,
    _Stage.FREEING: INSIST_AT - FREE_AT,
    _Stage.INSISTING: LOOK_AT - INSIST_AT,
    _Stage.LOOKING: LOOK_UNTIL - LOOK_AT,
    _Stage.GRACE: GRACE,
}
"""Maximum seconds of each stage, from its start."""


def starves(elapsed: float, ran: float, waited: float) -> bool:
    """Return whether a rank may not have answered because other processes have the CPUs.

    Args:
        elapsed: seconds that it was observed.
        ran: seconds of CPU that it had in them.
        waited: seconds in which it was ready to run and had no CPU.
    """
    return waited > _WITHOUT_CPU * elapsed and ran < _ENOUGH_CPU


class StopLadder:
    """One stop of some ranks. Each method takes an event and the time, and returns the actions.

    Args:
        ranks: those that still run.
        restartable: whether a rank that swallows interrupts is restarted at once; actors only at the second stop.
        again: ranks that the last stop announced the next one would restart.
        afar: ranks on other hosts.
    """

    def __init__(
        self,
        ranks: Iterable[int],
        restartable: bool = True,
        again: Iterable[int] = (),
        afar: Iterable[int] = (),
    ) -> None:
        self.endings: dict[int, Ending] = {}
        """The outcome of each rank that has one."""
        self._left = sorted(set(ranks))
        self._restartable = restartable
        self._again = set(again)
        self._afar = set(afar)
        self._stage = _Stage.POLITE
        self._since = 0.0
        """Start of the stage."""
        self._freed: set[int] = set()
        self._ended_by_then: set[int] = set()
        """Ranks that ended between the abort of what they waited in and the next rung."""
        self._seen: dict[int, Activity] = {}
        self._glimpsed: dict[int, Activity] = {}
        """State seen from outside before the look, of ranks that the look does not reach."""
        self._starved: set[int] = set()
        self._heard_of: set[int] = set()
        """Ranks that the host agent has reported on."""
        self._doomed: tuple[int, ...] = ()

    @property
    def over(self) -> bool:
        """Whether there is nothing more to wait for."""
        return self._stage is _Stage.OVER

    @property
    def _frees(self) -> bool:
        return self._stage is _Stage.FREEING

    @property
    def due(self) -> float:
        """When to call ``tick`` at the latest."""
        lasts = _LASTS.get(self._stage, 0.0)
        if self._stage is _Stage.LOOKING:
            lasts = max([lasts, *map(self._patience, self._left)])
        return self._since + lasts

    def activity(self, rank: int) -> Activity:
        """Return the last known state of a rank that still runs."""
        silent = Activity.SILENT if rank in self._heard_of else Activity.UNKNOWN
        return self._seen.get(rank) or self._glimpsed.get(rank, silent)

    # Events

    def begin(self, now: float) -> list[Command]:
        """Begin the stop."""
        self._since = now
        if not self._left:
            self._stage = _Stage.OVER
            return []
        return [Interrupt(tuple(self._left))]

    def stopped(self, rank: int, now: float) -> list[Command]:
        """Note that the code of a rank has ended."""
        if rank in self._left and not self.over:
            self._left.remove(rank)
            self.endings[rank] = Ending.FREED if rank in self._freed and self._frees else Ending.INTERRUPTED
            if self._frees:
                self._ended_by_then.add(rank)
        return self.tick(now)

    def freed(self, rank: int) -> None:
        """Note that a rank's wait was aborted; this may arrive after the end that it caused."""
        self._freed.add(rank)
        if rank in self._ended_by_then:
            self.endings[rank] = Ending.FREED

    def seen(self, rank: int, activity: Activity, now: float) -> list[Command]:
        """Note a rank's state; its own report overrides what is seen from outside."""
        if rank in self._left:
            self._seen[rank] = activity
        return self.tick(now)

    def glimpsed(self, rank: int, activity: Activity | None) -> list[Command]:
        """Note a rank's state as seen from outside; None if it is not stopped by the OS."""
        self._heard_of.add(rank)
        if activity is None:
            self._glimpsed.pop(rank, None)
        else:
            self._glimpsed[rank] = activity
        return []

    def starved(self, rank: int) -> list[Command]:
        """Note that a rank waits for a CPU, so that its answer takes longer."""
        self._starved.add(rank)
        return []

    def tick(self, now: float) -> list[Command]:
        """Advance after a timer or an event."""
        commands: list[Command] = []
        while not self.over and (not self._left or now >= self.due or self._nothing_to_wait_for()):
            commands.extend(self._next())
            self._since = now
        return commands

    # Stages

    def _patience(self, rank: int) -> float:
        """Return the seconds for the answer of a rank, or about it, that may just take longer than usual."""
        if rank in self._seen or (rank in self._heard_of and rank not in self._starved):
            return 0.0
        return PATIENCE_AFAR if rank in self._afar and rank not in self._heard_of else PATIENCE

    def _nothing_to_wait_for(self) -> bool:
        if self._stage is _Stage.GRACE:
            return not set(self._doomed) & set(self._left)
        return self._stage is _Stage.LOOKING and all(rank in self._seen for rank in self._left)

    def _next(self) -> list[Command]:
        left = tuple(self._left)
        if not left:
            self._stage = _Stage.OVER
            return []
        if self._stage is _Stage.POLITE:
            self._stage = _Stage.FREEING
            return [Free(left)]
        if self._stage is _Stage.FREEING:
            self._stage = _Stage.INSISTING
            return [Insist(left)]
        if self._stage is _Stage.INSISTING:
            self._stage = _Stage.LOOKING
            return [Look(left)]
        if self._stage is _Stage.LOOKING:
            self._doomed = tuple(rank for rank in left if self._is_doomed(rank))
            self._stage = _Stage.GRACE
            return [Announce(self._doomed)] if self._doomed else []
        return self._close()

    def _is_doomed(self, rank: int) -> bool:
        return rank in self._again or (self._restartable and self.activity(rank) is Activity.PYTHON)

    def _close(self) -> list[Command]:
        self._stage = _Stage.OVER
        # On a busy machine a rank may report only now that it swallows interrupts.
        doomed = tuple(rank for rank in self._left if rank in self._doomed or self._is_doomed(rank))
        for rank in self._left:
            self.endings[rank] = Ending.RESTARTED if rank in doomed else Ending.LEFT
        late = tuple(rank for rank in doomed if rank not in self._doomed)
        return [*([Announce(late)] if late else []), *([Replace(doomed)] if doomed else [])]
