"""GPU memory of another process of this host, opened by CUDA handles: copied from GPU to GPU, not through the host.

The driver is called directly. torch's own method counts references in shared memory files, which a killed process
leaves behind; here the slot of a buffer shows whether it is still valid, as for any other memory.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress

import torch

from monarch._python.threads import spawn_thread
from monarch._tensors.memory.registry import MemoryReference
from monarch._tensors.memory.views import Memory
from monarch._tensors.transports.attach import Attach
from monarch._tensors.transports.base import Move, lost_meanwhile
from monarch._tensors.transports.cuda_driver import (
    HANDLE,
    CudaError,
    bound_stream,
    close_segment,
    copy,
    driver,
    handle_of,
    is_idle,
    on_gpu,
    open_segment,
    wait_for_stream,
)
from monarch._tensors.transports.rectangles import rectangles, whole
from monarch.exceptions import TransferError

_OFFSET = struct.Struct("<Q")


class _Opened:
    """A segment of another process that is mapped into this one.

    Args:
        base: its address here.
        context: the CUDA context in which it was mapped.
    """

    def __init__(self, base: int, context: int) -> None:
        self.base = base
        self.context = context
        self.pieces: dict[int, MemoryReference] = {}
        """Those that were used here and are not known to be dropped, by key. Lock: that of the transport."""
        self.users = 0
        """Transfers that use it now. Lock: that of the transport."""


def segment_of(remote: MemoryReference) -> bytes:
    """Return the handle of the GPU memory that holds a piece; empty for other memory."""
    return remote.gpu[:HANDLE]


def has_waiting_work(device: str) -> bool:
    """Return whether a copy from or to the memory of a GPU waits for what this thread has issued there.

    Raises:
        CudaError: an earlier kernel failed.
    """
    stream = bound_stream(int(device.removeprefix("cuda:")))
    if stream is not None:
        return not is_idle(stream)
    with on_gpu(device) as stream:
        return not is_idle(stream)


def open_handle_of(memory: Memory) -> bytes:
    """Return how other processes open some GPU memory; empty for CPU memory, or if it cannot be opened."""
    if memory.device == "cpu" or driver() is None:
        return b""
    try:
        # The work of this thread must be visible to readers.
        with on_gpu(memory.device) as stream:
            wait_for_stream(stream)
            handle, offset = handle_of(memory.address)
    except CudaError:
        # Memory of expandable segments has no handle.
        return b""
    return handle + _OFFSET.pack(offset)


class CudaIpc:
    """The transport between GPU memories, or GPU and CPU memory, of two processes of one host."""

    name = "cuda_ipc"

    def __init__(self, host: str) -> None:
        self._host = host
        self._slots = Attach(host)
        self._opened: dict[tuple[str, bytes], _Opened] = {}
        """By proc id and handle. Lock: ``_lock``."""
        self._lock = threading.Lock()

    def reason_against(self, remote: MemoryReference, local_device: str) -> str:
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

    def _cannot_open(self, remote: MemoryReference, device: str) -> str:
        try:
            self._slots.check([remote])
            with on_gpu(device), self._mapped(remote):
                return ""
        except TransferError:
            # It is gone; the transfer reports that.
            return ""
        except CudaError as error:
            return f"the driver cannot open the other process's memory ({error})"

    def move(self, moves: Sequence[Move], writing: bool, timeout: float) -> None:
        remotes = [move.remote for move in moves]
        self._slots.check(remotes)
        try:
            for move in moves:
                remote, local = move.remote, move.local
                # Its copies come after what this thread has issued on the stream.
                with on_gpu(_device_of(local.device)) as stream, self._mapped(remote) as address:
                    there, here = (address + remote.offset, remote.device), (local.address, local.device)
                    to, source = (there, here) if writing else (here, there)
                    for piece in [whole(local.size)] if move.spans is None else rectangles(move.rows):
                        copy(to, source, piece, writing, stream)
                    wait_for_stream(stream)
        except CudaError as error:
            why = f"{remotes[0].title} has died or freed the memory, or a GPU has failed ({error})"
            raise lost_meanwhile(remotes[0], writing, why) from error
        self._slots.check_after(remotes, writing)

    @contextmanager
    def _mapped(self, remote: MemoryReference) -> Generator[int]:
        """Map another process's memory, and return the address of the piece here.

        The segment stays mapped while the owner keeps any piece of it that was used here: the owner cannot give the
        memory back to the GPU before all others have unmapped it.
        """
        handle, offset = segment_of(remote), _OFFSET.unpack(remote.gpu[HANDLE:])[0]
        with self._lock:
            opened = self._opened.get((remote.proc, handle))
            if opened is None:
                self._close_unused()
                opened = self._opened[remote.proc, handle] = _Opened(*open_segment(handle))
            opened.pieces[remote.key] = remote
            opened.users += 1
        try:
            yield opened.base + offset
        finally:
            with self._lock:
                opened.users -= 1

    def _close_unused(self) -> None:
        """Unmap the segments of which the owners have dropped each piece; with the lock."""
        unused: list[_Opened] = []
        for key, opened in list(self._opened.items()):
            kept = self._slots.kept(list(opened.pieces.values()))
            opened.pieces = {each.key: each for each in kept}
            if not kept and not opened.users:
                unused.append(self._opened.pop(key))
        _close_in_thread(unused)

    def forget(self, proc: str) -> None:
        """Release a dead process's memory, which is freed once nobody has it mapped."""
        with self._lock:
            gone = [key for key in self._opened if key[0] == proc]
            opened = [self._opened.pop(key) for key in gone]
        _close_in_thread(opened)


def _close_in_thread(opened: Sequence[_Opened]) -> None:
    if opened:
        # The driver may wait for pending GPU work: for example a collective that lacks the dead process.
        spawn_thread("monarch-cuda-close", _close, opened)


def _close(opened: Sequence[_Opened]) -> None:
    for each in opened:
        with suppress(CudaError):
            close_segment(each.base, each.context)


def _device_of(local_device: str) -> str:
    """Return the GPU for a transfer to or from some memory of this process."""
    return local_device if local_device != "cpu" else f"cuda:{torch.cuda.current_device()}"
