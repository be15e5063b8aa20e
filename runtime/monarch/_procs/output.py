"""What a rank prints, also from C code and subprocesses.

Descriptors 1 and 2 of a rank are files in memory: a write never waits for a reader, and what was written is
still there when the rank has died. The rank itself takes what is new and sends it on; the host agent, which
holds the files too, reads what is left after a death.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Mapping
from typing import NamedTuple

from monarch._procs import posix

CHUNK_LIMIT = 1 << 20
_PAGE = os.sysconf("SC_PAGESIZE")
# A hole costs a call and a lock of the file; so not for every line.
_HOLE_STEP = 16 * _PAGE
_BRIEF = 8192
_lseek, _SEEK_END = os.lseek, os.SEEK_END


class Chunk(NamedTuple):
    """A piece of output."""

    stream: str
    """``stdout`` or ``stderr``."""
    offset: int
    """Where in the stream it begins, in bytes. It may begin and end within a character."""
    data: bytes


class Tail(NamedTuple):
    """The end of an output file."""

    offset: int
    data: bytes


class Capture:
    """Takes the output of this process as it comes; for any thread.

    The files are to be open for appending, so that their position, which a subprocess shares, means nothing.
    """

    def __init__(self, fds: Mapping[str, int] | None = None) -> None:
        self._sources = [_Source(name, fd) for name, fd in (fds or {"stdout": 1, "stderr": 2}).items()]
        self._lock = threading.Lock()

    def take(self) -> list[Chunk]:
        """What was printed since the last call, at most 1 MB a chunk; the memory it was kept in is freed."""
        flush_streams()
        with self._lock:
            chunks: list[Chunk] = []
            for source in self._sources:
                # Where an appending file is written does not depend on its position; this is the quickest way to ask.
                try:
                    size = _lseek(source.fd, 0, _SEEK_END)
                except OSError:
                    # The program has put a pipe or a terminal in its place, or closed it; then it goes there.
                    continue
                if size != source.taken:
                    source.take(size, chunks)
            return chunks


class _Source:
    """One output file and how far it has been taken."""

    def __init__(self, name: str, fd: int) -> None:
        self.name = name
        self.fd = fd
        self.taken = 0
        self.freed = 0

    def take(self, size: int, chunks: list[Chunk]) -> None:
        if size < self.taken:
            # A program that opens /dev/stdout anew truncates the file and begins at its start.
            self.taken = self.freed = 0
        while self.taken < size:
            data = os.pread(self.fd, min(CHUNK_LIMIT, size - self.taken), self.taken)
            if not data:
                break
            chunks.append(Chunk(self.name, self.taken, data))
            self.taken += len(data)
        whole = self.taken - self.taken % _PAGE
        if whole - self.freed >= _HOLE_STEP:
            try:
                posix.punch_hole(self.fd, self.freed, whole - self.freed)
            except OSError:
                # Not a file in memory, or a kernel without holes: the memory is freed when the rank ends.
                pass
            self.freed = whole


def flush_streams() -> None:
    """Bring to the files what Python and C still hold in buffers."""
    # Runs after every message, so as little as can be: no loop, no call of a function of its own.
    stdout, stderr = sys.stdout, sys.stderr
    try:
        stdout.flush()
    except Exception:
        # None, closed, in use by the code that a signal interrupted, or the user's own and broken.
        pass
    try:
        stderr.flush()
    except Exception:
        pass
    if stdout is not sys.__stdout__ or stderr is not sys.__stderr__:
        # The user's code has put a stream of its own in place; what was printed before may be held still.
        for original in (sys.__stdout__, sys.__stderr__):
            with contextlib.suppress(Exception):
                original.flush()  # type: ignore[union-attr]
    posix.flush_c_stdio()


def read_tail(fd: int, limit: int = 65536, since: int = 0) -> Tail:
    """The last bytes of an output file, at most ``limit``, from ``since`` on.

    Leaves out pages that a Capture has taken and freed. Does not move the position of ``fd``.
    """
    # Opened anew: to look for data moves a position, and this one is nobody else's.
    own = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(own).st_size
        start = max(size - limit, since, 0)
        if start >= size:
            return Tail(size, b"")
        try:
            start = os.lseek(own, start, os.SEEK_DATA)
        except OSError:
            # All that is left was freed, so it was taken.
            return Tail(size, b"")
        parts: list[bytes] = []
        position = start
        while position < size and (data := os.pread(own, size - position, position)):
            parts.append(data)
            position += len(data)
        return Tail(start, b"".join(parts))
    finally:
        os.close(own)


def brief(tails: list[tuple[str, int, bytes]]) -> list[tuple[str, int, bytes]]:
    """Of the ends of outputs that are told with a death, the part that errors quote: the last of stderr."""
    return [
        (stream, offset + max(0, len(data) - _BRIEF), data[-_BRIEF:])
        for stream, offset, data in tails
        if stream == "stderr"
    ]
