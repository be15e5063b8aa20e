"""Cross-memory attach: one process of a host reads and writes the memory of another by a system call, in one copy."""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy

from monarch._tensors.registry import Remote
from monarch._tensors.transport import Move, dropped, lost_meanwhile
from monarch.exceptions import TransferError

_PIECES = 512
"""Pieces of memory in one system call; the kernel takes 1024."""
_CHUNK = 16 << 20
_SHARED_OUT = 4 << 20
"""Bytes from which several threads copy."""
_THREADS = 4
"""More do not copy faster on any machine that was tried: memory is the limit."""
_WORD = 8


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


class _Piece(NamedTuple):
    local: int
    remote: int
    size: int


class Attach:
    """The transport between CPU memory of two processes of one host."""

    name = "attach"

    def __init__(self, host: str) -> None:
        self._host = host
        self._denied: dict[int, str] = {}

    def reason_against(self, remote: Remote, local_device: str) -> str:
        if remote.proc.partition("/")[0] != self._host:
            return "the owner is on another host"
        if remote.device != "cpu" or local_device != "cpu":
            return "it is between memory of CPUs only"
        if remote.pid not in self._denied:
            try:
                _keys_of([remote])
                self._denied[remote.pid] = ""
            except OSError as error:
                if error.errno == errno.ESRCH:
                    # It has died, which is for the transfer to say.
                    return ""
                self._denied[remote.pid] = (
                    f"the kernel does not let this process read the memory of process {remote.pid} ({error.strerror}); "
                    f"see /proc/sys/kernel/yama/ptrace_scope, or in a container the capability SYS_PTRACE"
                )
        return self._denied[remote.pid]

    def forget(self, proc: str) -> None:
        # Its pid may be another process's now.
        self._denied.clear()

    def move(self, moves: Sequence[Move], writing: bool, timeout: float) -> None:
        remotes = [move.remote for move in moves]
        pid = remotes[0].pid
        self.check(remotes)
        pieces = [_Piece(local.address, remote.start, local.size) for remote, local in moves]
        try:
            _copy(pid, pieces, writing)
        except OSError as error:
            raise lost_meanwhile(remotes[0], writing, f"{remotes[0].title} {_what(error)}") from None
        self.check_after(remotes, writing)

    def check_after(self, remotes: list[Remote], writing: bool) -> None:
        """Whether the pieces were there all the time that bytes were moved; TransferError if not."""
        try:
            keys = _keys_of(remotes)
        except OSError as error:
            # After the last byte, but nobody knows whether that was still the owner's.
            raise lost_meanwhile(remotes[0], writing, f"{remotes[0].title} {_what(error)}") from None
        for remote, key in zip(remotes, keys, strict=True):
            if key != remote.key:
                raise lost_meanwhile(remote, writing, f"{remote.title} has dropped the buffer")

    def check(self, remotes: list[Remote]) -> None:
        """Whether the pieces are there; TransferError if not."""
        try:
            keys = _keys_of(remotes)
        except OSError as error:
            raise TransferError(
                f"the memory of {remotes[0].title} cannot be read: the process {_what(error)}. Nothing was written",
                mesh=remotes[0].proc,
            ) from None
        for remote, key in zip(remotes, keys, strict=True):
            if key != remote.key:
                raise dropped(remote)


def _what(error: OSError) -> str:
    if error.errno == errno.ESRCH:
        return "has died"
    if error.errno == errno.EFAULT:
        return "has freed the memory, or has died"
    return f"does not let this one ({error.strerror})"


def _keys_of(remotes: list[Remote]) -> list[int]:
    """What the slots of some pieces of one process hold."""
    keys = (ctypes.c_uint64 * len(remotes))()
    start = ctypes.addressof(keys)
    pieces = [_Piece(start + index * _WORD, remote.slot, _WORD) for index, remote in enumerate(remotes)]
    for batch in _batches(pieces):
        _transfer(remotes[0].pid, batch, False)
    return list(keys)


def _copy(pid: int, pieces: list[_Piece], writing: bool) -> None:
    total = sum(piece.size for piece in pieces)
    workers = min(_THREADS, len(os.sched_getaffinity(0))) if total >= _SHARED_OUT else 1
    batches = list(_batches(pieces, _CHUNK if workers > 1 else 0))
    if workers == 1:
        for batch in batches:
            _transfer(pid, batch, writing)
        return
    failures: list[OSError] = []
    todo = iter(batches)
    lock = threading.Lock()

    def work() -> None:
        try:
            while not failures:
                with lock:
                    batch = next(todo, None)
                if batch is None:
                    return
                _transfer(pid, batch, writing)
        except OSError as error:
            failures.append(error)

    others = [threading.Thread(target=work, name="monarch-copy", daemon=True) for _ in range(workers - 1)]
    for other in others:
        other.start()
    work()
    for other in others:
        other.join()
    if failures:
        raise failures[0]


def _batches(pieces: list[_Piece], chunk: int = 0) -> Iterator[list[_Piece]]:
    """Pieces for one system call each, and if a chunk is given of at most about so many bytes."""
    batch: list[_Piece] = []
    size = 0
    for piece in pieces:
        step = chunk or piece.size
        for offset in range(0, piece.size, step):
            length = min(step, piece.size - offset)
            batch.append(_Piece(piece.local + offset, piece.remote + offset, length))
            size += length
            if len(batch) == _PIECES or (chunk and size >= chunk):
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def _transfer(pid: int, pieces: list[_Piece], writing: bool) -> None:
    """One system call, or more if the kernel takes the bytes in several."""
    call = _libc.process_vm_writev if writing else _libc.process_vm_readv
    while pieces:
        count = len(pieces)
        # Two arrays of struct iovec: address and length of each piece.
        table = numpy.array(pieces, dtype=numpy.uint64)
        here, there = numpy.ascontiguousarray(table[:, ::2]), numpy.ascontiguousarray(table[:, 1:])
        moved = call(pid, here.ctypes.data, count, there.ctypes.data, count, 0)
        if moved <= 0:
            number = ctypes.get_errno() if moved < 0 else errno.EFAULT
            raise OSError(number, os.strerror(number))
        pieces = _rest(pieces, moved)


def _rest(pieces: list[_Piece], moved: int) -> list[_Piece]:
    rest: list[_Piece] = []
    for local, remote, size in pieces:
        done = min(moved, size)
        moved -= done
        if done < size:
            rest.append(_Piece(local + done, remote + done, size - done))
    return rest
