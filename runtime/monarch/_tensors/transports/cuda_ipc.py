"""GPU memory of another process of this host, opened by CUDA handles: copied from GPU to GPU, not through the host.

The driver is called directly. torch's own method counts references in shared memory files, which a killed process
leaves behind; here the slot of a buffer shows whether it is still valid, as for any other memory.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch

from monarch._tensors.memory.registry import Remote
from monarch._tensors.memory.views import Memory
from monarch._tensors.transports.attach import Attach
from monarch._tensors.transports.base import Move, lost_meanwhile
from monarch.exceptions import TransferError

_HANDLE = 64
_OFFSET = struct.Struct("<Q")
_LAZY_PEER_ACCESS = 1


class _IpcHandle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * _HANDLE)]


@cache
def _driver() -> Any:
    """Return CUDA's driver library, or None."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


class _CudaError(Exception):
    pass


class _Opened(NamedTuple):
    """Memory of another process, mapped into this one."""

    base: int
    context: int
    """The CUDA context in which it was opened."""


def _call(name: str, *arguments: Any) -> None:
    status = getattr(_driver(), name)(*arguments)
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
        raise _CudaError(f"{name}: {(text.value or b'unknown error').decode()}")


@contextmanager
def _on(device: str) -> Generator[None]:
    """Finish pending work on a GPU, and bind driver calls of this thread to it."""
    with torch.cuda.device(device):
        # A new thread has no context before torch uses the GPU there.
        torch.cuda.synchronize()
        yield


def open_handle_of(memory: Memory) -> bytes:
    """Return how other processes open some GPU memory; empty for CPU memory, or if it cannot be opened."""
    if memory.device == "cpu" or _driver() is None:
        return b""
    base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _IpcHandle()
    try:
        # Pending work must be visible to readers.
        with _on(memory.device):
            address = ctypes.c_uint64(memory.address)
            _call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), address)
            _call("cuIpcGetMemHandle", ctypes.byref(handle), address)
    except _CudaError:
        # Memory of expandable segments has no handle.
        return b""
    return ctypes.string_at(ctypes.byref(handle), _HANDLE) + _OFFSET.pack(memory.address - base.value)


class CudaIpc:
    """The transport between GPU memories, or GPU and CPU memory, of two processes of one host."""

    name = "cuda_ipc"

    def __init__(self, host: str) -> None:
        self._host = host
        self._slots = Attach(host)
        self._opened: dict[tuple[str, bytes], _Opened] = {}
        self._lock = threading.Lock()

    def reason_against(self, remote: Remote, local_device: str) -> str:
        if remote.proc.partition("/")[0] != self._host:
            return "the owner is on another host"
        if remote.device == "cpu":
            return "the buffer is not in GPU memory"
        if not torch.cuda.is_available():
            return "this process has no GPU"
        if not remote.gpu:
            return "other processes cannot open the memory (as with torch's expandable segments)"
        return self._slots.reason_against(remote._replace(device="cpu"), "cpu") or self._cannot_open(
            remote, _device_of(local_device)
        )

    def _cannot_open(self, remote: Remote, device: str) -> str:
        try:
            self._slots.check([remote])
            with _on(device):
                self._address(remote)
        except TransferError:
            # It is gone; the transfer reports that.
            return ""
        except _CudaError as error:
            return f"the driver cannot open the other process's memory ({error})"
        return ""

    def move(self, moves: Sequence[Move], writing: bool, timeout: float) -> None:
        remotes = [move.remote for move in moves]
        self._slots.check(remotes)
        try:
            for move in moves:
                remote, local = move.remote, move.local
                with _on(_device_of(local.device)):
                    base = self._address(remote) + remote.offset
                    for there, here, size in move.rows.tolist():
                        theirs, mine = base + there, local.address + here
                        to, source = (theirs, mine) if writing else (mine, theirs)
                        _call("cuMemcpy", ctypes.c_uint64(to), ctypes.c_uint64(source), ctypes.c_size_t(size))
                    torch.cuda.synchronize()
        except _CudaError as error:
            raise lost_meanwhile(remotes[0], writing, f"{remotes[0].title} has died or freed it ({error})") from error
        self._slots.check_after(remotes, writing)

    def _address(self, remote: Remote) -> int:
        """Return the local address of another process's memory. Mappings stay until their owner's death."""
        handle, offset = remote.gpu[:_HANDLE], _OFFSET.unpack(remote.gpu[_HANDLE:])[0]
        with self._lock:
            opened = self._opened.get((remote.proc, handle))
            if opened is None:
                base, context = ctypes.c_uint64(), ctypes.c_void_p()
                packed = _IpcHandle.from_buffer_copy(handle)
                _call("cuCtxGetCurrent", ctypes.byref(context))
                _call("cuIpcOpenMemHandle_v2", ctypes.byref(base), packed, ctypes.c_uint(_LAZY_PEER_ACCESS))
                opened = self._opened[remote.proc, handle] = _Opened(base.value, context.value or 0)
        return opened.base + offset

    def forget(self, proc: str) -> None:
        """Release a dead process's memory, which is freed once nobody has it open."""
        with self._lock:
            gone = [key for key in self._opened if key[0] == proc]
            opened = [self._opened.pop(key) for key in gone]
        if opened:
            # The driver may wait for pending GPU work: for example a collective that lacks the dead process.
            threading.Thread(target=_close, args=(opened,), name="monarch-cuda-close", daemon=True).start()


def _close(opened: Sequence[_Opened]) -> None:
    for each in opened:
        try:
            _call("cuCtxSetCurrent", ctypes.c_void_p(each.context))
            _call("cuIpcCloseMemHandle", ctypes.c_uint64(each.base))
        except _CudaError:
            continue


def _device_of(local_device: str) -> str:
    """Return the GPU for a transfer to or from some memory of this process."""
    return local_device if local_device != "cpu" else f"cuda:{torch.cuda.current_device()}"
