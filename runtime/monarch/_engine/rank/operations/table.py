"""Operations of the engine on a rank that are no ops of torch. Each gets the mesh, the op, tensors, numbers, and the
arguments with both in their places."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from monarch._engine.dtensor_compat import check_of_linalg, seed_devices, tree_map
from monarch._engine.rank.shards.making import make, wrap
from monarch._engine.rank.shards.randomness import random_op

Operation = Callable[[Any, Any, Any, Any, Any, Any], Any]
made: dict[int, torch.Tensor] = {}
"""Shards that functions have made, by number, until they are adopted. Used by the thread of the executor."""


def _whole(mesh: Any, op: Any, tensors: Any, values: Any, args: Any, kwargs: Any) -> Any:
    """Run an op without a sharding rule on whole values."""

    def inner(arg: Any) -> Any:
        return arg.to_local() if isinstance(arg, DTensor) else arg

    result = op(*tree_map(inner, args), **tree_map(inner, kwargs))
    placements = [Replicate()] * mesh.ndim

    def outer(value: Any) -> Any:
        return (
            DTensor.from_local(value, mesh, placements, run_check=False) if isinstance(value, torch.Tensor) else value
        )

    return tree_map(outer, result)


def _random_whole(mesh: Any, op: Any, tensors: Any, values: Any, args: Any, kwargs: Any) -> Any:
    with seed_devices(values[-1] % 2**63, mesh if mesh.device_type != "cpu" else None):
        return _whole(mesh, op, tensors, values, args, kwargs)


def _divide_otherwise(mesh: Any, op: Any, tensors: Any, values: Any, args: Any, kwargs: Any) -> Any:
    tensor, placements = args
    return tensor.redistribute(placements=placements)


def _adopt(mesh: Any, op: Any, tensors: Any, values: Any, args: Any, kwargs: Any) -> Any:
    _, shape, placements = args
    return wrap(made.pop(values[0]), mesh, placements, shape)


def _check(mesh: Any, op: Any, tensors: Any, values: Any, args: Any, kwargs: Any) -> Any:
    name, is_matrix = args
    info = tensors[0]
    check_of_linalg(info.to_local() if isinstance(info, DTensor) else info, name, is_matrix=is_matrix)
    return []


OPERATIONS: dict[str, Operation] = {
    "local": _whole,
    "random": random_op,
    "random_whole": _random_whole,
    "redistribute": _divide_otherwise,
    "make": make,
    "adopt": _adopt,
    "check": _check,
}
"""By the kind of the template."""
