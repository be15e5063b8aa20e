"""Errors of arguments of ops on rank-local tensors, raised at the line of the program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from monarch._engine.dtensor_compat import tree_leaves
from monarch._engine.local.tensor import RankTensor, described
from monarch._engine.tensors.tensor import Tensor
from monarch.exceptions import MeshOpError


def check_input(op: Any, tensor: RankTensor) -> None:
    """Raise if a tensor was dropped, or is lent to another stream."""
    if tensor.monarch_dropped:
        raise MeshOpError(f"{op}: a tensor was already dropped, at {tensor.monarch_dropped}")
    if tensor.monarch_loans:
        raise MeshOpError(
            f"{op}: a tensor ({described(tensor)}) is borrowed by another stream, which may change it; drop the borrow "
            f"first"
        )
    loan = tensor.monarch_loan
    if loan is not None and loan.dropped:
        raise MeshOpError(f"{op}: the borrow of a tensor ({described(tensor)}) was dropped; borrow it again")


def check_local(op: str, tensors: Any) -> None:
    """Raise for tensors that a function of rank-local ones would leave as they are."""
    for each in tree_leaves(tensors):
        if isinstance(each, Tensor):
            raise MeshOpError(
                f"{op}: expected rank-local tensors, got one that is sharded over {each.monarch_layout.mesh!r}; "
                f"tensor.to_local() gives its shards, and tensor.replicate() combines and gathers them"
            )
    if isinstance(tensors, torch.Tensor) and not isinstance(tensors, RankTensor):
        raise MeshOpError(
            f"{op}: expected rank-local tensors, got a plain tensor; use monarch.distribute(tensor, mesh).to_local()"
        )


def mixed(op: Any) -> MeshOpError:
    """Return the error for an op on both views of a mesh."""
    return MeshOpError(
        f"{op}: cannot combine a rank-local tensor with a distributed one; convert the distributed tensor with "
        f".to_local(), or the rank-local one with monarch.from_local(tensor, mesh, spec)"
    )


def local_tensor(op: Any, tensor: torch.Tensor) -> MeshOpError:
    """Return the error for a plain tensor."""
    return MeshOpError(
        f"{op}: cannot combine a plain tensor of shape {tuple(tensor.shape)} with rank-local tensors; send "
        f"it to them with monarch.distribute(tensor, mesh).to_local(), or create it in 'with mesh.activate():'"
    )


def _list(tensors: Sequence[Any], what: str) -> str:
    found = [each for each in tensors if isinstance(each, RankTensor)]
    places = [each.monarch_layout.mesh if what == "mesh" else each.stream for each in found]
    return "; ".join(f"{described(each)} is on {place!r}" for each, place in zip(found, places, strict=True))


def mesh_differs(op: Any, tensors: Sequence[Any]) -> MeshOpError:
    """Return the error for tensors of several meshes."""
    return MeshOpError(
        f"{op}: its tensors are on different meshes: {_list(tensors, 'mesh')}; move one with tensor.to_mesh(mesh), or "
        f"select ranks of one with tensor.slice_mesh(...)"
    )


def stream_differs(op: Any, tensors: Sequence[Any]) -> MeshOpError:
    """Return the error for tensors of several streams."""
    return MeshOpError(
        f"{op}: its tensors are on different streams: {_list(tensors, 'stream')}; use stream.borrow(tensor)"
    )
