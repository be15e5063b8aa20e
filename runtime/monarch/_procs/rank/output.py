"""The output of a rank, including C code and subprocesses.

Descriptors 1 and 2 of a rank are files in memory: a write never waits for a reader, and output is still there when the
rank has died. The rank itself reads new output and sends it; the host agent, which has the files open too, reads the
rest after a death. Unread output is bounded: beyond ``limit()`` a Python writer is slowed down for a moment, and then
the middle is dropped; offsets tell the reader how much.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple, cast
from weakref import finalize

from monarch._procs.os import posix
from monarch._procs.rank.text_streams import RankText

CHUNK_LIMIT = 1 << 20
LIMIT_VARIABLE = "MONARCH_OUTPUT_LIMIT_MB"
LIMIT_MB = 16
"""Megabytes of each output stream of a rank that may wait to be sent; the variable above overrides it."""
TAIL = 32 << 10
"""Bytes of each stream to keep when there is no time to send all."""
LINE_COST = 512
"""Bytes that each line costs, in addition to its own, of what a rank may send ahead."""
_PAGE = os.sysconf("SC_PAGESIZE")
# A hole costs a call and a file lock; so not for every line.
_HOLE_STEP = 16 * _PAGE
_BRIEF = 8192
_LINE_SEARCH = 65536
"""Bytes within which a new beginning is moved to the start of a line."""
_PACE_S = 0.1
"""Maximum seconds to slow down a writer that is too far ahead, before the middle is dropped."""
_PACE_STEP_S = 0.005
_lseek, _SEEK_END = os.lseek, os.SEEK_END


def limit() -> int:
    """Return how many bytes of each output stream may wait, by the environment of this process."""
    text = os.environ.get(LIMIT_VARIABLE, "")
    return (int(text) if text.isdecimal() and int(text) else LIMIT_MB) << 20


def cost_of(data: bytes) -> int:
    """Return what output takes of the window of its sender: short lines are more work than long ones."""
    return len(data) + LINE_COST * data.count(b"\n")


class Chunk(NamedTuple):
    """A piece of output."""

    stream: str
    """``stdout`` or ``stderr``."""
    offset: int
    """Offset in the stream, in bytes. It may begin and end within a character."""
    data: bytes


class Tail(NamedTuple):
    """The end of an output file."""

    offset: int
    data: bytes


class Capture:
    """Reads the output of this process; for any thread.

    The files must be open for appending, so that their position, which a subprocess shares, means nothing. A later
    replacement of a descriptor, such as a pipe, is not captured.

    Args:
        fds: output files by stream.
        most: bytes of each stream that may wait; None for the limit from the environment.
    """

    def __init__(self, fds: Mapping[str, int] | None = None, most: int | None = None) -> None:
        self.most = most or limit()
        # Guarded by _lock: how far each source was read.
        self.sources = [
            OutputFile(name, fd)
            for name, fd in (fds or {"stdout": 1, "stderr": 2}).items()
            # In a process other than a rank it may be a pipe or a terminal.
            if stat.S_ISREG(os.fstat(fd).st_mode)
        ]
        self._lock = threading.Lock()
        self._taken = 0
        # The position when a writer was slowed down in vain. Writers only.
        self._stalled_at = -1
        self.left = 0
        """Bytes that the last ``take`` left behind for lack of room."""

    def take(self, room: int | None = None, flush: bool = True) -> list[Chunk]:
        """Take new output, at most 1 MB a chunk; its memory is freed.

        Args:
            room: maximum cost of the output, or a chunk more (see ``cost_of``); None for all.
            flush: whether to write out buffers of Python and C first, which may run user code.
        """
        if flush:
            flush_streams()
        with self._lock:
            self.left = 0
            for source in self.sources:
                # The fastest check.
                if _lseek(source.fd, 0, _SEEK_END) != source.taken:
                    break
            else:
                return []
            chunks: list[Chunk] = []
            behind: list[tuple[OutputFile, int]] = []
            for source in self.sources:
                size = source.size()
                if size != source.taken:
                    behind.append((source, size))
            for number, (source, size) in enumerate(behind):
                # A flood on one stream leaves the other its half.
                share = None if room is None else room // (len(behind) - number)
                spent = source.take(size, share, chunks)
                self._taken += spent
                if room is not None:
                    room = max(0, room - spent)
                self.left += max(0, size - source.taken)
            return chunks

    def behind(self) -> int:
        """Return the waiting bytes of the longer stream. Takes no lock."""
        return max((source.behind() for source in self.sources), default=0)

    def trim(self, keep: int, wait: bool = False) -> None:
        """Drop all but the last bytes of each stream, ``keep`` at most, from the start of a line."""
        # A signal handler that prints may come here from within; another thread that is here does the same work.
        if self._lock.acquire(blocking=wait):
            try:
                for source in self.sources:
                    source.trim(keep)
            finally:
                self._lock.release()

    def pace(self, ask: Callable[[], None]) -> None:
        """Slow down a writer that is too far ahead of the reader; if that does not help, drop the middle.

        Args:
            ask: requests a read of the waiting output.
        """
        if self.behind() <= self.most:
            return
        ask()
        # If nothing was read since a slowdown in vain, do not slow down again.
        deadline = time.monotonic() + (_PACE_S if self._stalled_at != self._taken else 0.0)
        while time.monotonic() < deadline:
            time.sleep(_PACE_STEP_S)
            if self.behind() <= self.most:
                return
        self._stalled_at = self._taken
        self.trim(self.most // 2)


class OutputFile:
    """One output file and how far it has been read."""

    def __init__(self, name: str, fd: int) -> None:
        self.name = name
        # A separate open: writers keep the position of their own locked while they write.
        self.fd = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        # At the end of a process its last output is still read.
        finalize(self, os.close, self.fd).atexit = False
        self.taken = 0
        self.freed = 0

    def behind(self) -> int:
        """Return the bytes that were written and not read."""
        return max(0, self.size() - self.taken)

    def size(self) -> int:
        """Return the bytes written in all."""
        return _lseek(self.fd, 0, _SEEK_END)

    def take(self, size: int, room: int | None, chunks: list[Chunk]) -> int:
        """Append new output to the chunks; return its cost."""
        if size < self.taken:
            # A program that opens /dev/stdout itself truncates the file and begins at its start.
            self.taken = self.freed = 0
        spent = 0
        while self.taken < size and (room is None or spent < room):
            length = size - self.taken if room is None else min(size - self.taken, room - spent)
            data = os.pread(self.fd, min(CHUNK_LIMIT, length), self.taken)
            if not data:
                break
            # A hole reads as zeros. Looking for one waits for writers, so only do it for output that looks like one.
            good = self._before_hole(len(data)) if 0 in data else len(data)
            if good:
                chunks.append(Chunk(self.name, self.taken, data if good == len(data) else data[:good]))
                self.taken += good
                spent += cost_of(chunks[-1].data)
            else:
                # The agent has dropped what this process was too busy to read.
                self.taken = self._next_data(size)
        self._free()
        return spent

    def _before_hole(self, length: int) -> int:
        """Return how much of the bytes just read is data: a hole, which reads as zeros, never becomes data again."""
        try:
            return min(length, max(0, _lseek(self.fd, self.taken, os.SEEK_HOLE) - self.taken))
        except OSError:
            # Not a file with holes, or truncated meanwhile.
            return length

    def _next_data(self, size: int) -> int:
        try:
            return min(size, _lseek(self.fd, self.taken, os.SEEK_DATA))
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            return size

    def trim(self, keep: int) -> None:
        """Drop all but the last bytes."""
        size = self.size()
        start = size - keep
        if start <= self.taken or size < self.taken:
            return
        # Keep something in any case, so that the loss is reported with it.
        start += os.pread(self.fd, min(_LINE_SEARCH, keep // 2), start).find(b"\n") + 1
        self.taken = start
        self._free(0)

    def _free(self, step: int = _HOLE_STEP) -> None:
        whole = self.taken - self.taken % _PAGE
        if whole - self.freed > step or (whole - self.freed == step and step):
            try:
                posix.punch_hole(self.fd, self.freed, whole - self.freed)
            except OSError:
                # Not a file in memory, or a kernel without holes: the memory is freed when the rank ends.
                pass
            self.freed = whole


def relieve(fd: int, most: int) -> int:
    """Drop the oldest output of a file that its rank does not read; for the agent. Return its bytes of memory.

    Args:
        fd: output file of a rank.
        most: bytes that may wait; at twice as much, the last half of that is kept.
    """
    try:
        known = os.fstat(fd)
        held = known.st_blocks * 512
        if held <= 2 * most:
            return held
        end = (known.st_size - most // 2) // _PAGE * _PAGE
        posix.punch_hole(fd, 0, max(0, end))
        return os.fstat(fd).st_blocks * 512
    except OSError:
        return 0


def flush_streams() -> None:
    """Write out what Python and C still buffer."""
    # May run after every message, so as little as possible: no loop, no function call of its own.
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
    if isinstance(stdout, RankText) and isinstance(stderr, RankText):
        # They wrap no others, and C's stdout has no buffer in a rank.
        return
    # User code has replaced the stream; earlier output may still be buffered.
    for original in (sys.__stdout__, sys.__stderr__):
        with contextlib.suppress(Exception):
            # A process may have no stdout.
            original.flush()  # type: ignore[union-attr]
    posix.flush_c_stdio()


def flush_own() -> None:
    """Flush the streams that are this package's own; runs no user code."""
    for stream in _own_streams():
        with contextlib.suppress(Exception):
            stream.flush_held()
    posix.flush_c_stdio()


