"""stdout and stderr of a rank, as Python writes to them."""

from __future__ import annotations

import errno
import fcntl
import io
import os
from collections.abc import Callable
from typing import Any

STEP = 1 << 20
"""Bytes after which a writer checks whether it is too far ahead of the reader; also its write size."""
_pace: Callable[[], None] | None = None
_files: dict[int, RankFile] = {}
"""Those of the standard descriptors of this process, set at its start."""
_write = io.FileIO.write
_write_text = io.TextIOWrapper.write
_buffer: Callable[[io.TextIOWrapper], Any] = io.TextIOWrapper.buffer.__get__


class RankFile(io.FileIO):
    """A captured descriptor of a rank. A writer far ahead of the reader is slowed down."""

    # Bytes since the last check. Concurrent writers may count less, which is harmless.
    _since = 0
    kept = -1
    """A duplicate of the captured descriptor, which only this object uses; -1 without one."""
    file = (0, 0)
    """The device and the inode of its file, since user code may close the duplicate too."""
    is_replaced = False
    """Whether user code has put another file in the descriptor's place, so that the duplicate is written to."""

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
        if self.is_replaced:
            return os.write(self.kept, data)
        try:
            return _write(self, data)
        except OSError as error:
            if error.errno != errno.EBADF or not self.reopen():
                raise
            return _write(self, data)

    def reopen(self) -> bool:
        """Open the descriptor again, and return True, if user code has closed it."""
        try:
            os.fstat(self.fileno())
        except OSError:
            if self._has_kept():
                os.dup2(self.kept, self.fileno())
                return True
        return False

    def _has_kept(self) -> bool:
        return self.kept >= 0 and _file_of(self.kept) == self.file

    def look(self) -> str:
        """Return the file that user code has newly put in the descriptor's place; empty if it has not.

        Later prints are captured all the same, and a closed descriptor is opened again.
        """
        if _file_of(self.fileno()) == self.file or not self._has_kept() or self.reopen():
            # The first of these holds at the end of almost every cell.
            self.is_replaced = False
            return ""
        before, self.is_replaced = self.is_replaced, True
        return "" if before else os.readlink(f"/proc/self/fd/{self.fileno()}")

    def restore(self) -> None:
        """Undo what user code has done to the descriptor."""
        if self._has_kept():
            os.dup2(self.kept, self.fileno())
        self.is_replaced = False


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

    def close(self) -> None:
        """Write out the buffer. It stays open, as in a notebook: later cells print too."""
        self.flush_held()

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


def _file_of(fd: int) -> tuple[int, int]:
    """Return the device and the inode of an open file; zeros for a closed descriptor."""
    try:
        known = os.fstat(fd)
    except OSError:
        return 0, 0
    return known.st_dev, known.st_ino


def standard_text(fd: int) -> RankText:
    """Text as above to a standard descriptor of this process, which outlasts user code that closes or replaces it."""
    text = rank_text(fd)
    file = text.succeed().raw
    file.kept = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
    file.file = _file_of(fd)
    _files[fd] = file
    return text


def replaced() -> list[tuple[int, str]]:
    """Return the captured descriptors that user code has replaced since the last look, and by which files."""
    return [(file.fileno(), path) for file in _files.values() if (path := file.look())]


def restore() -> None:
    """Undo what user code has done to the captured descriptors."""
    for file in _files.values():
        file.restore()


def set_pace(pace: Callable[[], None] | None) -> None:
    """Set the function that slows down writers of this process when necessary."""
    global _pace
    _pace = pace


# A fork of a rank has no reader for its output.
os.register_at_fork(after_in_child=lambda: set_pace(None))
