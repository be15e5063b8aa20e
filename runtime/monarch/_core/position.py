"""Where the code of a rank is: its state and stack, as a person who looks for an error wants them."""

from __future__ import annotations

import os
from typing import NamedTuple

PAUSED, RUNNING, PAUSING, IDLE, FAILED = "paused", "running", "pausing", "idle", "failed"
Packed = tuple[str, list[tuple[str, int, str, str]], str]


class Frame(NamedTuple):
    """A function that is being called, and the line it is in."""

    file: str
    """``cell [3]``, or a path."""
    line: int
    function: str
    text: str
    """The line's source; empty if it is unknown."""

    def __str__(self) -> str:
        """Return it as a line of a stack."""
        where = f"{self.file if self.file.startswith('cell [') else os.path.basename(self.file)} line {self.line}"
        where += "" if self.function == "<module>" else f" in {self.function}"
        return f"{where}: {self.text}" if self.text else where


class ThreadPosition(NamedTuple):
    """Where one thread of a rank is."""

    name: str
    """As Python knows it; ``MainThread`` runs cells and the first actor of a rank."""
    state: str
    """"paused", "running", or "idle" of a main thread without a call."""
    frames: tuple[Frame, ...]
    """Of the user's code, innermost first; of a thread without any, the innermost ones of a library."""
    is_main: bool = False


class Position(NamedTuple):
    """Where the main thread of a rank is."""

    state: str
    """"paused", "running", "pausing" (it will when the call that it is in returns), "idle", or "failed" (idle, with
    the frames of its last error); of a rank that gives no answer, why."""
    frames: list[Frame]
    """Of the user's code, innermost first."""
    reason: str = ""
    """Why it is paused or has failed; empty for a pause that somebody has asked for."""

    def __str__(self) -> str:
        """Return it as text, with a line for each frame."""
        state = f"{self.state} ({self.reason})" if self.reason else self.state
        if len(self.frames) == 1:
            return f"{state} at {self.frames[0]}"
        return "\n".join([state, *map(str, self.frames)])

    def __repr__(self) -> str:
        """Return it in one line, as a mesh of positions shows it."""
        state = f"{self.state} ({self.reason})" if self.reason else self.state
        return f"<{state} at {self.frames[0]}>" if self.frames else f"<{state}>"

    def packed(self) -> Packed:
        """Return it in plain types, for a message."""
        return self.state, [(each.file, each.line, each.function, each.text) for each in self.frames], self.reason

    @staticmethod
    def unpacked(packed: Packed) -> Position:
        """Return what ``packed`` has packed."""
        state, frames, reason = packed
        return Position(state, [Frame(*each) for each in frames], reason)
