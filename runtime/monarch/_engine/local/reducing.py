"""``reduce``: the tensors of the ranks combined along axes of the mesh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch

from monarch._core.kinds import is_a
from monarch._engine.dtensor_compat import tree_map_only
from monarch._engine.issuing.encoding import Input
from monarch._engine.issuing.stream import Ref
from monarch._engine.layouts.rank_layout import dense_layout
from monarch._engine.local.checking import check_input, check_local
from monarch._engine.local.tensor import RankTensor
from monarch._engine.meshes.tensor_mesh import TensorMesh
from monarch.exceptions import ArgumentError, AxisError, MeshOpError, ShapeError

REDUCTIONS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor", "stack")


def reduce(
    tensors: Any,
    dims: Sequence[str] | str | None = None,
    reduction: str = "sum",
    scatter: bool = False,
    mesh: Any = None,
) -> Any:
    """Combine the tensors of the ranks along axes of the mesh.

    Args:
        tensors: a rank-local tensor, or nested lists, tuples and dicts with some.
        dims: an axis or several; None for all axes of the mesh.
        reduction: "sum", "avg", "product", "min", "max", "band", "bor", "bxor", or "stack", which adds a first dim
            with the tensors of all ranks along the axis.
        scatter: whether each rank gets only its shard: that of the first dim, whose size must be that of the axis. With
            "stack", ranks exchange shards (all-to-all).
        mesh: must be None; move the result with ``to_mesh``.

    Returns:
        The same structure with new tensors, the same on all ranks along the axes unless ``scatter`` is set.

    Raises:
        AxisError: the mesh has no axis of a name.
        ShapeError: the first dim does not have the size of the axis.
        MeshOpError: autograd records a tensor, or it is not rank-local.
    """
    check_local("reduce", tensors)
    return tree_map_only(RankTensor, lambda each: _reduced(each, dims, reduction, scatter, mesh, False), tensors)


def reduce_(
    tensors: Any,
    dims: Sequence[str] | str | None = None,
    reduction: str = "sum",
    scatter: bool = False,
    mesh: Any = None,
) -> Any:
    """Combine the tensors of the ranks along axes of the mesh, in place; see ``reduce``.

    Raises:
        ArgumentError: the result would have another shape.
    """
    check_local("reduce_", tensors)
    return tree_map_only(RankTensor, lambda each: _reduced(each, dims, reduction, scatter, mesh, True), tensors)


def _reduced(tensor: RankTensor, dims: Any, reduction: str, scatter: bool, other: Any, in_place: bool) -> RankTensor:
    check_input("reduce", tensor)
    mesh: TensorMesh = tensor.monarch_layout.mesh
    axes = _axes(mesh, dims)
    if other is not None:
        raise MeshOpError("reduce: mesh= is not supported; reduce, then move the result with tensor.to_mesh(mesh)")
    if reduction not in REDUCTIONS:
        raise ArgumentError(f"reduction: expected one of {', '.join(REDUCTIONS)}, got {reduction!r}")
    if torch.is_grad_enabled() and tensor.requires_grad:
        raise MeshOpError("reduce has no gradient; reduce the gradient, or use tensor.detach() or torch.no_grad()")
    shape = _shape(tensor, mesh, axes, reduction, scatter)
    if in_place:
        loan = tensor.monarch_loan
        if shape != tuple(tensor.shape):
            raise ArgumentError(f"reduce_: the result has shape {shape} instead of {tuple(tensor.shape)}; use reduce")
        if loan is not None and not loan.mutable:
            raise MeshOpError("reduce_ would change a tensor that is borrowed read-only; use borrow(..., mutable=True)")
        mesh.issue(
            "reduce", (Input(0), axes, reduction, scatter, True, _number(tensor)), cast("Any", (tensor,)), writes=(0,)
        )
        return tensor
    layout = dense_layout(mesh, shape, tensor.dtype)
    made = RankTensor(Ref(mesh.stream, layout), layout, tensor.monarch_stream)
    args = (Input(0), axes, reduction, scatter, False, _number(tensor))
    mesh.issue("reduce", args, cast("Any", (tensor,)), (), cast("Any", (made,)))
    return made


def _number(tensor: RankTensor) -> int:
    return tensor.monarch_stream.number if tensor.monarch_stream is not None else 0


def _axes(mesh: TensorMesh, dims: Any) -> tuple[str, ...]:
    axes: tuple[str, ...] = mesh.axes if dims is None else (dims,) if is_a(dims, str) else tuple(dims)
    for axis in axes:
        if axis not in mesh.axes:
            raise AxisError(f"reduce: the mesh has no axis {axis!r}; it has {', '.join(mesh.axes)}")
    if len(set(axes)) != len(axes):
        raise ArgumentError(f"reduce: expected distinct axes, got {axes}")
    return axes


def _shape(tensor: RankTensor, mesh: TensorMesh, axes: tuple[str, ...], reduction: str, scatter: bool) -> Any:
    shape = tuple(tensor.shape)
    if not scatter and reduction != "stack":
        return shape
    if len(axes) != 1:
        raise ArgumentError(f"reduce: 'stack' and scatter=True take one axis, got {axes}")
    size = mesh.sizes[mesh.axes.index(axes[0])]
    if not scatter:
        return (size, *shape)
    if not shape or shape[0] != size:
        raise ShapeError(
            f"reduce: scatter=True shards the first dim over the axis {axes[0]!r}, so it must have size {size}; the "
            f"tensor has shape {shape}"
        )
    return shape if reduction == "stack" else shape[1:]
