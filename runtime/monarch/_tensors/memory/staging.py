"""The bytes of memory in the form that sockets need; GPU memory goes through pinned host memory, in pieces."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from monarch._tensors.memory.views import Memory, bytes_of

_PIECE = 32 << 20


def host_view(address: int, size: int) -> memoryview:
    """Return CPU memory as writable bytes; the caller keeps it alive."""
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")


def read_bytes(memory: Memory, offset: int, size: int) -> Iterator[memoryview]:
    """Yield the bytes of a range of memory, in pieces."""
    if memory.device == "cpu":
        yield host_view(memory.address + offset, size)
        return
    stage = _stage(size)
    for start in range(offset, offset + size, _PIECE):
        length = min(_PIECE, offset + size - start)
        stage[:length].copy_(bytes_of(memory)[start : start + length])
        yield host_view(stage.data_ptr(), length)


def write_bytes(memory: Memory, offset: int, size: int, fill: Callable[[memoryview], None]) -> None:
    """Fill a range of memory, in pieces, by a function."""
    if memory.device == "cpu":
        fill(host_view(memory.address + offset, size))
        return
    stage = _stage(size)
    for start in range(offset, offset + size, _PIECE):
        length = min(_PIECE, offset + size - start)
        fill(host_view(stage.data_ptr(), length))
        bytes_of(memory)[start : start + length].copy_(stage[:length])
    torch.cuda.current_stream(memory.device).synchronize()


def pending_work(memories: Sequence[Memory]) -> list[Any]:
    """Return events that are done when the GPUs have done what this thread has issued for some memories.

    Other streams are not waited for: a collective on one may wait for another rank.
    """
    devices = {each.device for each in memories if each.device != "cpu"}
    return [torch.cuda.current_stream(device).record_event() for device in devices]


def _stage(size: int) -> torch.Tensor:
    return torch.empty(min(size, _PIECE), dtype=torch.uint8, pin_memory=True)
