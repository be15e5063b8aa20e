"""GPU memory of another process of this host, opened by CUDA's own handles: copied from GPU to GPU, not by the host.

The driver is called directly. torch's own way counts references in files of shared memory, which a killed process
leaves behind; here the slot of a buffer says whether it is still there, as for any other memory.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from monarch._tensors.attach import Attach
from monarch._tensors.memory import Memory
from monarch._tensors.registry import Remote
from monarch._tensors.transport import Move, lost_meanwhile

_HANDLE = 64
_OFFSET = struct.Struct("<Q")
_LAZY_PEER_ACCESS = 1


class _IpcHandle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * _HANDLE)]


@cache
def _driver() -> Any:
    """CUDA's driver library; None if there is none."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


class _CudaError(Exception):
    pass


def _call(name: str, *arguments: Any) -> None:
    status = getattr(_driver(), name)(*arguments)
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
        raise _CudaError(f"{name}: {(text.value or b'unknown error').decode()}")


def open_handle_of(memory: Memory) -> bytes:
    """How other processes open some memory of a GPU; empty for memory of the CPU, or if it cannot be opened."""
    if memory.device == "cpu" or _driver() is None:
        return b""
    # What is still under way there is to be seen by those that read it.
    torch.cuda.synchronize(memory.device)
    base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _IpcHandle()
    try:
        with torch.cuda.device(memory.device):
            address = ctypes.c_uint64(memory.address)
            _call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), address)
            _call("cuIpcGetMemHandle", ctypes.byref(handle), address)
    except _CudaError:
        # Memory of expandable segments has no handle.
        return b""
    return ctypes.string_at(ctypes.byref(handle), _HANDLE) + _OFFSET.pack(memory.address - base.value)


class CudaIpc:
    """The transport between memory of GPUs, or of a GPU and the CPU, of two processes of one host."""

    name = "cuda_ipc"

    def __init__(self, host: str) -> None:
        self._host = host
        self._slots = Attach(host)
        self._opened: dict[tuple[str, bytes], int] = {}
        self._lock = threading.Lock()

    def reason_against(self, remote: Remote, local_device: str) -> str:
        if remote.proc.partition("/")[0] != self._host:
            return "the owner is on another host"
        if remote.device == "cpu":
            return "the buffer is not in memory of a GPU"
        if not torch.cuda.is_available():
            return "this process has no GPU"
        if not remote.gpu:
            return "the memory cannot be opened from elsewhere, such as that of torch's expandable segments"
        return self._slots.reason_against(remote._replace(device="cpu"), "cpu")

    def move(self, moves: Sequence[Move], writing: bool, timeout: float) -> None:
        remotes = [move.remote for move in moves]
        self._slots.check(remotes)
        try:
            for move in moves:
                remote, local = move.remote, move.local
                device = local.device if local.device != "cpu" else f"cuda:{torch.cuda.current_device()}"
                with torch.cuda.device(device):
                    torch.cuda.synchronize()
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
        """Where memory of another process is in this one. What was opened stays so until its owner's death."""
        handle, offset = remote.gpu[:_HANDLE], _OFFSET.unpack(remote.gpu[_HANDLE:])[0]
        with self._lock:
            base = self._opened.get((remote.proc, handle))
            if base is None:
                opened = ctypes.c_uint64()
                packed = _IpcHandle.from_buffer_copy(handle)
                _call("cuIpcOpenMemHandle_v2", ctypes.byref(opened), packed, ctypes.c_uint(_LAZY_PEER_ACCESS))
                base = self._opened[remote.proc, handle] = opened.value
        return base + offset

    def forget(self, proc: str) -> None:
        """A process has died: its memory goes when nobody has it open."""
        with self._lock:
            gone = [key for key in self._opened if key[0] == proc]
            addresses = [self._opened.pop(key) for key in gone]
        for address in addresses:
            try:
                _call("cuIpcCloseMemHandle", ctypes.c_uint64(address))
            except _CudaError:
                continue