def own_may_hold() -> bool:
    """Return whether one of those may have buffered output. Takes no lock of a stream, and runs no user code."""
    # An idle rank looks now and then, so this makes few calls of Python: their code is cold then.
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        # Not isinstance, which asks a user's object for its class.
        if issubclass(type(stream), RankText) and cast("RankText", stream).may_hold:
            return True
    return posix.c_stdio_holds()


def _own_streams() -> list[RankText]:
    streams = {id(stream): stream for stream in (sys.__stdout__, sys.__stderr__, sys.stdout, sys.stderr)}
    # Not isinstance, which asks a user's object for its class.
    return [cast("RankText", stream) for stream in streams.values() if issubclass(type(stream), RankText)]


def read_tail(fd: int, limit: int = 65536, since: int = 0) -> Tail:
    """Return the last bytes of an output file, at most ``limit``, from ``since`` on.

    Skips pages that a Capture has read and freed. Does not move the position of ``fd``.
    """
    # Opened again: looking for data moves a position, and this one is private.
    own = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(own).st_size
        start = max(size - limit, since, 0)
        if start >= size:
            return Tail(size, b"")
        try:
            start = os.lseek(own, start, os.SEEK_DATA)
        except OSError:
            # All the rest was freed, so it was read.
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
    """Return the end of the output to quote in errors: the last of stderr."""
    return [
        (stream, offset + max(0, len(data) - _BRIEF), data[-_BRIEF:])
        for stream, offset, data in tails
        if stream == "stderr"
    ]
