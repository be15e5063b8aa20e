"""Stop: the ladder from a polite interrupt to the replacement of a rank, within two seconds."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from monarch._core.ranks import describe_ranks
from monarch.exceptions import CallTimeoutError, MonarchError
from monarch_kernel.running import Running

_POLITE = 0.5
_ABORT = 0.9
_LAST = 1.3
_GRACE = 0.3


@dataclass
class Stopped:
    """What it took to stop each rank, by its rank in the mesh."""

    interrupted: list[int] = field(default_factory=list)
    """By a KeyboardInterrupt in their Python code."""
    aborted: list[int] = field(default_factory=list)
    """By closing the connections of a collective that they waited in."""
    finishing: list[int] = field(default_factory=list)
    """Not yet: they are inside a C call that will return."""
    replaced: list[int] = field(default_factory=list)
    """By a new process, because their Python code goes on after each interrupt."""
    stubborn: list[int] = field(default_factory=list)
    """Not at all: actors whose Python code goes on after each interrupt, and whose state is not to be lost."""
    timeout: float | None = None
    """The time that ran out, if that was the reason."""

    def text(self) -> str:
        """What it took, in words."""
        rungs = [
            (self.interrupted, "stopped by an interrupt"),
            (self.aborted, "freed from a collective by closing its connections"),
            (self.finishing, "inside a C call, will stop when that returns; stop again to replace"),
            (self.stubborn, "goes on after each interrupt; stop the actors, or restart their mesh, to end it"),
            (self.replaced, "replaced by a new process, with its variables lost, since nothing else stopped it"),
        ]
        parts = [f"{describe_ranks(ranks)}: {meaning}" for ranks, meaning in rungs if ranks]
        head = f"stopped after {self.timeout:g} s" if self.timeout is not None else "stopped"
        return f"{head}: " + "; ".join(parts or ["nothing ran any more"])


def _said(answer: Any, seconds: float) -> Any:
    """What a rank has answered by now; None if it has not."""
    try:
        return answer.get(seconds)[0]
    except (CallTimeoutError, MonarchError):
        return None


def climb(run: Running, again: set[int]) -> Stopped:
    """Stops a cell on the ranks where it still runs.

    Args:
        run: the cell.
        again: ranks that were inside a C call at the last stop already, and are to be replaced if they still are.
    """
    stopped = Stopped()
    begun = time.monotonic()
    everybody = {rank for rank, _ in run.missing()}
    run.interrupt()
    run.wait(begun + _POLITE)
    left = {rank for rank, _ in run.missing()}
    stopped.interrupted = sorted(everybody - left)
    if left:
        closed = run.abort()
        run.wait(begun + _ABORT)
        still = {rank for rank, _ in run.missing()}
        # One that had no connections has come out of something else meanwhile.
        stopped.aborted = sorted(rank for rank, count in closed if rank not in still and _said(count, 0.0))
        stopped.interrupted = sorted({*stopped.interrupted, *(left - still - set(stopped.aborted))})
        left = still
    if left:
        run.interrupt()
        for rank, state in run.doing():
            try:
                moves = state.get(max(0.05, begun + _LAST - time.monotonic()))[0].moves
            except (CallTimeoutError, MonarchError):
                # It does not even answer: a C call that keeps Python's lock.
                moves = False
            (stopped.replaced if moves or rank in again else stopped.finishing).append(rank)
        if set(stopped.replaced) - again:
            # One that has just come out of a C call takes the interrupt now, and is not to be lost.
            run.wait(time.monotonic() + _GRACE)
        ended = left - {rank for rank, _ in run.missing()}
        stopped.interrupted.extend(sorted(ended))
        stopped.finishing = [rank for rank in stopped.finishing if rank not in ended]
        stopped.replaced = [rank for rank in stopped.replaced if rank not in ended]
    return stopped
