"""The bytes of memory as sockets want them; those of a GPU by way of pinned memory of the host, piece by piece."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator

import torch

from monarch._tensors.memory.views import Memory, bytes_of

_PIECE = 32 << 20


def host_view(address: int, size: int) -> memoryview:
    """Memory of the CPU as bytes that can be written to; who calls keeps it alive."""
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")


def read_bytes(memory: Memory, offset: int, size: int) -> Iterator[memoryview]:
    """The bytes of a part of some memory, in pieces."""
    if memory.device == "cpu":
        yield host_view(memory.address + offset, size)
        return
    stage = _stage(size)
    for start in range(offset, offset + size, _PIECE):
        length = min(_PIECE, offset + size - start)
        stage[:length].copy_(bytes_of(memory)[start : start + length])
        yield host_view(stage.data_ptr(), length)


def write_bytes(memory: Memory, offset: int, size: int, fill: Callable[[memoryview], None]) -> None:
    """Has a part of some memory written, in pieces, by a function that fills each."""
    if memory.device == "cpu":
        fill(host_view(memory.address + offset, size))
        return
    stage = _stage(size)
    for start in range(offset, offset + size, _PIECE):
        length = min(_PIECE, offset + size - start)
        fill(host_view(stage.data_ptr(), length))
        bytes_of(memory)[start : start + length].copy_(stage[:length])
    torch.cuda.synchronize(memory.device)


def _stage(size: int) -> torch.Tensor:
    return torch.empty(min(size, _PIECE), dtype=torch.uint8, pin_memory=True)
