"""Progress of slow operations, shown in place: the current stage, and one line at the end."""

from __future__ import annotations

import sys
import time
from typing import Any

from monarch.exceptions import CallTimeoutError
from monarch_kernel.compat import display_line
from monarch_kernel.kernel_like import kernel_of, request_of
from monarch_kernel.output.frontend import overwrites_displays

_LOOK = 0.05
"""Seconds between two checks of the progress."""
_EVERY = 1.0
"""Seconds before unchanged progress is shown again."""


class ProgressLine:
    """A line that is replaced until it is final: one display in a notebook, the last line of a terminal elsewhere.

    Args:
        shell: the shell of the notebook.
    """

    def __init__(self, shell: Any) -> None:
        self._begun = time.perf_counter()
        self._width = 0
        kernel = kernel_of(shell)
        self._in_place = overwrites_displays(kernel, request_of(kernel))
        self._display: Any = None

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
        if self._in_place:
            self._display = display_line(text, self._display)
            return
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
                self.show(f"{text}: {arrived} of {total} ({when:.1f} s)")
            try:
                future.get(_LOOK)
            except CallTimeoutError:
                continue
            return
