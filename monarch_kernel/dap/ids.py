"""The numbers by which a front end names ranks, their frames and their values. Control thread only."""

from __future__ import annotations

from itertools import count
from typing import NamedTuple

from monarch_kernel.dap.protocol import FIRST

Step = tuple[str, object]


class FrameRef(NamedTuple):
    """A frame of a paused rank."""

    proc: str
    level: int
    """0 for the innermost frame of the user's code, 1 for its caller."""


class ValueRef(NamedTuple):
    """A value of a rank whose parts can be asked for, or the variables of a frame."""

    frame: FrameRef
    root: str
    """``locals`` or ``globals`` of the frame, or ``kept`` for the value of an expression."""
    key: int
    """Of that value."""
    path: tuple[Step, ...]
    """From there; empty for the variables themselves."""
    expression: str
    """For the value, in Python; empty if there is none."""


class Ids:
    """Those of one session."""

    def __init__(self) -> None:
        self._numbers = count(FIRST)
        self._threads: dict[str, int] = {}
        self._procs: dict[int, str] = {}
        self._frames: dict[int, FrameRef] = {}
        self._values: dict[int, ValueRef] = {}
        self._sources: dict[int, tuple[str, str]] = {}

    def thread(self, proc: str) -> int:
        """Return the number of a rank as a thread."""
        number = self._threads.get(proc)
        if number is None:
            number = self._threads[proc] = next(self._numbers)
            self._procs[number] = proc
        return number

    def proc(self, thread: object) -> str | None:
        """Return the rank of a thread; None for one of the notebook."""
        return self._procs.get(thread) if isinstance(thread, int) else None

    def add_frame(self, frame: FrameRef) -> int:
        """Return a number for a frame."""
        number = next(self._numbers)
        self._frames[number] = frame
        return number

    def frame(self, number: object) -> FrameRef | None:
        """Return the frame of a number; None if it is not of a rank, or the rank has continued."""
        return self._frames.get(number) if isinstance(number, int) else None

    def add_value(self, value: ValueRef) -> int:
        """Return a number for a value."""
        number = next(self._numbers)
        self._values[number] = value
        return number

    def value(self, number: object) -> ValueRef | None:
        """Return the value of a number; None as for ``frame``."""
        return self._values.get(number) if isinstance(number, int) else None

    def add_source(self, proc: str, file: str) -> int:
        """Return a number for a file that only a rank can read."""
        known = next((number for number, each in self._sources.items() if each == (proc, file)), None)
        if known is None:
            known = next(self._numbers)
            self._sources[known] = proc, file
        return known

    def source(self, number: object) -> tuple[str, str] | None:
        """Return the rank and the file of a number."""
        return self._sources.get(number) if isinstance(number, int) else None

    @staticmethod
    def is_of_ranks(number: object) -> bool:
        """Return whether a number is one of these, even if its frame or value is gone."""
        return isinstance(number, int) and FIRST <= number < 2 * FIRST

    def forget(self, proc: str) -> bool:
        """Forget the frames and values of a rank that continues; return whether it keeps values of expressions."""
        kept = any(each.root == "kept" and each.frame.proc == proc for each in self._values.values())
        self._frames = {number: each for number, each in self._frames.items() if each.proc != proc}
        self._values = {number: each for number, each in self._values.items() if each.frame.proc != proc}
        return kept

    def clear(self) -> None:
        """Forget all but the threads, which stay the same in the next session."""
        self._frames, self._values, self._sources = {}, {}, {}
