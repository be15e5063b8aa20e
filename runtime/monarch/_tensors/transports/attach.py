"""Cross-memory attach: one process of a host reads and writes another's memory by a system call, in one copy."""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from array import array
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy

from monarch._procs.os.helpers import as_helper, be_helper, helper_cores
from monarch._python.threads import new_thread
from monarch._tensors.memory.registry import MemoryReference
from monarch._tensors.transports.base import Move, dropped, lost_meanwhile
from monarch.exceptions import TransferError

if TYPE_CHECKING:
    from numpy.typing import NDArray

_PIECES = 512
"""Pieces of memory in one system call; the kernel accepts 1024."""
_CHUNK = 4 << 20
_SHARED_OUT = 4 << 20
"""Bytes from which several threads copy."""
_THREADS = 4
"""More did not copy faster on any machine tried: memory is the limit."""
_SMALL = 1 << 20
"""Bytes up to which a single piece is moved without numpy, which costs more than the copy."""
_WORD = 8
_FAULT = OSError(errno.EFAULT, os.strerror(errno.EFAULT))


_libc = ctypes.CDLL(None, use_errno=True)
for _call in (_libc.process_vm_readv, _libc.process_vm_writev):
    _call.restype = ctypes.c_ssize_t
    _call.argtypes = [
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_ulong,
    ]


_read, _write = _libc.process_vm_readv, _libc.process_vm_writev


class Attach:
    """The transport between CPU memory of two processes of one host."""

    name = "attach"

    def __init__(self, host: str) -> None:
        self._host = host
        self._denied: dict[int, str] = {}

    def reason_against(self, remote: MemoryReference, local_device: str) -> str:
        if remote.proc.partition("/")[0] != self._host:
            return "the owner is on another host"
        if remote.device != "cpu" or local_device != "cpu":
            return "it supports CPU memory only"
        if remote.pid not in self._denied:
            try:
                _keys_of([remote])
                self._denied[remote.pid] = ""
            except OSError as error:
                if error.errno == errno.ESRCH:
                    # It has died; the transfer reports that.
                    return ""
                self._denied[remote.pid] = (
                    f"the kernel does not let this process read the memory of process {remote.pid} ({error.strerror}); "
                    f"see /proc/sys/kernel/yama/ptrace_scope; in a container, add the capability SYS_PTRACE"
                )
        return self._denied[remote.pid]

    def forget(self, proc: str) -> None:
        # Its pid may be another process's now.
        self._denied.clear()

    def move(self, moves: Sequence[Move], writing: bool, timeout: float) -> None:
        if len(moves) == 1 and moves[0].spans is None and moves[0].local.size <= _SMALL:
            _move_small(moves[0].remote, moves[0].local.address, moves[0].local.size, writing)
            return
        remotes = [move.remote for move in moves]
        pid = remotes[0].pid
        self.check(remotes)
        base = [(local.address, remote.start, 0) for remote, local, _ in moves]
        pieces = numpy.concatenate(
            [numpy.add(move.rows[:, [1, 0, 2]], each) for move, each in zip(moves, base, strict=True)]
        )
        try:
            _copy(pid, pieces.astype(numpy.uint64), writing)
        except OSError as error:
            raise lost_meanwhile(remotes[0], writing, f"{remotes[0].title} {_what(error)}") from None
        self.check_after(remotes, writing)

    def check_after(self, remotes: list[MemoryReference], writing: bool) -> None:
        """Check that the pieces were valid during the whole transfer; TransferError if not."""
        try:
            keys = _keys_of(remotes)
        except OSError as error:
            # All bytes were moved, but the memory may not have been the owner's any more.
            raise lost_meanwhile(remotes[0], writing, f"{remotes[0].title} {_what(error)}") from None
        for remote, key in zip(remotes, keys, strict=True):
            if key != remote.key:
                raise lost_meanwhile(remote, writing, f"{remote.title} has dropped the buffer")

    def kept(self, remotes: list[MemoryReference]) -> list[MemoryReference]:
        """Return those pieces of one process that it has not dropped; none if it has died."""
        if not remotes:
            return []
        try:
            keys = _keys_of(remotes)
        except OSError:
            return []
        return [remote for remote, key in zip(remotes, keys, strict=True) if key == remote.key]

    def check(self, remotes: list[MemoryReference]) -> None:
        """Check that the pieces are valid; TransferError if not."""
        try:
            keys = _keys_of(remotes)
        except OSError as error:
            raise _unreachable(remotes[0], error) from None
        for remote, key in zip(remotes, keys, strict=True):
            if key != remote.key:
                raise dropped(remote)


def _move_small(remote: MemoryReference, address: int, size: int, writing: bool) -> None:
    """Move a single small piece: the same steps, with as little Python as possible."""
    keys = array("Q", (0, 0))
    key = keys.buffer_info()[0]
    # Each two lists of struct iovec, an address and a length.
    if _vector(_read, remote.pid, (key, _WORD), (remote.slot, _WORD)) != _WORD:
        raise _unreachable(remote, _last_error())
    if keys[0] != remote.key:
        raise dropped(remote)
    if writing:
        moved = _vector(_write, remote.pid, (address, size), (remote.start, size))
        if moved == size:
            moved += _vector(_read, remote.pid, (key + _WORD, _WORD), (remote.slot, _WORD))
    else:
        here, there = (address, size, key + _WORD, _WORD), (remote.start, size, remote.slot, _WORD)
        moved = _vector(_read, remote.pid, here, there)
    if moved != size + _WORD:
        raise lost_meanwhile(remote, writing, f"{remote.title} {_what(_last_error() if moved < 0 else _FAULT)}")
    if keys[1] != remote.key:
        raise lost_meanwhile(remote, writing, f"{remote.title} has dropped the buffer")


