"""``slice_mesh``: the tensors of some ranks of a mesh."""

from __future__ import annotations

from typing import Any, cast

import torch

from monarch._engine.dtensor_compat import tree_map_only
from monarch._engine.issuing.encoding import Input
from monarch._engine.issuing.stream import Ref
from monarch._engine.layouts.rank_layout import layout_of
from monarch._engine.local.checking import check_input, check_local
from monarch._engine.local.tensor import RankTensor
from monarch._engine.meshes.tensor_mesh import TensorMesh, tensor_mesh_of
from monarch.exceptions import MeshOpError


def slice_mesh(tensors: Any, **coordinates: Any) -> Any:
    """Return the tensors that some ranks have, on a slice of the mesh. They share memory with the whole ones.

    Args:
        tensors: a rank-local tensor, or nested lists, tuples and dicts with some.
        coordinates: by axis: an int drops the axis, a slice keeps a range of it.

    Raises:
        AxisError: the mesh has no axis of a name.
        PointError: a coordinate is outside of the mesh.
        MeshOpError: autograd records a tensor, or it is not rank-local.
    """
    check_local("slice_mesh", tensors)
    return tree_map_only(RankTensor, lambda each: _sliced(each, coordinates), tensors)


def _sliced(tensor: RankTensor, coordinates: dict[str, Any]) -> RankTensor:
    check_input("slice_mesh", tensor)
    if torch.is_grad_enabled() and tensor.requires_grad:
        raise MeshOpError("slice_mesh has no gradient; use tensor.detach()")
    mesh = tensor.monarch_layout.mesh
    return on_other_view(tensor, tensor_mesh_of(mesh.public.slice(**coordinates)))


def on_other_view(tensor: RankTensor, target: TensorMesh) -> RankTensor:
    """Return a tensor on another view of the ranks that hold it."""
    mesh: TensorMesh = tensor.monarch_layout.mesh
    if target is mesh:
        return cast("Any", tensor.detach())
    layout = layout_of(target, tensor.monarch_layout.shape, tensor.monarch_layout.stride, tensor.monarch_layout.dtype)
    made = RankTensor(Ref(target.stream, layout), layout, tensor.monarch_stream)
    mesh.stream.flush()
    target.issue("same", (Input(0),), cast("Any", (tensor,)), (), cast("Any", (made,)))
    # Before the program can drop the first tensor.
    target.stream.flush()
    return made
