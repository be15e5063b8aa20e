"""Values for the program: a number, the whole tensor, or the shard of one rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from monarch._core.kinds import is_a
from monarch._core.shapes.region import Region
from monarch._engine.dtensor_compat import shard_sizes
from monarch._engine.layouts.specs import is_replicated, replicated, without_partial
from monarch._engine.meshes.tensor_mesh import TensorMesh
from monarch._engine.tensors.tensor import Tensor
from monarch._engine.values.redistribution import moved
from monarch._meshes.inside import view_at
from monarch.exceptions import ArgumentError, AxisError, PointError


def item(tensor: Tensor) -> Any:
    """Return the number in a tensor of one element."""
    whole = moved(tensor, replicated(tensor.monarch_layout.placements)) if not _is_whole(tensor) else tensor
    mesh = whole.monarch_layout.mesh
    return mesh.recovery.look(whole.monarch_ref.number, "item", mesh.first)[0]


def _is_whole(tensor: Tensor) -> bool:
    return is_replicated(tensor.monarch_layout.placements)


def look(tensor: Tensor, what: str, region: Region) -> list[Any]:
    """Return the reports of some ranks about their shards of a tensor."""
    mesh = tensor.monarch_layout.mesh
    return mesh.recovery.look(
        tensor.monarch_ref.number, what, view_at(mesh.actors, region) if mesh.actors is not None else region
    )


def full_tensor(tensor: Tensor) -> torch.Tensor:
    """Return the whole value of a tensor: each shard is sent once, by one rank."""
    whole = in_boxes(tensor)
    mesh = whole.monarch_layout.mesh
    plain = whole.monarch_layout.placements
    region = mesh.region.slice(**_first_of_replicas(mesh, plain))
    shards = look(whole, "local", region)
    if is_replicated(plain):
        return _owned(shards[0])
    return _assembled(mesh, whole, plain, region, shards)


def in_boxes(tensor: Tensor) -> Tensor:
    """Return the tensor with one box of its value on each rank, without terms."""
    placements = tensor.monarch_layout.placements
    plain = without_partial(placements)
    if not all(type(each) in (Replicate, Shard) for each in plain):
        # Dims that are sharded in an order of their own, as after some views.
        plain = replicated(placements)
    return moved(tensor, plain) if plain != placements else tensor


def has_boxes(tensor: Tensor) -> bool:
    """Return whether each rank has one box of the value of a tensor."""
    return all(type(each) in (Replicate, Shard) for each in tensor.monarch_layout.placements)


def _owned(shard: torch.Tensor) -> torch.Tensor:
    """Return a tensor with memory of its own, on the CPU."""
    return shard.cpu().clone() if shard.device.type == "cpu" else shard.cpu()


def _first_of_replicas(mesh: TensorMesh, placements: Sequence[Placement]) -> dict[str, int]:
    if not mesh.region.extent.labels:
        return {}
    return {axis: 0 for axis, each in zip(mesh.axes, placements, strict=True) if isinstance(each, Replicate)}


def _assembled(
    mesh: TensorMesh, tensor: Tensor, placements: Sequence[Placement], region: Region, shards: list[Any]
) -> torch.Tensor:
    layout = tensor.monarch_layout
    whole = torch.empty(layout.shape, dtype=layout.dtype)
    for rank, shard in zip(region.base_ranks(), shards, strict=True):
        sizes, offsets = shard_of(mesh, layout.shape, placements, rank)
        if 0 in sizes:
            continue
        target = whole
        for dim, (size, offset) in enumerate(zip(sizes, offsets, strict=True)):
            target = target.narrow(dim, offset, size)
        target.copy_(shard)
    return whole


def shard_of(
    mesh: TensorMesh, shape: Sequence[int], placements: Sequence[Placement], rank: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return sizes and offsets of the shard of a tensor that a base rank has."""
    return shard_sizes(shape, mesh.sizes, mesh.coordinates(rank), placements)


def fetch(tensor: Tensor, **coordinates: int) -> torch.Tensor:
    """Return the shard of a tensor that one rank has.

    Args:
        tensor: a distributed tensor.
        coordinates: the coordinates of the rank by axis, 0 for those that are not named; without any, the whole value.

    Raises:
        ArgumentError: the tensor is not distributed.
        AxisError: the mesh has no axis of this name.
        PointError: a coordinate is not an int, or outside of the mesh.
        DeviceMeshError: the rank has died, or an op that the tensor depends on has failed.
    """
    if hasattr(tensor, "monarch_ref") and not is_a(tensor, Tensor):
        raise ArgumentError("fetch: the tensor is rank-local; use monarch.inspect(tensor, axis=...)")
    if not is_a(tensor, Tensor):
        raise ArgumentError(f"fetch: expected a distributed tensor, got {type(tensor).__name__}")
    if not coordinates:
        return full_tensor(tensor)
    mesh = tensor.monarch_layout.mesh
    for axis in coordinates:
        if axis not in mesh.axes:
            raise AxisError(f"fetch: the mesh has no axis {axis!r}; it has {', '.join(mesh.axes)}")
        if not is_a(coordinates[axis], int):
            raise PointError(f"fetch: {axis}: expected an int such as 0, got {coordinates[axis]!r}")
    point = {axis: coordinates.get(axis, 0) for axis in mesh.region.extent.labels}
    return _owned(look(tensor, "local", mesh.region.slice(**point))[0])
