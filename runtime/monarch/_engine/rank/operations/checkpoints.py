"""Checkpoints on a rank: its shards for those who write them, and shards that are read back in place."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch.distributed.tensor import DTensor

from monarch._core.kinds import is_dict
from monarch._engine.dtensor_compat import dtensor_over, shard_of_dtensor, shard_sizes, spec_of_dtensor
from monarch._engine.issuing.failures import OpFailure
from monarch._engine.issuing.shard_refs import ShardRef
from monarch._engine.rank.operations.table import OPERATIONS
from monarch._engine.rank.shards.making import wrap
from monarch._node.services.registry import service
from monarch._tensors.checkpoints.versions import find_version, is_complete

LOAD = "load"
"""Kind of the op that reads tensors from a checkpoint: it gives a value to those that have none, too."""


class HasTensors(Protocol):
    """The executor of a rank, which is above this file."""

    values: dict[int, Any]
    failed: dict[int, OpFailure]


class TensorToRead(NamedTuple):
    """A tensor to read.

    Attributes:
        key: in the checkpoint.
        shape: the shape of the whole tensor.
        stride: likewise.
        dtype: likewise.
        placements: likewise.
    """

    key: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    placements: tuple[Any, ...]


class Contents(NamedTuple):
    """The contents of a checkpoint.

    Attributes:
        folder: the folder of the version.
        tensors: size and dtype by key; None for a value that is not a tensor.
        paths: keys of dicts and indices of lists that lead to each.
    """

    folder: str
    tensors: dict[str, tuple[tuple[int, ...], torch.dtype] | None]
    paths: dict[str, tuple[Any, ...]]


@service("tensor_parts.take", "actor")
def take(executor: HasTensors, state: dict[Any, Any], writes_values: bool, first: int) -> dict[Any, Any]:
    """Return a state with the tensors of this rank.

    Args:
        executor: the executor of the rank.
        state: nested dicts, with a ShardRef for each distributed tensor.
        writes_values: whether there are values of the program, which one rank writes.
        first: that rank.
    """
    rank: int = getattr(executor, "rank", 0)
    return _filled(executor.values, state, writes_values and rank == first)


def _filled(values: dict[int, Any], state: dict[Any, Any], keeps: bool) -> dict[Any, Any]:
    made: dict[Any, Any] = {}
    for key, value in state.items():
        if isinstance(value, ShardRef):
            # A rank outside of its slice has none of it.
            if value.number in values:
                made[key] = values[value.number]
        elif is_dict(value):
            made[key] = _filled(values, value, keeps)
        elif keeps:
            made[key] = value
    return made


def contents_of(path: str, version: str | int | None) -> Contents:
    """Return what a checkpoint has.

    Raises:
        ArgumentError: the folder has no complete version, or not this one.
    """
    from monarch._tensors.checkpoints.restores import Version

    folder = path if version is None and is_complete(path) else find_version(path, version)
    found = Version(folder)
    return Contents(folder, found.tensors(), found.paths())


def values_of(folder: str, keys: list[str]) -> dict[str, Any]:
    """Return values and whole tensors of a checkpoint for the program."""
    from monarch._tensors.checkpoints.restores import Version

    version = Version(folder)
    targets: dict[str, Any] = {key: version.make(key) if version.tensor_size(key) is not None else None for key in keys}
    return {**targets, **version.read(targets)}


def load(mesh: Any, op: Any, tensors: list[Any], values: Any, args: Any, kwargs: Any) -> list[DTensor]:
    """Read this rank's shards of some tensors, in place where it has them."""
    from monarch._tensors.checkpoints.restores import Version

    folder, wanted = values
    targets = [
        # A shard whose collective may still run is waited for.
        _empty(mesh, each) if held is None else dtensor_over(shard_of_dtensor(held), spec_of_dtensor(held))
        for each, held in zip(wanted, tensors, strict=True)
    ]
    Version(folder).read({each.key: target for each, target in zip(wanted, targets, strict=True)})
    return targets


def _empty(mesh: Any, wanted: TensorToRead) -> DTensor:
    """Return this rank's shard of a tensor without a value, with the order of dims in memory of the whole one."""
    sizes, _ = shard_sizes(wanted.shape, mesh.shape, mesh.get_coordinate(), wanted.placements)
    order = sorted(range(len(sizes)), key=lambda dim: -wanted.stride[dim])
    local = torch.empty([sizes[dim] for dim in order], dtype=wanted.dtype, device=mesh.device_type)
    local = local.permute([order.index(dim) for dim in range(len(sizes))])
    return wrap(local, mesh, wanted.placements, wanted.shape, wanted.stride)


OPERATIONS[LOAD] = load
