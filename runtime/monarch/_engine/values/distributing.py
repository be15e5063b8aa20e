"""A value of the program on its way to the ranks: each shard is sent once, to all ranks that have it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch.distributed.tensor.placement_types import Shard

from monarch._core.shapes.region import Region
from monarch._engine.issuing.observer import current
from monarch._engine.layouts.specs import Placements, placements_of
from monarch._engine.meshes.tensor_mesh import TensorMesh
from monarch._engine.tensors.tensor import Tensor
from monarch._engine.values.fetching import shard_of
from monarch._meshes.inside import view_at
from monarch.exceptions import MeshOpError


def distribute_to(mesh: TensorMesh, value: torch.Tensor, placements: Placements | None) -> Tensor:
    """Return a distributed tensor with a value of the program."""
    if hasattr(value, "monarch_ref"):
        raise MeshOpError(
            "a rank-local tensor cannot be distributed; convert it with monarch.from_local(tensor, mesh, spec), or "
            "get the value of one rank with monarch.inspect(tensor)"
        )
    placed = placements if placements is not None else placements_of(None, mesh.axes, value.dim())
    layout = mesh.layouts.dense(value.shape, value.dtype, placed)
    made = mesh.make(layout)
    if current.observer is not None:
        current.observer.put(made, value)
    if mesh.actors is None:
        # Of a simulation.
        stream: Any = mesh.stream
        stream.put(made.monarch_ref.number, layout)
        return made
    rest = tuple(layout.shape), layout.stride, placed, mesh.region
    with mesh.stream.order.together():
        # The ranks of a slice make its process groups for the first value.
        sent = [
            view_at(mesh.actors, region).put_shard.call(
                made.monarch_ref.number, _part_at(mesh, value, placed, region.base_ranks()[0]), *rest
            )
            for region in _shards(mesh, placed)
        ]
    for each in sent:
        mesh.stream.follow(each)
    return made


def _part_at(mesh: TensorMesh, value: torch.Tensor, placements: Placements, rank: int) -> torch.Tensor:
    """Return the shard that a rank has."""
    sizes, offsets = shard_of(mesh, value.shape, placements, rank)
    for dim, (size, offset) in enumerate(zip(sizes, offsets, strict=True)):
        value = value.narrow(dim, min(offset, value.shape[dim]), size)
    return value.contiguous()


def _shards(mesh: TensorMesh, placements: Placements) -> Iterator[Region]:
    """Yield the ranks that have the same shard, for each shard."""
    axes = [
        (axis, size)
        for axis, size, each in zip(mesh.axes, mesh.sizes, placements, strict=True)
        if isinstance(each, Shard)
    ]
    if not mesh.region.extent.labels:
        yield mesh.region
        return
    for point in product(*(range(size) for _, size in axes)):
        yield mesh.region.slice(**{axis: at for (axis, _), at in zip(axes, point, strict=True)})
