"""Memory of this process as bytes: of a tensor, or of any object with a memoryview."""

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
    """Size in bytes."""
    dtype: str
    """torch's name, such as ``float32``; empty for plain bytes, which match any dtype."""
    device: str
    """``cpu``, or ``cuda:N`` as this process counts its GPUs."""
    readonly: bool
    keep: Any
    """The owner of the memory, kept alive by this reference."""

    def part(self, offset: int, size: int) -> Memory:
        """Return a range of it; ArgumentError if it is out of bounds."""
        if offset < 0 or offset + size > self.size:
            raise ArgumentError(f"bytes {offset} to {offset + size} are out of range; the memory has {self.size} bytes")
        return self._replace(address=self.address + offset, size=size)


def memory_of(data: Any, what: str) -> Memory:
    """Return the memory of a tensor, a memoryview, or an object that has one, such as an array or a bytearray.

    Args:
        data: one-dimensional and contiguous, and not empty.
        what: its name in errors.

    Raises:
        ArgumentError: it is of another kind, or not contiguous.
    """
    if isinstance(data, torch.Tensor):
        return _of_tensor(data, what)
    if isinstance(data, bytes) and what == "the destination":
        raise ArgumentError(f"{what} is bytes, which is read-only; pass a bytearray or a tensor")
    try:
        view = memoryview(data)
    except TypeError:
        raise ArgumentError(f"{what}: expected a tensor or a memoryview, got {type(data).__name__}") from None
    if view.ndim != 1 or not view.c_contiguous:
        raise ArgumentError(
            f"{what} must be contiguous and one-dimensional, got a memoryview of shape {view.shape}; "
            f"for a contiguous memoryview, pass view.cast('B')"
        )
    if not view.nbytes:
        raise ArgumentError(f"{what} is empty")
    address = numpy.frombuffer(view, numpy.uint8).ctypes.data
    return Memory(int(address), view.nbytes, "", "cpu", view.readonly, view)


def _of_tensor(tensor: torch.Tensor, what: str) -> Memory:
    if tensor.layout != torch.strided or tensor.device.type not in ("cpu", "cuda"):
        raise ArgumentError(f"{what}: expected a plain tensor on the CPU or on a GPU, got {_about(tensor)}")
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise ArgumentError(
            f"{what} must be contiguous and one-dimensional, got {_about(tensor)}; for a contiguous "
            f"tensor, pass tensor.view(-1), which does not copy"
        )
    if not tensor.numel():
        raise ArgumentError(f"{what} is empty")
    size = tensor.numel() * tensor.element_size()
    device = "cpu" if tensor.device.type == "cpu" else f"cuda:{tensor.get_device()}"
    dtype = str(tensor.dtype).removeprefix("torch.")
    # Bytes match any dtype, in any container.
    return Memory(tensor.data_ptr(), size, "" if dtype == "uint8" else dtype, device, False, tensor.detach())


def _about(tensor: torch.Tensor) -> str:
    contiguous = "" if tensor.is_contiguous() else ", not contiguous"
    return f"a tensor of shape {tuple(tensor.shape)} on {tensor.device}{contiguous}"


def check_fit(local: Memory, remote_size: int, remote_dtype: str, writing: bool) -> None:
    """Check that a copy between local memory and a buffer is valid; before any byte moves.

    Raises:
        ArgumentError: sizes or dtypes differ, or the target is read-only.
    """
    what = "the source" if writing else "the destination"
    if local.dtype and remote_dtype and local.dtype != remote_dtype:
        raise ArgumentError(
            f"{what} has dtype {local.dtype}, the buffer {remote_dtype}; view one as the other, or as torch.uint8"
        )
    if writing and local.size > remote_size:
        raise ArgumentError(f"{what} has {local.size} bytes, but the buffer only {remote_size}; write a part of it")
    if not writing and local.size < remote_size:
        raise ArgumentError(f"{what} has {local.size} bytes, but the buffer has {remote_size}; the sizes must match")
    if not writing and local.readonly:
        raise ArgumentError(f"{what} is a read-only memoryview")


def bytes_of(memory: Memory) -> torch.Tensor:
    """Return a tensor of the bytes of some memory, without a copy."""
    whole = memory.keep if isinstance(memory.keep, torch.Tensor) else torch.frombuffer(memory.keep, dtype=torch.uint8)
    view = whole.view(torch.uint8)
    start = memory.address - view.data_ptr()
    return view[start : start + memory.size]


def copy_memory(to: int, source: int, size: int) -> None:
    """Copy memory of this process, possibly overlapping, without the GIL."""
    ctypes.memmove(to, source, size)
