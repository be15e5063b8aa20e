"""The output of ranks, up to a bound: the newest part in memory, the older in an unnamed file."""

from __future__ import annotations

import os
import tempfile
import weakref
from collections import deque
from collections.abc import Iterator
from threading import Lock
from typing import IO

from monarch._kernel_api import left_out

VARIABLE = "MONARCH_LOG_LIMIT_MB"
TOTAL_MB = 128
"""Megabytes of output that are kept in total, unless the variable above sets another number."""
_MEMORY = 4 << 20
"""Characters that are kept in memory."""
_READ = 1 << 20


class _Segment:
    """An unnamed file of older output, which disappears with this process."""

    def __init__(self) -> None:
        # Stays open as long as the segment exists: a reader may still have a dropped one.
        self.file: IO[bytes] = tempfile.TemporaryFile(prefix="monarch-log-")  # noqa: SIM115
        weakref.finalize(self, self.file.close)
        self.size = 0
        self.lines = 0
        self.characters = 0

    def write(self, text: str) -> None:
        """Append text."""
        data = text.encode("utf-8", "surrogatepass")
        self.file.write(data)
        self.file.flush()
        self.size += len(data)
        self.lines += text.count("\n")
        self.characters += len(text)


class OutputLog:
    """The output of ranks, for ``%mesh log``. Beyond the bound, the oldest is dropped and counted.

    Args:
        memory: characters that are kept in memory.
        total: bytes that are kept in files.
    """

    def __init__(self, memory: int = _MEMORY, total: int | None = None) -> None:
        self._memory = memory
        self._total = _total() if total is None else total
        # All guarded by _lock, which is held while a file is read or written.
        self._lock = Lock()
        self._recent: deque[str] = deque()
        self._recent_size = 0
        self._segments: deque[_Segment] = deque()
        self.lines_lost = 0
        """Dropped lines."""
        self.characters_lost = 0
        """Dropped characters."""

    def add(self, text: str) -> None:
        """Add a text of whole lines."""
        with self._lock:
            self._recent.append(text)
            self._recent_size += len(text)
            if self._recent_size > self._memory:
                self._spill()

    def _spill(self) -> None:
        """Move the older half of the text in memory to a file."""
        while self._recent and self._recent_size > self._memory // 2:
            text = self._recent.popleft()
            self._recent_size -= len(text)
            try:
                if not self._segments or self._segments[-1].size >= self._total // 2:
                    self._segments.append(_Segment())
                    if len(self._segments) > 2:
                        self._forget()
                self._segments[-1].write(text)
            except OSError:
                # No room for it on the disk.
                self.lines_lost += text.count("\n")
                self.characters_lost += len(text)

    def _forget(self) -> None:
        oldest = self._segments.popleft()
        self.lines_lost += oldest.lines
        self.characters_lost += oldest.characters
        oldest.file.close()

    def read(self) -> Iterator[str]:
        """Yield the kept output in pieces, oldest first; the first piece counts what was dropped."""
        if self.characters_lost:
            yield f"… {left_out(self.lines_lost, self.characters_lost)} dropped\n"
        with self._lock:
            segments, recent = [(each, each.size) for each in self._segments], list(self._recent)
        for segment, size in segments:
            yield from self._read_segment(segment, size)
        yield from recent

    def _read_segment(self, segment: _Segment, size: int) -> Iterator[str]:
        position = 0
        rest = b""
        while position < size:
            with self._lock:
                if segment.file.closed:
                    yield "… output dropped while it was being read is missing here\n"
                    return
                data = os.pread(segment.file.fileno(), min(_READ, size - position), position)
            position += len(data)
            if not data:
                break
            whole, newline, rest_of_it = (rest + data).rpartition(b"\n")
            rest = rest_of_it
            yield (whole + newline).decode("utf-8", "surrogatepass")
        yield rest.decode("utf-8", "surrogatepass")

    def tail(self, characters: int) -> Iterator[str]:
        """Yield the end of the kept output, after a line that counts what is not shown."""
        pieces: deque[str] = deque()
        size = lines = skipped = 0
        for piece in self.read():
            pieces.append(piece)
            size += len(piece)
            while size - len(pieces[0]) > characters:
                oldest = pieces.popleft()
                size -= len(oldest)
                lines, skipped = lines + oldest.count("\n"), skipped + len(oldest)
        if skipped:
            yield f"… {left_out(lines, skipped)} before this are not shown; %mesh log --save FILE writes all\n"
        yield from pieces


def _total() -> int:
    text = os.environ.get(VARIABLE, "")
    return (int(text) if text.isdecimal() and int(text) else TOTAL_MB) << 20
