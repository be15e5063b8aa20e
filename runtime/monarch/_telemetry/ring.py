"""The log of a mesh: the newest entries in memory, older ones in an unnamed file, the oldest folded into a model."""

from __future__ import annotations

import os
import tempfile
import weakref
from collections import deque
from collections.abc import Iterator
from threading import Lock
from typing import IO

import msgspec

from monarch._core.telemetry.events import Entry, Metrics
from monarch._core.telemetry.fold import fold
from monarch._core.telemetry.model import MeshModel

MEMORY = 8192
"""Weight of the entries that are kept in memory."""
TOTAL = 64 << 20
"""Bytes that are kept in files."""
_SEGMENTS = 16
"""Files of a log; the oldest is dropped as a whole."""
_VALUES = 16
"""Values of a metric that weigh as much as an entry."""
_LENGTH = 4

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Entry).decode


class _Segment:
    """An unnamed file of older entries, which disappears with this process."""

    def __init__(self, first: int) -> None:
        # Stays open as long as the segment exists: a reader may still have a dropped one.
        self.file: IO[bytes] = tempfile.TemporaryFile(prefix="monarch-events-")  # noqa: SIM115
        # Not at the exit of the program, before which the last entries are written.
        weakref.finalize(self, self.file.close).atexit = False
        self.first = first
        self.size = 0

    def write(self, entries: list[Entry]) -> None:
        frames = [_encode(entry) for entry in entries]
        data = b"".join(part for frame in frames for part in (len(frame).to_bytes(_LENGTH, "little"), frame))
        # At this place, whatever a failed write has left behind it.
        if os.pwrite(self.file.fileno(), data, self.size) < len(data):
            raise OSError("the disk is full")
        self.size += len(data)

    def read(self, size: int) -> Iterator[Entry]:
        """Yield the entries in the first ``size`` bytes."""
        at = 0
        while at < size:
            length = int.from_bytes(os.pread(self.file.fileno(), _LENGTH, at), "little")
            yield _decode(os.pread(self.file.fileno(), length, at + _LENGTH))
            at += _LENGTH + length


class Ring:
    """The entries of a mesh, numbered from 1. Thread-safe.

    Args:
        memory: weight of the entries in memory: 1 each, and more for those with many values.
        total: bytes in files.
    """

    def __init__(self, memory: int = MEMORY, total: int = TOTAL) -> None:
        self._memory = memory
        self._total = total
        # All guarded by _lock, which is held while a file is written, but not while one is read.
        self._lock = Lock()
        self._recent: deque[Entry] = deque()
        self._weight = 0
        self._segments: deque[_Segment] = deque()
        self.base = MeshModel()
        """The entries before ``first``, folded."""
        self.last = 0
        """Number of the newest entry."""

    @property
    def first(self) -> int:
        """The number of the oldest entry that is kept."""
        return self.base.number + 1

    def append(self, entry: Entry) -> None:
        """Append an entry, whose number is ``last + 1``."""
        with self._lock:
            self.last = entry.number
            self._recent.append(entry)
            self._weight += _weight(entry)
            if self._weight > self._memory:
                self._spill()

    def since(self, number: int) -> Iterator[Entry]:
        """Yield the kept entries after a number, oldest first."""
        with self._lock:
            recent = [entry for entry in self._recent if entry.number > number]
            older = not recent or recent[0].number > number + 1
            segments = [(each, each.size) for each in self._segments] if older else []
        following = [each.first for each, _ in segments[1:]]
        for (segment, size), end in zip(segments, [*following, self.last + 1], strict=False):
            if end > number:
                yield from (entry for entry in segment.read(size) if entry.number > number)
        yield from recent

    def _spill(self) -> None:
        """Move the older half of the entries in memory to a file."""
        entries: list[Entry] = []
        while self._recent and self._weight > self._memory // 2:
            entry = self._recent.popleft()
            self._weight -= _weight(entry)
            entries.append(entry)
        try:
            if not self._segments or self._segments[-1].size >= self._total // _SEGMENTS:
                self._segments.append(_Segment(entries[0].number))
            self._segments[-1].write(entries)
        except OSError:
            # No room on the disk: only their effect is kept.
            self._forget(len(self._segments))
            self._fold(iter(entries))
        self._forget(len(self._segments) - _SEGMENTS)

    def _forget(self, count: int) -> None:
        for _ in range(count):
            segment = self._segments.popleft()
            self._fold(segment.read(segment.size))

    def _fold(self, entries: Iterator[Entry]) -> None:
        for entry in entries:
            fold(self.base, entry)


def _weight(entry: Entry) -> int:
    event = entry.event
    return 1 + len(event.values) // _VALUES if isinstance(event, Metrics) else 1
