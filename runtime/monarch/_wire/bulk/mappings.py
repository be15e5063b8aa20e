"""The receiver's side of bulk data: memory of another process of this user, mapped copy-on-write.

Each message has its own mapping, without an open file descriptor, which would keep memory that its owner has freed.
Objects made on a mapping (arrays, tensors, memoryviews) hold it; when the last one is gone it is unmapped, and its
owner must be told. Writes are private. A mapping outlives its owner.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
import weakref
from collections.abc import Callable

from monarch._wire.bulk.segments import HEADER, BulkRef, map_file
from monarch.exceptions import SupervisionError


class Mappings:
    """Opens references made by ``Segments.put`` of other processes, or of this one.

    Args:
        on_release: called once for each ``open`` with pid and segment, when that mapping is no longer in use. The
            call can come in any thread and out of a garbage collection: it may put the pair in a deque and wake
            a thread, but may not block or take a lock.
    """

    def __init__(self, on_release: Callable[[tuple[int, int]], None]) -> None:
        self._on_release = on_release

    def open(self, ref: BulkRef, last: bool = True) -> list[memoryview]:
        """Return the buffers, writable and private to this call. If this raises, the release has been called already.

        Args:
            ref: where they are.
            last: whether this is the last try; if not, an error of it releases nothing.

        Raises:
            SupervisionError: the owner has died, or has freed the segment.
            MemoryError: not enough address space.
        """
        pid, fd, segment, spans = ref
        key = (pid, segment)
        try:
            memory = _map(pid, fd, segment, max((offset + length for offset, length in spans), default=0))
            weakref.finalize(memory, self._on_release, key).atexit = False
        except BaseException:
            if last:
                self._on_release(key)
            raise
        whole = memoryview(memory)
        return [whole[offset : offset + length] for offset, length in spans]


def _map(pid: int, fd: int, segment: int, end: int) -> mmap.mmap:
    end = max(end, HEADER)
    try:
        # The last two flags mean nothing for a segment; if the pid is another process now, the file can be anything.
        opened = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
            raise MemoryError(f"cannot open bulk data of process {pid}: {error.strerror}") from error
        if error.errno in (errno.EACCES, errno.EPERM):
            raise SupervisionError(
                f"cannot open the memory of process {pid}: permission denied on /proc/{pid}/fd; it runs as another "
                f"user, or is not dumpable (hidepid, ptrace_scope)"
            ) from error
        raise _gone(pid) from error
    try:
        about = os.fstat(opened)
        if not stat.S_ISREG(about.st_mode) or about.st_size < end:
            raise _gone(pid)
        memory = map_file(opened, end, mmap.MAP_PRIVATE)
    except OSError as error:
        raise MemoryError(f"cannot map {end >> 20} MiB of process {pid}: {error.strerror}") from error
    finally:
        os.close(opened)
    if int.from_bytes(memory[:8], "little") != segment:
        raise _gone(pid)
    return memory


def _gone(pid: int) -> SupervisionError:
    return SupervisionError(f"the shared memory with data of process {pid} is gone: the process died or released it")
