"""A distributed tensor whose shards a function makes on the ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from monarch._engine.issuing.stream import new_number
from monarch._engine.layouts.specs import Spec, placements_of
from monarch._engine.meshes.tensor_mesh import TensorMesh
from monarch._engine.tensors.tensor import Tensor
from monarch._engine.values.fetching import shard_of
from monarch.exceptions import ShapeError


def assemble(mesh: TensorMesh, function: Callable[..., torch.Tensor], spec: Spec, args: tuple[Any, ...]) -> Tensor:
    """Return the tensor whose shards the function makes; waits until all ranks have made theirs."""
    number = new_number()
    found = mesh.recovery.ask(lambda: mesh.actors.make_shard.call(number, function, args).get())
    made: list[tuple[tuple[int, ...], torch.dtype]] = [report.value for report in found.values()]
    kinds = {dtype for _, dtype in made}
    if len(kinds) > 1 or len({len(shape) for shape, _ in made}) > 1:
        raise ShapeError(f"from_local: the ranks made shards of different dtype or ndim: {sorted(set(map(str, made)))}")
    placements = placements_of(spec, mesh.axes, len(made[0][0]), "spec")
    shape = _whole(mesh, placements, [shape for shape, _ in made])
    for rank, (own, _) in zip(mesh.ranks, made, strict=True):
        expected = shard_of(mesh, shape, placements, rank)[0]
        if tuple(own) != expected:
            raise ShapeError(
                f"from_local: rank {rank} made a shard of shape {tuple(own)}; a tensor of shape {shape} "
                f"sharded by {spec!r} needs {expected} on that rank"
            )
    result = mesh.make(mesh.layouts.dense(shape, made[0][1], placements))
    mesh.issue("adopt", (None, shape, placements), (), (number,), (result,))
    return result


def _whole(mesh: TensorMesh, placements: Any, shapes: list[Any]) -> tuple[int, ...]:
    """Return the shape of the whole tensor, from the shards along each axis that shards a dim."""
    whole = list(shapes[0])
    extent = mesh.region.extent
    sharded: dict[int, list[str]] = {}
    for axis, placement in zip(mesh.axes, placements, strict=True):
        if hasattr(placement, "dim"):
            sharded.setdefault(placement.dim, []).append(axis)
    for dim, axes in sharded.items():
        others = {label: 0 for label in extent.labels if label not in axes}
        region = mesh.region.slice(**others) if extent.labels else mesh.region
        whole[dim] = sum(shapes[mesh.ranks.index(rank)][dim] for rank in region.base_ranks())
    return tuple(whole)
