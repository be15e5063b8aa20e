"""Between the two views of a mesh: a tensor that is sharded over it, and its shards as a rank-local tensor."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.distributed.tensor.placement_types import Shard

from monarch._engine.issuing.encoding import Input
from monarch._engine.issuing.stream import Ref
from monarch._engine.layouts.rank_layout import dense_layout
from monarch._engine.layouts.specs import Placements, Spec, placements_of, without_partial
from monarch._engine.local.checking import check_input
from monarch._engine.local.tensor import RankTensor
from monarch._engine.meshes.tensor_mesh import TensorMesh
from monarch._engine.tensors.tensor import Tensor
from monarch._engine.values.fetching import shard_of
from monarch._engine.values.redistribution import to_placements
from monarch.exceptions import ArgumentError, MeshOpError, ShapeError


class _ToLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> RankTensor:
        ctx.placements = without_partial(tensor.placements)
        return _shards(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _joined(grads[0], ctx.placements)


class _FromLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: RankTensor, placements: Placements) -> Tensor:
        ctx.placements = without_partial(placements)
        return _joined(tensor, placements)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _shards(to_placements(grads[0], ctx.placements)), None


def to_local(tensor: Tensor) -> RankTensor:
    """Return the shards of a tensor as a rank-local one."""
    return cast("Any", _ToLocal).apply(tensor)


def assembled(tensor: Any, mesh: TensorMesh, spec: Spec) -> Tensor:
    """Return the tensor that has a rank-local one as its shards."""
    if not isinstance(tensor, RankTensor):
        raise ArgumentError(
            f"from_local: expected a function or a rank-local tensor, got {type(tensor).__name__}; "
            f"monarch.distribute() takes other values"
        )
    check_input("from_local", tensor)
    if tensor.monarch_layout.mesh is not mesh:
        raise MeshOpError(f"from_local: the tensor is on {tensor.monarch_layout.mesh!r}, not on {mesh!r}")
    return cast("Any", _FromLocal).apply(tensor, placements_of(spec, mesh.axes, tensor.dim(), "spec"))


def _shards(tensor: Tensor) -> RankTensor:
    layout = tensor.monarch_layout
    mesh: TensorMesh = layout.mesh
    if mesh.actors is None:
        raise ArgumentError("a simulated mesh has no rank-local tensors")
    sizes = {shard_of(mesh, layout.shape, layout.placements, rank)[0] for rank in mesh.ranks}
    if len(sizes) > 1:
        raise ShapeError(
            f"to_local: the ranks have shards of different shapes, {sorted(sizes)}; shard the tensor evenly, or "
            f"replicate() it"
        )
    own = dense_layout(mesh, sizes.pop(), layout.dtype)
    made = RankTensor(Ref(mesh.stream, own), own)
    mesh.issue("to_local", (Input(0),), (tensor,), (), (cast("Any", made),))
    return made


def _joined(tensor: RankTensor, placements: Placements) -> Tensor:
    mesh: TensorMesh = tensor.monarch_layout.mesh
    shape = list(tensor.shape)
    for size, placement in zip(mesh.sizes, placements, strict=True):
        if isinstance(placement, Shard):
            dim: int = cast("Any", placement).dim
            shape[dim] *= size
    made = mesh.make(mesh.layouts.dense(shape, tensor.dtype, placements))
    mesh.issue("from_local", (Input(0), tuple(shape), tuple(placements)), (cast("Any", tensor),), (), (made,))
    return made
