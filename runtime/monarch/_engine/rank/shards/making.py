"""Tensors made on a rank: its shard only. Random numbers depend on the seed and the place in the whole tensor alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor

from monarch._engine.dtensor_compat import is_fake, shard_sizes

CHUNK = 1 << 16
"""Numbers drawn with one seed: a rank draws the chunks that its shard meets."""


def make(mesh: Any, op: Any, tensors: Any, values: Any, args: Any, kwargs: Any) -> DTensor:
    """Return this rank's shard of a new tensor."""
    kind, shape, dtype, placements = args
    sizes, offsets = shard_sizes(shape, mesh.shape, mesh.get_coordinate(), placements)
    device = mesh.device_type
    if kind in _DRAWS:
        local = draw(_DRAWS[kind], values[0], shape, sizes, offsets, dtype).to(device)
    elif kind == "arange":
        start, step = values
        local = _numbers(start, step, sizes[0], offsets[0], dtype).to(device)
    elif kind == "full":
        local = torch.full(sizes, values[0], dtype=dtype, device=device)
    else:
        local = getattr(torch, kind)(sizes, dtype=dtype, device=device)
    return wrap(local, mesh, placements, shape)


def wrap(local: torch.Tensor, mesh: Any, placements: Any, shape: Sequence[int], stride: Any = None) -> DTensor:
    """Return a DTensor of this rank's shard; a contiguous one without strides."""
    stride = torch.empty(shape, device="meta").stride() if stride is None else tuple(stride)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def _numbers(start: Any, step: Any, size: int, offset: int, dtype: torch.dtype) -> torch.Tensor:
    if dtype.is_floating_point:
        return (torch.arange(offset, offset + size, dtype=torch.float64) * step + start).to(dtype)
    return torch.arange(offset, offset + size, dtype=torch.int64).mul_(int(step)).add_(int(start)).to(dtype)


def _normal(out: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return out.normal_(generator=generator)


def _uniform(out: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return out.uniform_(generator=generator)


Draw = Callable[[torch.Tensor, torch.Generator], torch.Tensor]
_DRAWS: dict[str, Draw] = {"rand": _uniform, "randn": _normal}


def draw(
    fill: Draw, seed: int, shape: Sequence[int], sizes: Sequence[int], offsets: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """Return a shard of a tensor of random numbers, on the CPU.

    The whole tensor, in row-major order, consists of chunks with a seed each.

    Args:
        fill: fills a tensor with random numbers.
        seed: the seed of the whole tensor.
        shape: the shape of the whole tensor.
        sizes: the sizes of the shard.
        offsets: the offsets of the shard.
        dtype: the dtype of the numbers.
    """
    out = torch.empty(tuple(sizes), dtype=dtype)
    if out.numel() == 0 or is_fake(out):
        return out
    # Rows of the shard that are contiguous in the whole tensor: all dims after the last sharded one.
    inner = len(shape)
    while inner > 0 and sizes[inner - 1] == shape[inner - 1]:
        inner -= 1
    run = int(torch.Size(sizes[max(inner - 1, 0) :]).numel())
    flat = out.view(-1, run)
    starts = _starts(shape, sizes, offsets, max(inner - 1, 0))
    chunks = _Chunks(fill, seed, int(torch.Size(shape).numel()), dtype)
    begins: list[int] = cast("Any", starts).tolist()
    for row, start in zip(flat, begins, strict=True):
        chunks.copy(row, start)
    return out


def _starts(shape: Sequence[int], sizes: Sequence[int], offsets: Sequence[int], dim: int) -> torch.Tensor:
    """Return where each run of a shard begins in the whole tensor."""
    strides = torch.empty(tuple(shape), device="meta").stride()
    base = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    starts = torch.tensor([base])
    for size, stride in zip(sizes[:dim], strides[:dim], strict=True):
        starts = (starts[:, None] + torch.arange(size) * stride).reshape(-1)
    return starts


class _Chunks:
    """The chunks of one tensor; the last one is kept, since neighbours are asked for in turn."""

    def __init__(self, fill: Draw, seed: int, total: int, dtype: torch.dtype) -> None:
        self._fill, self._seed, self._total, self._dtype = fill, seed, total, dtype
        self._generator = torch.Generator()
        self._number = -1
        self._chunk = torch.empty(0)

    def copy(self, target: torch.Tensor, start: int) -> None:
        """Fill a tensor with the numbers from a place on."""
        done = 0
        while done < len(target):
            number, within = divmod(start + done, CHUNK)
            chunk = self._get(number)
            count = min(len(target) - done, len(chunk) - within)
            target[done : done + count] = chunk[within : within + count]
            done += count

    def _get(self, number: int) -> torch.Tensor:
        if number != self._number:
            self._generator.manual_seed((self._seed * 1_000_003 + number) % 2**63)
            size = min(CHUNK, self._total - number * CHUNK)
            self._chunk, self._number = self._fill(torch.empty(size, dtype=self._dtype), self._generator), number
        return self._chunk
