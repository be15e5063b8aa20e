"""Random ops on a rank: on the CPU a rank draws its shard of the whole tensor, as torch's DTensor does on GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from monarch._engine.dtensor_compat import seed_devices, shard_sizes
from monarch._engine.rank.shards.making import Draw, draw, wrap

aten: Any = torch.ops.aten


def random_op(mesh: Any, op: Any, tensors: Any, values: Any, args: Any, kwargs: Any) -> Any:
    """Run a random op with a seed from the program, the last of the numbers."""
    seed = values[-1]
    if mesh.device_type == "cpu":
        known = _KNOWN.get(op)
        if known is not None:
            return known(op, seed, *args, **kwargs)
        if op in _FILLS:
            return _fill_in_place(op, seed, *args, **kwargs)
    with _seeded(mesh, seed, tensors):
        return op(*args, **kwargs)


def _seeded(mesh: Any, seed: int, tensors: Any) -> Any:
    """Seed torch's generators in a block; on the CPU each shard of a sharded tensor gets a seed of its own."""
    if mesh.device_type != "cpu":
        return seed_devices(seed, mesh)
    first = next((each for each in tensors if isinstance(each, DTensor)), None)
    place = 0
    for size, at, placement in zip(
        mesh.shape, mesh.get_coordinate(), first.placements if first is not None else (), strict=False
    ):
        place = place * size + (at if placement.is_shard() else 0)
    return seed_devices((seed + place) % 2**63, None)


def _drawn(tensor: DTensor, seed: int, fill: Draw, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return random numbers for the shard that this rank has of a tensor."""
    mesh: Any = tensor.device_mesh
    shape = tuple(tensor.shape)
    sizes, offsets = shard_sizes(shape, mesh.shape, mesh.get_coordinate(), tensor.placements)
    return draw(fill, seed, shape, sizes, offsets, dtype or tensor.dtype)


def _fill_in_place(op: Any, seed: int, tensor: DTensor, *args: Any, **kwargs: Any) -> DTensor:
    def fill(out: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        return op(out, *args, **{**kwargs, "generator": generator})

    tensor.to_local().copy_(_drawn(tensor, seed, fill))
    return tensor


def _like(fill: Callable[..., torch.Tensor], count: int) -> Callable[..., DTensor]:
    """Return an op that makes a tensor like another one, with a number of arguments for its distribution."""

    def make(op: Any, seed: int, tensor: DTensor, *args: Any, **kwargs: Any) -> DTensor:
        def drawn(out: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
            return fill(out, *args[:count], generator=generator)

        dtype = kwargs.get("dtype") or tensor.dtype
        local = _drawn(tensor, seed, drawn, dtype)
        return wrap(local, tensor.device_mesh, tensor.placements, tensor.shape)

    return make


def _uniform(out: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return out.uniform_(generator=generator)


def _random_below(out: torch.Tensor, high: int, *, generator: torch.Generator) -> torch.Tensor:
    return out.random_(0, high, generator=generator)


def _random_between(out: torch.Tensor, low: int, high: int, *, generator: torch.Generator) -> torch.Tensor:
    return out.random_(low, high, generator=generator)


def _dropout(op: Any, seed: int, tensor: DTensor, p: float, train: bool | None = True) -> Any:
    mesh, placements = tensor.device_mesh, tensor.placements
    local = tensor.to_local()
    if train is False:
        mask = torch.ones_like(local, dtype=torch.bool)
        return tensor, wrap(mask, mesh, placements, tensor.shape)
    mask = _drawn(tensor, seed, _uniform, torch.float32) >= p
    kept = local * mask if p >= 1 else local * mask / (1 - p)
    return wrap(kept, mesh, placements, tensor.shape), wrap(mask, mesh, placements, tensor.shape)


def _bernoulli(op: Any, seed: int, tensor: DTensor, **kwargs: Any) -> DTensor:
    drawn = _drawn(tensor, seed, _uniform, torch.float32)
    local = (drawn < tensor.to_local()).to(tensor.dtype)
    return wrap(local, tensor.device_mesh, tensor.placements, tensor.shape)


_FILLS = {
    aten.normal_.default,
    aten.uniform_.default,
    aten.bernoulli_.float,
    aten.exponential_.default,
    aten.log_normal_.default,
    aten.cauchy_.default,
    aten.geometric_.default,
    aten.random_.default,
    getattr(aten.random_, "from"),
    aten.random_.to,
}
"""Ops that fill a tensor with random numbers in place, and take a generator."""
_KNOWN: dict[Any, Any] = {
    aten.rand_like.default: _like(torch.Tensor.uniform_, 0),
    aten.randn_like.default: _like(torch.Tensor.normal_, 0),
    aten.randint_like.default: _like(_random_below, 1),
    aten.randint_like.low_dtype: _like(_random_between, 2),
    aten.native_dropout.default: _dropout,
    aten.bernoulli.default: _bernoulli,
}
