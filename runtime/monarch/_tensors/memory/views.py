"""Memory of this process that is read and written as bytes: of a tensor, or of anything that gives a memoryview."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import numpy
import torch

from monarch.exceptions import ArgumentError


class Memory(NamedTuple):
    """A contiguous piece of memory of this process."""

    address: int
    size: int
    """Bytes."""
    dtype: str
    """As torch names it, such as ``float32``; empty for plain bytes, which go with any."""
    device: str
    """``cpu``, or ``cuda:N`` as this process counts its GPUs."""
    readonly: bool
    keep: Any
    """What the memory belongs to, which is not freed while this is held."""

    def part(self, offset: int, size: int) -> Memory:
        """Some bytes of it; ArgumentError if they are not within it."""
        if offset < 0 or offset + size > self.size:
            raise ArgumentError(f"bytes {offset} to {offset + size} are not within memory of {self.size} bytes")
        return self._replace(address=self.address + offset, size=size)


def memory_of(data: Any, what: str) -> Memory:
    """The memory of a tensor, a memoryview, or an object that has one, such as an array or a bytearray.

    Args:
        data: one-dimensional and contiguous, and not empty.
        what: how errors name it.

    Raises:
        ArgumentError: it is none of these, or not in one piece.
    """
    if isinstance(data, torch.Tensor):
        return _of_tensor(data, what)
    if isinstance(data, bytes) and what == "the destination":
        raise ArgumentError(f"{what} is bytes, which cannot be written to; give a bytearray or a tensor")
    try:
        view = memoryview(data)
    except TypeError:
        raise ArgumentError(f"{what} is a tensor or a memoryview, and not {type(data).__name__}") from None
    if view.ndim != 1 or not view.c_contiguous:
        raise ArgumentError(
            f"{what} has to be contiguous and of one dimension, and this memoryview of shape {view.shape} is not; "
            f"view.cast('B') makes one of a contiguous memoryview"
        )
    if not view.nbytes:
        raise ArgumentError(f"{what} is empty; there is nothing to read or write")
    address = numpy.frombuffer(view, numpy.uint8).ctypes.data
    return Memory(int(address), view.nbytes, "", "cpu", view.readonly, view)


def _of_tensor(tensor: torch.Tensor, what: str) -> Memory:
    if tensor.layout != torch.strided or tensor.device.type not in ("cpu", "cuda"):
        raise ArgumentError(f"{what} has to be a plain tensor on the CPU or on a GPU, and not {_about(tensor)}")
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise ArgumentError(
            f"{what} has to be contiguous and of one dimension, and this is {_about(tensor)}; tensor.view(-1) gives "
            f"that of a contiguous tensor, without a copy"
        )
    if not tensor.numel():
        raise ArgumentError(f"{what} is empty; there is nothing to read or write")
    size = tensor.numel() * tensor.element_size()
    device = "cpu" if tensor.device.type == "cpu" else f"cuda:{tensor.get_device()}"
    dtype = str(tensor.dtype).removeprefix("torch.")
    # Bytes go with any dtype, however they are held.
    return Memory(tensor.data_ptr(), size, "" if dtype == "uint8" else dtype, device, False, tensor.detach())


def _about(tensor: torch.Tensor) -> str:
    contiguous = "" if tensor.is_contiguous() else ", not contiguous"
    return f"a tensor of shape {tuple(tensor.shape)} on {tensor.device}{contiguous}"


def check_fit(local: Memory, remote_size: int, remote_dtype: str, writing: bool) -> None:
    """Whether a copy between a piece of memory here and a buffer can be made; before any byte moves.

    Raises:
        ArgumentError: it does not fit, is of another dtype, or cannot be written to.
    """
    what = "the source" if writing else "the destination"
    if local.dtype and remote_dtype and local.dtype != remote_dtype:
        raise ArgumentError(
            f"{what} is of {local.dtype} and the buffer of {remote_dtype}; view one as the other, or as torch.uint8"
        )
    if writing and local.size > remote_size:
        raise ArgumentError(f"{what} has {local.size} bytes, and the buffer only {remote_size}; write a part of it")
    if not writing and local.size < remote_size:
        raise ArgumentError(f"{what} has {local.size} bytes, and the buffer {remote_size}; it has to be as large")
    if not writing and local.readonly:
        raise ArgumentError(f"{what} cannot be written to: it is a read-only memoryview")


def bytes_of(memory: Memory) -> torch.Tensor:
    """A tensor of the bytes of some memory, which is the memory itself."""
    whole = memory.keep if isinstance(memory.keep, torch.Tensor) else torch.frombuffer(memory.keep, dtype=torch.uint8)
    view = whole.view(torch.uint8)
    start = memory.address - view.data_ptr()
    return view[start : start + memory.size]


def copy_memory(to: int, source: int, size: int) -> None:
    """Copies memory of this process, which may overlap; Python's lock is free meanwhile."""
    ctypes.memmove(to, source, size)
