"""stdout and stderr of a rank as Python writes to them."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from typing import Any

STEP = 1 << 20
"""Bytes after which a writer looks whether it is too far ahead of what is read; and that it writes at once."""
_pace: Callable[[], None] | None = None
_write = io.FileIO.write
_write_text = io.TextIOWrapper.write
_buffer: Callable[[io.TextIOWrapper], Any] = io.TextIOWrapper.buffer.__get__


class RankFile(io.FileIO):
    """A descriptor that a rank captures. A writer that is far ahead of the reader is slowed down."""

    # Bytes since the last look. Threads that write at once may count less, which does no harm.
    _since = 0

    def write(self, data: Any, /) -> int:
        """Write some bytes, not necessarily all, as a raw file may."""
        # This runs for each line that is printed, so as little as can be.
        self._since += len(data)
        if self._since >= STEP:
            self._since = 0
            if _pace is not None:
                # Before anything is written: an interrupt that comes here leaves nothing half done.
                _pace()
            data = memoryview(data)[:STEP]
        return _write(self, data)


class RankText(io.TextIOWrapper):
    """Text to such a descriptor. All of it is C, up to the end of each line, but for the length of what is written."""

    # Any thread sets them. The first is cleared before a flush, and set after a write, so that none is missed.
    _unflushed = False
    _taken = False

    @property
    def buffer(self) -> Any:
        """The binary stream below, which holds what others write to it."""
        self._taken = True
        return _buffer(self)

    def succeed(self) -> Any:
        """The binary stream below, for another text stream of this class that takes the place of this one."""
        return _buffer(self)

    @property
    def may_hold(self) -> bool:
        """Whether there may be something that was written to this stream and not to the descriptor. Takes no lock."""
        return self._unflushed or self._taken

    def write(self, text: str, /) -> int:
        """Write a text; a long one in pieces, between which an interrupt comes and a writer is slowed down."""
        # This runs twice for each print.
        if len(text) <= STEP:
            _write_text(self, text)
        else:
            for start in range(0, len(text), STEP):
                _write_text(self, text[start : start + STEP])
        if "\n" not in text or not self.line_buffering:
            self._unflushed = True
        return len(text)

    def flush_held(self) -> None:
        """Write out what is held."""
        self._unflushed = False
        self.flush()


def rank_text(fd: int) -> RankText:
    """Text to a descriptor, by lines: what is still in a buffer is lost when the rank is killed."""
    # Closing it leaves the descriptor open, as other code writes to it too.
    buffer = io.BufferedWriter(RankFile(fd, "wb", closefd=False))
    text = RankText(buffer, "utf-8", "backslashreplace", line_buffering=True)
    text.mode = "w"  # pyright: ignore[reportAttributeAccessIssue]
    return text


def set_pace(pace: Callable[[], None] | None) -> None:
    """Have something slow down the writers of this process where that is necessary."""
    global _pace
    _pace = pace


# A fork of a rank has nobody who takes what it prints.
os.register_at_fork(after_in_child=lambda: set_pace(None))
