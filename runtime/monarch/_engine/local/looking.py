"""Values of rank-local tensors for the program."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from monarch._core.kinds import is_a
from monarch._core.shapes.region import Region
from monarch._engine.dtensor_compat import tree_flatten, tree_unflatten, without_modes
from monarch._engine.local.checking import check_input
from monarch._engine.local.tensor import RankTensor
from monarch._engine.meshes.tensor_mesh import TensorMesh
from monarch._engine.tensors.tensor import Tensor
from monarch._node.current import current_node
from monarch._node.future import DoneFuture, Future, then
from monarch.exceptions import ArgumentError, AxisError, MeshOpError, PointError


def item(tensor: RankTensor) -> Any:
    """Return the number that all ranks have; raise if they differ."""
    return same_everywhere(tensor, "item()")


def same_everywhere(tensor: RankTensor, what: str) -> Any:
    """Return the number in a tensor of one element, if all ranks have the same."""
    check_input(what, tensor)
    if tensor.numel() != 1:
        raise RuntimeError(f"a Tensor with {tensor.numel()} elements cannot be converted to Scalar")
    mesh = tensor.monarch_layout.mesh
    with without_modes():
        found: list[Any] = mesh.recovery.look(tensor.monarch_ref.number, "item", mesh.actors)
    first = found[0]
    # NaN is equal to NaN here.
    if any(each != first and not (each != each and first != first) for each in found):
        shown = ", ".join(str(each) for each in found[:8])
        raise MeshOpError(
            f"{what}: the ranks have different values ({shown}); reduce them first, as in tensor.reduce(axis), or look "
            f"at one with monarch.inspect(tensor)"
        )
    return first


def place_in(mesh: TensorMesh, shard: dict[str, int] | None, dims: dict[str, int]) -> Region:
    """Return the region of one rank.

    Raises:
        ArgumentError: some axes of the mesh have no coordinate; with none at all, the first rank is meant.
        AxisError: the mesh has no axis of a name.
        PointError: a coordinate is outside of the mesh.
    """
    labels = mesh.region.extent.labels
    given = {**(shard or {}), **dims}
    if not given:
        return mesh.region.slice(**dict.fromkeys(labels, 0))
    for axis in given:
        if axis not in labels:
            raise AxisError(f"the mesh has no axis {axis!r}; it has {', '.join(labels)}")
    for axis, size in zip(labels, mesh.region.extent.sizes, strict=True):
        if axis not in given:
            raise ArgumentError(f"Missing key {axis!r} in shard map: give a coordinate for each axis of {mesh!r}")
        if not is_a(given[axis], int) or not 0 <= given[axis] < size:
            raise PointError(f"{axis}={given[axis]!r}: expected a coordinate from 0 to {size - 1}")
    return mesh.region.slice(**given)


def fetch_shard(obj: Any, shard: dict[str, int] | None = None, **dims: int) -> Future[Any]:
    """Return a future of the tensors that one rank has.

    Args:
        obj: a rank-local tensor, or nested lists, tuples and dicts with some.
        shard: coordinates of the rank by axis; the first rank without any.
        dims: likewise, as keyword arguments.

    Returns:
        A future of the same structure with plain tensors, on the CPU. It fails with TensorError if an op
        failed that one of them depends on, and with DeviceMeshError if the rank has died.

    Raises:
        ArgumentError: some axes have no coordinate, or there is a tensor of another kind.
        AxisError: the mesh has no axis of a name.
        PointError: a coordinate is outside of the mesh.
    """
    leaves, tree = tree_flatten(obj)
    tensors = [each for each in leaves if isinstance(each, RankTensor)]
    if any(isinstance(each, Tensor) for each in leaves):
        raise ArgumentError(
            "fetch_shard: expected a rank-local tensor, got a distributed one; use monarch.fetch(tensor, axis=...)"
        )
    if not tensors:
        return DoneFuture(current_node(), "fetch_shard", obj)
    mesh = tensors[0].monarch_layout.mesh
    for tensor in tensors:
        check_input("fetch_shard", tensor)
        if tensor.monarch_layout.mesh is not mesh:
            raise ArgumentError("fetch_shard: the tensors are on different meshes; fetch each mesh separately")
    (rank,) = place_in(mesh, shard, dims).base_ranks()
    numbers = [tensor.monarch_ref.number for tensor in tensors]
    # The references stay until the values have come.
    held = [tensor.monarch_ref for tensor in tensors]

    def values(reports: Any) -> Any:
        found = iter(next(each.value for each in reports if each.value is not None))
        held.clear()
        with without_modes():
            filled = [_owned(next(found)) if isinstance(each, RankTensor) else each for each in leaves]
        return tree_unflatten(filled, tree)

    # All ranks are asked: a tensor has no value if an op that it depends on has failed on any of them.
    return asked(mesh, lambda: mesh.actors.fetch.call(numbers, rank), "fetch_shard", values)


def _owned(shard: torch.Tensor) -> torch.Tensor:
    return shard.cpu().clone() if shard.device.type == "cpu" else shard.cpu()


def asked(mesh: TensorMesh, send: Callable[[], Any], label: str, make: Callable[[Iterable[Any]], Any]) -> Future[Any]:
    """Ask ranks something in order with the ops of a mesh; return a future.

    Args:
        mesh: the mesh.
        send: calls an endpoint of some executors, and returns the future of their reports.
        label: for the future.
        make: makes the result of the reports.
    """
    with without_modes():
        mesh.recovery.before_look()
        first = [send()]
    first[0].rename("the read of a tensor")

    def again() -> Any:
        return (first.pop() if first else send()).get()

    def settle() -> Any:
        with without_modes():
            return make(mesh.recovery.ask(again).values())

    return then(first[0], label, settle)


def inspect(obj: Any, shard: dict[str, int] | None = None, **dims: int) -> Any:
    """Return the tensors that one rank has; waits. See ``fetch_shard``."""
    return fetch_shard(obj, shard, **dims).get()


def show(obj: Any, shard: dict[str, int] | None = None, **dims: int) -> None:
    """Print the tensors that one rank has; see ``fetch_shard``."""
    print(inspect(obj, shard, **dims))
