"""Looks at the running call of this rank, in the receiving thread: a few reads, no user code."""

from __future__ import annotations

import math
import sys
import time
from threading import get_ident
from typing import TYPE_CHECKING, NamedTuple

from monarch._actors.pausing.gate import gate
from monarch._core.places import is_ours, place_of
from monarch._core.telemetry.events import Collective, RankState
from monarch._procs.os.blocked import WaitKind, blocked, ran_on_cpu
from monarch._python.frames import frame_of
from monarch._supervision.freeing import thread_of

if TYPE_CHECKING:
    from types import FrameType

    from monarch._actors.mailbox import Mailbox
    from monarch._core.unjoined import CollectiveWait

BLOCKED_S = 0.5
"""Seconds without running after which code counts as blocked in a C call."""


still: dict[int, float] = {}
"""By thread, since when, on the monotonic clock, it has certainly not run. Written by the receiving thread only, as one
entry; the last thread that was looked at."""


class RankSample(NamedTuple):
    """The state of a rank."""

    state: RankState
    place: str = ""
    since: float = 0.0
    """Seconds since the epoch when it came into this state."""
    collective: Collective | None = None


class Sampler:
    """Tells running code from code that waits. Receiving thread only."""

    def __init__(self) -> None:
        self._state: RankState = RankState.IDLE
        self._since = time.time()
        self._ran = 0, 0.0
        """The thread at the last look, and its CPU seconds."""
        self._still = 0.0
        """Since when, on the monotonic clock, these have not changed."""

    def look(self, mailbox: Mailbox | None, rank: int) -> RankSample:
        """Return what the rank does.

        Args:
            mailbox: the mailbox of the actor that runs a call; None if none does.
            rank: the rank of this process.
        """
        if mailbox is None:
            self._forget()
            return self._found(RankState.IDLE, "", None)
        ident = thread_of(mailbox)
        paused = gate.paused_in(ident)
        if paused is not None:
            self._forget()
            # Each pause has its own time, although a step in between may have been too short to be seen.
            self._state = RankState.PAUSED
            self._since = max(self._since, gate.since)
            return RankSample(RankState.PAUSED, place_of(paused), self._since, None)
        frame = frame_of(ident)
        still = self._still_for(ident)
        if ident == get_ident() or frame is None:
            # It waits in a call of its own, and receives meanwhile.
            return self._found(RankState.RUNNING, place_of(frame), None)
        waits = _collective(frame, rank, ident, still)
        state = RankState.RUNNING
        if waits is not None:
            state = RankState.COLLECTIVE
        elif still >= BLOCKED_S and mailbox.executor.loop is None and not is_ours(frame):
            state = RankState.BLOCKED
        return self._found(state, place_of(frame), waits, 0.0 if state is RankState.RUNNING else still)

    def _found(self, state: RankState, place: str, waits: Collective | None, ago: float = 0.0) -> RankSample:
        if state is not self._state:
            # Not before the last state: the monotonic clock is read a moment earlier than this one.
            self._state, self._since = state, max(self._since, time.time() - ago)
        return RankSample(state, place, self._since, waits)

    def _forget(self) -> None:
        """Forget since when the thread has not run: it may run before the next look."""
        self._ran = 0, 0.0
        still.clear()

    def _still_for(self, ident: int) -> float:
        """Return the seconds for which a thread has certainly not run."""
        now, ran = time.monotonic(), (ident, ran_on_cpu(ident))
        if ran != self._ran or ran[1] == math.inf:
            self._ran, self._still = ran, now
            still.clear()
            still[ident] = now
        return now - self._still


def _collective(frame: FrameType, rank: int, ident: int, still: float) -> Collective | None:
    # Looked up, not imported: an import may run finders of the user's. The process group of a rank has imported it.
    waiting = sys.modules.get("monarch._tensors.collectives.waiting")
    if waiting is None:
        return None
    # A thread that waits for the GIL is in a futex as well, but runs now and then.
    in_futex = still > 0 and blocked(ident).wait is WaitKind.OTHER
    found: CollectiveWait | None = waiting.waits_in(frame, rank, (), in_futex)
    return None if found is None else Collective(found.operation, found.group, found.number)
