"""Imports that reading a value of a rank takes: the first tensor imports torch in the notebook's process."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from inspect import currentframe
from typing import Any, NamedTuple

from monarch._kernel_api import frame_of, is_ours

_IMPORT = "<frozen importlib._bootstrap>"
_DEPTH = 200
"""Frames that are searched."""


class Importing(NamedTuple):
    """A module that a thread imports."""

    module: str
    ident: int
    """Of the thread."""
    since: float

    def text(self) -> str:
        """Return it as the line of a running cell; empty if it has ended, or is quick."""
        seconds = int(time.monotonic() - self.since)
        return f"importing {self.module} to read values of ranks ({seconds} s)" if seconds and self.runs() else ""

    def runs(self) -> bool:
        """Return whether the thread still imports."""
        frame = frame_of(self.ident)
        for _ in range(_DEPTH):
            if frame is None:
                return False
            if frame.f_code.co_filename == _IMPORT:
                return True
            frame = frame.f_back
        return False


class SlowImports:
    """Tells of imports by code of the runtime, as a finder of modules that finds none.

    Args:
        begun: called in the importing thread with each, unless that thread imports already.
    """

    def __init__(self, begun: Callable[[Importing], None]) -> None:
        self._begun = begun
        self._last: Importing | None = None
        # A finder needs no more than find_spec; its type asks for older methods.
        sys.meta_path.insert(0, self)  # pyright: ignore[reportArgumentType]

    def close(self) -> None:
        """Tell no more."""
        # As above.
        sys.meta_path.remove(self)  # pyright: ignore[reportArgumentType]

    def find_spec(self, name: str, _path: Any = None, _target: Any = None) -> None:
        """Note that a module is about to be imported."""
        last, ident = self._last, threading.get_ident()
        if "." in name or (last is not None and last.ident == ident and last.runs()) or not _is_for_value():
            return
        self._last = Importing(name, ident, time.monotonic())
        self._begun(self._last)


def _is_for_value() -> bool:
    """Return whether the innermost frame of this thread outside of Python's import is of the runtime."""
    here = currentframe()
    # That of the finder is in between.
    frame = here.f_back.f_back if here is not None and here.f_back is not None else None
    while frame is not None and frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return frame is not None and is_ours(frame.f_code.co_filename)
