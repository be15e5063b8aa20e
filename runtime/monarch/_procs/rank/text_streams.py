"""stdout and stderr of a rank, as Python writes to them."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from typing import Any

STEP = 1 << 20
"""Bytes after which a writer checks whether it is too far ahead of the reader; also its write size."""
_pace: Callable[[], None] | None = None
_write = io.FileIO.write
_write_text = io.TextIOWrapper.write
_buffer: Callable[[io.TextIOWrapper], Any] = io.TextIOWrapper.buffer.__get__


class RankFile(io.FileIO):
    """A captured descriptor of a rank. A writer far ahead of the reader is slowed down."""

    # Bytes since the last check. Concurrent writers may count less, which is harmless.
    _since = 0

    def write(self, data: Any, /) -> int:
        """Write some bytes, not necessarily all, like a raw file."""
        # This runs for each printed line, so as little as possible.
        self._since += len(data)
        if self._since >= STEP:
            self._since = 0
            if _pace is not None:
                # Before anything is written: an interrupt here leaves nothing half done.
                _pace()
            data = memoryview(data)[:STEP]
        return _write(self, data)


class RankText(io.TextIOWrapper):
    """Text to such a descriptor. All of it is C, up to the end of each line, except the length of writes."""

    # Any thread sets them. The first is cleared before a flush, and set after a write, so that none is missed.
    unflushed = False
    taken = False

    @property
    def buffer(self) -> Any:
        """Return the binary stream below, which buffers direct writes."""
        self.taken = True
        return _buffer(self)

    def succeed(self) -> Any:
        """Return the binary stream below, for another text stream of this class that replaces this one."""
        return _buffer(self)

    @property
    def may_hold(self) -> bool:
        """Return whether this stream may hold text that is not written to the descriptor. Takes no lock."""
        return self.unflushed or self.taken

    def write(self, text: str, /) -> int:
        """Write a text; a long one in pieces, between which interrupts run and a writer is slowed down."""
        # This runs twice for each print.
        if len(text) <= STEP:
            _write_text(self, text)
        else:
            for start in range(0, len(text), STEP):
                _write_text(self, text[start : start + STEP])
        if "\n" not in text or not self.line_buffering:
            self.unflushed = True
        return len(text)

    def flush_held(self) -> None:
        """Write out the buffer."""
        self.unflushed = False
        self.flush()


def rank_text(fd: int) -> RankText:
    """Line-buffered text to a descriptor: buffered text is lost when the rank is killed."""
    # Closing it leaves the descriptor open, as other code writes to it too.
    buffer = io.BufferedWriter(RankFile(fd, "wb", closefd=False))
    text = RankText(buffer, "utf-8", "backslashreplace", line_buffering=True)
    # As open() sets it.
    text.mode = "w"  # pyright: ignore[reportAttributeAccessIssue]
    return text


def set_pace(pace: Callable[[], None] | None) -> None:
    """Set the function that slows down writers of this process when necessary."""
    global _pace
    _pace = pace


# A fork of a rank has no reader for its output.
os.register_at_fork(after_in_child=lambda: set_pace(None))
