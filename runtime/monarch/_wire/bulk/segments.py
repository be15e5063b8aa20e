"""The owner's side of bulk data: unnamed shared memory, kept warm between uses.

A segment is a memfd of this process. Other processes of the same user open it as ``/proc/<pid>/fd/<fd>`` (see
``mappings``), so no name is left anywhere and the kernel frees everything once nobody holds it, however the processes
end.

A fresh page costs several times a warm one, so released segments are kept for the next message. The first use of a
segment is by pwrite, which avoids clearing the pages; only the second maps it here.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import mmap
import os
import random
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from monarch._wire.descriptors import limit_of

ALIGNMENT = 64
HEADER = 64
"""Bytes before the first span. They begin with the number of the use, so that a stale reference is detected."""

_SMALLEST = 128 * 1024
_IDLE_COUNT = 128  # each holds a file descriptor
_IDLE_PART = 16
"""Of the file descriptors that a process may have, one in so many may be of idle segments."""
_WRITE_LIMIT = 1 << 30  # one pwrite writes less than 2 GiB
_MADV_POPULATE_WRITE = 23

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.mmap.restype = ctypes.c_void_p
_MAP_FIXED = 0x10
_MAP_FAILED = ctypes.c_void_p(-1).value


class BulkRef(NamedTuple):
    """Where buffers are. A plain list of the four on the wire."""

    pid: int
    fd: int
    segment: int
    """Number of this use of the segment, unique across this process and later ones of its pid."""
    spans: tuple[tuple[int, int], ...]
    """Offset and length of each buffer."""


class SegmentStats(NamedTuple):
    live_bytes: int
    """Of segments in use by receivers."""
    live: int
    idle_bytes: int
    """Of segments kept warm for the next message."""
    idle: int


class _Segment:
    """A memfd. ``written`` bytes of it have pages, of which ``mapped`` bytes are mapped here."""

    __slots__ = ("capacity", "fd", "map", "mapped", "receivers", "written")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.written = 0
        self.mapped = 0
        self.map: mmap.mmap | None = None
        self.receivers: Counter[str] = Counter()
        self.fd = os.memfd_create("monarch", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.fd, capacity)
        except OSError:
            os.close(self.fd)
            raise

    def mark(self, use: int) -> None:
        os.pwrite(self.fd, use.to_bytes(8, "little"), 0)

    def fill(self, buffers: Sequence[memoryview], spans: Sequence[tuple[int, int]]) -> None:
        import numpy

        for buffer, (offset, length) in zip(buffers, spans, strict=True):
            if offset + length > self.written:
                # Also reports lack of memory as an error, where a write through the mapping would be killed.
                for start in range(0, length, _WRITE_LIMIT):
                    self._write(buffer[start : start + _WRITE_LIMIT], offset + start)
                self.written = offset + length
            elif length:
                target = numpy.frombuffer(self._warm(offset + length), numpy.uint8, length, offset)
                numpy.copyto(target, numpy.frombuffer(buffer, numpy.uint8))  # without the GIL

    def _write(self, buffer: memoryview, offset: int) -> None:
        while buffer:
            count = os.pwrite(self.fd, buffer, offset)
            buffer, offset = buffer[count:], offset + count

    def _warm(self, end: int) -> mmap.mmap:
        if self.map is None:
            self.map = map_file(self.fd, self.capacity, mmap.MAP_SHARED)
        if end > self.mapped:
            # All existing pages at once, at a third of the price of separate faults. Where the kernel cannot: faults.
            start = self.mapped - self.mapped % mmap.PAGESIZE
            _libc.madvise(_address(self.map) + start, self.written - start, _MADV_POPULATE_WRITE)
            self.mapped = self.written
        return self.map

    def free(self) -> None:
        if self.map is not None:
            try:
                self.map.close()
            except BufferError:  # a traceback holds it; it goes with that
                pass
        os.close(self.fd)


class Segments:
    """The segments of this process: those in use by receivers, and those kept warm.

    Nothing here blocks. If receivers are slow to release, ``over_limit`` turns true, and the caller should wait. A
    segment is reused only when each of its receivers has released it. Thread-safe.

    Args:
        idle_limit: bytes of released segments to keep; beyond it, the least recently used are freed.
        live_limit: bytes in use above which ``over_limit`` is true; by default 8 GiB or half of the memory.
    """

    def __init__(self, idle_limit: int = 512 << 20, live_limit: int | None = None) -> None:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        self.idle_limit = idle_limit
        self.live_limit = min(8 << 30, memory // 2) if live_limit is None else live_limit
        self._lock = threading.RLock()
        self._live: dict[int, _Segment] = {}
        self._live_bytes = 0
        self._idle: list[_Segment] = []  # the longest unused first
        self._idle_bytes = 0
        # Avoids the use numbers of an earlier process with this pid. It fits in 63 bits.
        self._numbers = itertools.count(random.SystemRandom().getrandbits(62))

    def put(self, buffers: Sequence[memoryview], receivers: Iterable[str]) -> BulkRef:
        """Copy the buffers into a segment, once for all receivers; each of them must release it.

        Args:
            buffers: contiguous bytes.
            receivers: proc ids; one that occurs twice opens it twice, and releases it twice.

        Raises:
            MemoryError: not enough memory, address space or file descriptors.
        """
        awaited = Counter(receivers)
        if not awaited:
            raise ValueError("receivers: expected at least one, because nobody else would release the data")
        spans: list[tuple[int, int]] = []
        end = HEADER
        for buffer in buffers:
            offset = -(-end // ALIGNMENT) * ALIGNMENT
            spans.append((offset, buffer.nbytes))
            end = offset + buffer.nbytes
        use = next(self._numbers)
        segment = None
        try:
            segment = self._take(_capacity(end))
            segment.fill(buffers, spans)
            segment.mark(use)
        except BaseException as error:  # also an interrupt: the segment is not lost
            if segment is not None:
                segment.free()
            if isinstance(error, OSError):
                raise MemoryError(self._complaint(end, error)) from error
            raise
        segment.receivers = awaited
        with self._lock:
            self._live[use] = segment
            self._live_bytes += segment.capacity
        return BulkRef(os.getpid(), segment.fd, use, tuple(spans))

    def release(self, segment: int, receiver: str) -> None:
        """Note that a receiver has released a segment. One that it does not hold is ignored."""
        with self._lock:
            held = self._live.get(segment)
            if held is None or not held.receivers[receiver]:
                return
            held.receivers[receiver] -= 1
            freed = [] if any(held.receivers.values()) else self._retire(segment)
        _free(freed)

    def forget(self, receiver: str) -> None:
        """Release everything held by a dead receiver, which must not appear in a later ``put``."""
        freed: list[_Segment] = []
        with self._lock:
            for segment, held in list(self._live.items()):
                if held.receivers.pop(receiver, 0) and not any(held.receivers.values()):
                    freed += self._retire(segment)
        _free(freed)

    @property
    def over_limit(self) -> bool:
        """Return whether receivers hold more than ``live_limit``: wait for releases before the next ``put``."""
        return self._live_bytes > self.live_limit

    def stats(self) -> SegmentStats:
        with self._lock:
            return SegmentStats(self._live_bytes, len(self._live), self._idle_bytes, len(self._idle))

    def close(self) -> None:
        """Free all segments. Receivers keep what they have opened; the rest is gone."""
        with self._lock:
            freed = [*self._idle, *self._live.values()]
            self._idle, self._live = [], {}
            self._idle_bytes = self._live_bytes = 0
        _free(freed)

    def _take(self, capacity: int) -> _Segment:
        """Return the smallest idle segment that is large enough and not far too large, or a fresh one."""
        with self._lock:
            while (best := self._best(capacity)) is not None:
                try:
                    self._idle.remove(best)
                except ValueError:
                    # A signal handler has run in between, and has taken it.
                    continue
                self._idle_bytes -= best.capacity
                return best
        try:
            return _Segment(capacity)
        except OSError:
            with self._lock:
                freed, self._idle, self._idle_bytes = self._idle, [], 0
            _free(freed)
            return _Segment(capacity)

    def _best(self, capacity: int) -> _Segment | None:
        best = None
        for segment in reversed(self._idle):  # of equals, the one used last: its pages may be in a cache
            if capacity <= segment.capacity <= 2 * capacity and (best is None or segment.capacity < best.capacity):
                best = segment
        return best

    def _retire(self, number: int) -> list[_Segment]:
        """Move a segment from live to idle, with the lock held. Returns the segments to free for it, after the lock."""
        segment = self._live.pop(number, None)
        if segment is None:
            return []
        self._live_bytes -= segment.capacity
        segment.mark(0)
        self._idle.append(segment)
        self._idle_bytes += segment.capacity
        freed: list[_Segment] = []
        # User code needs descriptors too.
        most = min(_IDLE_COUNT, limit_of() // _IDLE_PART)
        while self._idle_bytes > self.idle_limit or len(self._idle) > most:
            freed.append(self._idle.pop(0))
            self._idle_bytes -= freed[-1].capacity
        return freed

    def _complaint(self, size: int, error: OSError) -> str:
        stats = self.stats()
        text = (
            f"cannot put {size >> 20} MiB into shared memory: {error.strerror}; "
            f"receivers hold {stats.live_bytes >> 20} MiB in {stats.live} segments"
        )
        if error.errno in (errno.EMFILE, errno.ENFILE):
            return f"{text}, each of which takes a file descriptor: drop unneeded results, or raise ulimit -n"
        return f"{text}: drop unneeded results"


def map_file(fd: int, length: int, kind: int) -> mmap.mmap:
    """Map the beginning of a file, writable; ``kind`` is MAP_SHARED or MAP_PRIVATE.

    An mmap object keeps a duplicate of its file descriptor. An anonymous mapping has none, and is then replaced.
    """
    memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    access = mmap.PROT_READ | mmap.PROT_WRITE
    if _libc.mmap(_address(memory), length, access, kind | _MAP_FIXED, fd, 0) == _MAP_FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return memory


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _capacity(size: int) -> int:
    """Round up with four steps to each power of two, so that segments fit again, with at most a quarter unused."""
    if size <= _SMALLEST:
        return _SMALLEST
    step = 1 << ((size - 1).bit_length() - 3)
    return -(-size // step) * step


def _free(segments: list[_Segment]) -> None:
    for segment in segments:
        segment.free()
