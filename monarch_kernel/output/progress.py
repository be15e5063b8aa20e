"""Progress of slow operations, shown in place: the current stage, and one line at the end."""

from __future__ import annotations

import sys
import time
from typing import Any

from monarch.exceptions import CallTimeoutError

_LOOK = 0.05
"""Seconds between two checks of the progress."""
_EVERY = 1.0
"""Seconds before unchanged progress is shown again: a saved notebook keeps each line."""


class Progress:
    """A line that is overwritten until it is final."""

    def __init__(self) -> None:
        self._begun = time.perf_counter()
        self._width = 0

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._begun

    def show(self, text: str) -> None:
        """Replace the current text."""
        self._write(text, "\r")

    def end(self, text: str) -> None:
        """Replace the current text by the final one."""
        self._write(text, "\n")

    def _write(self, text: str, end: str) -> None:
        # Pad to cover a longer previous text.
        sys.stdout.write(text.ljust(self._width) + end)
        sys.stdout.flush()
        self._width = len(text)

    def wait(self, text: str, future: Any) -> None:
        """Wait for all answers of a gather, and show how many have arrived."""
        total = len(future.targets)
        shown, when = -1, 0.0
        while True:
            arrived = total - len(future.waits_for())
            if arrived != shown or self.elapsed - when >= _EVERY:
                shown, when = arrived, self.elapsed
                self.show(f"{arrived} of {total} {text} ({when:.1f} s)")
            try:
                future.get(_LOOK)
            except CallTimeoutError:
                continue
            return
