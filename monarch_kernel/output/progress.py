"""What takes a moment, shown in place: the stage that runs, how far it is, and in the end one line."""

from __future__ import annotations

import sys
import time
from typing import Any

from monarch.exceptions import CallTimeoutError

_LOOK = 0.05
"""Seconds between two looks at how far it is."""
_EVERY = 1.0
"""Seconds after which it is said again though nothing has changed: each time is kept in a saved notebook."""


class Progress:
    """A line that is written over until it is final."""

    def __init__(self) -> None:
        self._begun = time.perf_counter()
        self._width = 0

    @property
    def elapsed(self) -> float:
        """Seconds since it began."""
        return time.perf_counter() - self._begun

    def show(self, text: str) -> None:
        """Puts a text in the place of the last one."""
        self._write(text, "\r")

    def end(self, text: str) -> None:
        """Puts the final text there."""
        self._write(text, "\n")

    def _write(self, text: str, end: str) -> None:
        # What was longer is to be covered.
        sys.stdout.write(text.ljust(self._width) + end)
        sys.stdout.flush()
        self._width = len(text)

    def wait(self, text: str, future: Any) -> None:
        """Waits for all answers of a gather, and shows how many there are."""
        total = len(future.targets)
        shown, when = -1, 0.0
        while True:
            there = total - len(future.waits_for())
            if there != shown or self.elapsed - when >= _EVERY:
                shown, when = there, self.elapsed
                self.show(f"{there} of {total} {text} ({when:.1f} s)")
            try:
                future.get(_LOOK)
            except CallTimeoutError:
                continue
            return
