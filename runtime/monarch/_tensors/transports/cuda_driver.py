"""The CUDA driver, called directly: memory of other processes by handles, and copies between any memories."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import torch

from monarch._tensors.torch_compat import stream_handle
from monarch._tensors.transports.rectangles import Rectangle

HANDLE = 64
"""Size in bytes of the handle of a segment."""
_LAZY_PEER_ACCESS = 1
_NOT_READY = 600
"""CUDA_ERROR_NOT_READY."""
_HOST, _DEVICE = 1, 2
"""CU_MEMORYTYPE_HOST and CU_MEMORYTYPE_DEVICE."""


class CudaError(Exception):
    """A call to the driver failed, or an earlier kernel."""


class _IpcHandle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * HANDLE)]


class Side(ctypes.Structure):
    """One side of a CUDA_MEMCPY2D."""

    _fields_ = [
        ("x", ctypes.c_size_t),
        ("y", ctypes.c_size_t),
        ("kind", ctypes.c_int),
        ("host", ctypes.c_void_p),
        ("device", ctypes.c_uint64),
        ("array", ctypes.c_void_p),
        ("pitch", ctypes.c_size_t),
    ]


class Copy2D(ctypes.Structure):
    """The driver's CUDA_MEMCPY2D."""

    _fields_ = [("source", Side), ("to", Side), ("width", ctypes.c_size_t), ("height", ctypes.c_size_t)]


@cache
def driver() -> Any:
    """Return CUDA's driver library, or None."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def call(name: str, *arguments: Any) -> None:
    """Call a function of the driver.

    Raises:
        CudaError: it failed.
    """
    status = getattr(driver(), name)(*arguments)
    if status:
        text = ctypes.c_char_p()
        driver().cuGetErrorString(status, ctypes.byref(text))
        raise CudaError(f"{name}: {(text.value or b'unknown error').decode()}")


class _Bound(threading.local):
    """The GPUs whose contexts this thread has."""

    def __init__(self) -> None:
        self.gpus: set[int] = set()


_bound = _Bound()


@contextmanager
def on_gpu(device: str) -> Generator[int]:
    """Bind this thread to a GPU; give the handle of the stream that torch uses there now.

    Args:
        device: as in ``cuda:0``.

    Raises:
        CudaError: an earlier kernel failed.
    """
    gpu = int(device.removeprefix("cuda:"))
    # torch's own context manager and streams take 20 us.
    with nullcontext() if torch.cuda.current_device() == gpu else torch.cuda.device(gpu):
        if gpu not in _bound.gpus:
            # A new thread has no context before torch uses the GPU there.
            try:
                torch.cuda.current_stream().synchronize()
            except RuntimeError as error:
                raise CudaError(str(error).partition("\n")[0]) from error
            _bound.gpus.add(gpu)
        yield stream_handle(gpu)


def bound_stream(gpu: int) -> int | None:
    """Return the handle of the stream that torch uses now if this thread is bound to a GPU, else None."""
    return stream_handle(gpu) if gpu in _bound.gpus and torch.cuda.current_device() == gpu else None


def wait_for_stream(stream: int) -> None:
    """Finish what was issued on a stream; errors of earlier kernels come out here.

    Work of other streams, such as a collective that waits for another rank, continues.

    Args:
        stream: its handle; the GPU is bound to this thread.

    Raises:
        CudaError: an earlier kernel failed.
    """
    call("cuStreamSynchronize", ctypes.c_void_p(stream))


def is_idle(stream: int) -> bool:
    """Return whether all that was issued on a stream is done.

    Args:
        stream: its handle; the GPU is bound to this thread.

    Raises:
        CudaError: an earlier kernel failed.
    """
    status = driver().cuStreamQuery(ctypes.c_void_p(stream))
    if status not in (0, _NOT_READY):
        call("cuStreamQuery", ctypes.c_void_p(stream))
    return status == 0


def handle_of(address: int) -> tuple[bytes, int]:
    """Return the handle of the segment that holds an address of this process, and the offset in it.

    Raises:
        CudaError: it has none, as memory of expandable segments.
    """
    base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _IpcHandle()
    call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
    call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
    return ctypes.string_at(ctypes.byref(handle), HANDLE), address - base.value


def open_segment(handle: bytes) -> tuple[int, int]:
    """Map a segment of another process; return its address, and the context in which it is mapped.

    Raises:
        CudaError: the driver refuses.
    """
    base, context = ctypes.c_uint64(), ctypes.c_void_p()
    call("cuCtxGetCurrent", ctypes.byref(context))
    packed = _IpcHandle.from_buffer_copy(handle)
    call("cuIpcOpenMemHandle_v2", ctypes.byref(base), packed, ctypes.c_uint(_LAZY_PEER_ACCESS))
    return base.value, context.value or 0


def close_segment(base: int, context: int) -> None:
    """Unmap a segment, in the context in which it was mapped.

    Raises:
        CudaError: the driver refuses.
    """
    call("cuCtxSetCurrent", ctypes.c_void_p(context))
    call("cuIpcCloseMemHandle", ctypes.c_uint64(base))


def copy(to: tuple[int, str], source: tuple[int, str], piece: Rectangle, to_is_remote: bool, stream: int) -> None:
    """Issue a copy on a stream.

    Args:
        to, source: address, and device, of the memories; one of them at least is a GPU's.
        piece: which bytes.
        to_is_remote: whether ``to`` is the side that the rectangle calls ``there``.
        stream: handle of one of the GPU that is bound to this thread.

    Raises:
        CudaError: the driver refuses.
    """
    there, here = (piece.there, piece.pitch_there), (piece.here, piece.pitch_here)
    (to_offset, to_pitch), (source_offset, source_pitch) = (there, here) if to_is_remote else (here, there)
    to_address, source_address = to[0] + to_offset, source[0] + source_offset
    handle = ctypes.c_void_p(stream)
    if piece.height == 1:
        addresses = ctypes.c_uint64(to_address), ctypes.c_uint64(source_address)
        call("cuMemcpyAsync", *addresses, ctypes.c_size_t(piece.width), handle)
        return
    sides = _side(source_address, source[1], source_pitch), _side(to_address, to[1], to_pitch)
    call("cuMemcpy2DAsync_v2", ctypes.byref(Copy2D(*sides, piece.width, piece.height)), handle)


def _side(address: int, device: str, pitch: int) -> Side:
    if device == "cpu":
        return Side(0, 0, _HOST, address, 0, None, pitch)
    return Side(0, 0, _DEVICE, None, address, None, pitch)