def _vector(call: Any, pid: int, here: tuple[int, ...], there: tuple[int, ...]) -> int:
    near, far = array("Q", here), array("Q", there)
    return call(pid, near.buffer_info()[0], len(near) // 2, far.buffer_info()[0], len(far) // 2, 0)


def _last_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))


def _unreachable(remote: MemoryReference, error: OSError) -> TransferError:
    return TransferError(
        f"cannot read the memory of {remote.title}: the process {_what(error)}. Nothing was written",
        mesh=remote.proc,
    )


def _what(error: OSError) -> str:
    if error.errno == errno.ESRCH:
        return "has died"
    if error.errno == errno.EFAULT:
        return "has freed the memory, or has died"
    return f"denies access ({error.strerror})"


def _keys_of(remotes: list[MemoryReference]) -> list[int]:
    """Read the slots of some pieces of one process."""
    if len(remotes) == 1:
        key = array("Q", (0,))
        if _vector(_read, remotes[0].pid, (key.buffer_info()[0], _WORD), (remotes[0].slot, _WORD)) != _WORD:
            raise _last_error()
        return [key[0]]
    keys = numpy.zeros(len(remotes), dtype=numpy.uint64)
    pieces = numpy.empty((len(remotes), 3), dtype=numpy.uint64)
    pieces[:, 0] = keys.ctypes.data + numpy.arange(len(remotes), dtype=numpy.uint64) * _WORD
    pieces[:, 1] = [remote.slot for remote in remotes]
    pieces[:, 2] = _WORD
    for batch in _batches(pieces):
        _transfer(remotes[0].pid, batch, False)
    return [int(key) for key in keys]


def _copy(pid: int, pieces: numpy.ndarray, writing: bool) -> None:
    """Copy pieces: rows of local address, remote address and size in bytes."""
    total = int(pieces[:, 2].sum())
    workers = min(_THREADS, helper_cores()) if total >= _SHARED_OUT else 1
    if workers == 1:
        for batch in _batches(pieces):
            _transfer(pid, batch, writing)
        return
    failures: list[OSError] = []
    todo = iter(_batches(_chunks(pieces)))
    lock = threading.Lock()

    def work() -> None:
        be_helper()
        try:
            while not failures:
                with lock:
                    batch = next(todo, None)
                if batch is None:
                    return
                _transfer(pid, batch, writing)
        except OSError as error:
            failures.append(error)

    others = [new_thread("monarch-copy", work) for _ in range(workers - 1)]
    for other in others:
        other.start()
    with as_helper():
        work()
    for other in others:
        other.join()
    if failures:
        raise failures[0]


def _chunks(pieces: numpy.ndarray) -> numpy.ndarray:
    """Split pieces that are larger than a chunk."""
    if int(pieces[:, 2].max()) <= _CHUNK:
        return pieces
    cut: list[numpy.ndarray] = []
    for piece in pieces:
        size = int(piece[2])
        offsets = numpy.arange(0, size, _CHUNK, dtype=numpy.uint64)
        rows = numpy.repeat(piece[None, :], len(offsets), axis=0)
        rows[:, :2] += offsets[:, None]
        rows[:, 2] = numpy.minimum(size - offsets, _CHUNK)
        cut.append(rows)
    return numpy.concatenate(cut)


def _batches(pieces: numpy.ndarray) -> Iterator[numpy.ndarray]:
    """Group pieces for system calls: not too many, and not much more than a chunk of bytes each."""
    begun = 0
    ends = numpy.cumsum(pieces[:, 2])
    while begun < len(pieces):
        before = int(ends[begun - 1]) if begun else 0
        full = int(numpy.searchsorted(ends, before + _CHUNK, "right"))
        end = min(max(full, begun + 1), begun + _PIECES)
        yield pieces[begun:end]
        begun = end


def _transfer(pid: int, pieces: numpy.ndarray, writing: bool) -> None:
    """Make one system call, or more if the kernel takes the bytes in several."""
    call = _write if writing else _read
    while len(pieces):
        # Return two arrays of struct iovec: address and length of each piece.
        here, there = numpy.ascontiguousarray(pieces[:, ::2]), numpy.ascontiguousarray(pieces[:, 1:])
        moved = call(pid, here.ctypes.data, len(here), there.ctypes.data, len(there), 0)
        if moved <= 0:
            raise _last_error() if moved < 0 else _FAULT
        pieces = _rest(pieces, moved)


def _rest(pieces: NDArray[numpy.uint64], moved: int) -> NDArray[numpy.uint64]:
    """Return the rest of some pieces after their first bytes."""
    ends = numpy.cumsum(pieces[:, 2])
    first = int(numpy.searchsorted(ends, moved, "right"))
    rest = numpy.array(pieces[first:])
    if len(rest):
        done = moved - (int(ends[first - 1]) if first else 0)
        rest[0, :2] += numpy.uint64(done)
        rest[0, 2] -= numpy.uint64(done)
    return rest
