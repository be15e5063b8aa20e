"""Arguments of an op that are of the program: its tensors, and names of devices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch

from monarch._engine.dispatching.signatures import OpSignature, Signature
from monarch._engine.dtensor_compat import tree_map
from monarch._engine.issuing.observer import current
from monarch._engine.layouts.specs import placements_of
from monarch._engine.tensors.tensor import Tensor
from monarch._engine.values.distributing import distribute_to
from monarch.exceptions import MeshOpError

if TYPE_CHECKING:
    from monarch._engine.meshes.tensor_mesh import TensorMesh

_IMPLICIT = 1 << 20
"""Bytes of a plain tensor that an op takes as it is, on each rank."""


def mesh_of(op: Any, tensors: list[Tensor]) -> TensorMesh:
    """Return the mesh of the tensors of an op; raise if they are of several."""
    mesh: TensorMesh | None = None
    for tensor in tensors:
        layout = getattr(tensor, "monarch_layout", None)
        if layout is None:
            continue
        if mesh is None:
            mesh = layout.mesh
        elif mesh is not layout.mesh:
            raise MeshOpError(
                f"{op}: its tensors are on different meshes, {mesh!r} and {layout.mesh!r}; move one of them with "
                f"monarch.distribute(tensor.full_tensor(), mesh, spec)"
            )
    assert mesh is not None
    return mesh


def replicated(mesh: TensorMesh, op: Any, args: Any, kwargs: Any, signature: Signature, kind: OpSignature) -> Any:
    """Give plain tensors to each rank, if they are small."""
    found: dict[int, Tensor] = {}

    def convert(arg: Any) -> Any:
        if isinstance(arg, torch.Tensor) and not isinstance(arg, Tensor):
            made = found.get(id(arg))
            if made is None:
                made = found[id(arg)] = _implicit(mesh, op, arg)
            return made
        if isinstance(arg, list | tuple):
            return [convert(each) for each in cast("list[Any]", arg)]
        return arg

    args = [convert(arg) for arg in args]
    kwargs = {key: convert(arg) for key, arg in kwargs.items()}
    again = Signature(kind)
    for arg in args:
        again.add(arg)
    for name, arg in kwargs.items():
        again.key.append(name)
        again.add(arg)
    signature.key = again.key
    return args, kwargs, again.tensors


def _implicit(mesh: TensorMesh, op: Any, arg: torch.Tensor) -> Tensor:
    size = arg.numel() * arg.element_size()
    if size > _IMPLICIT:
        raise MeshOpError(
            f"{op}: mixes distributed tensors with a local tensor of {size / 1e6:.1f} MB and shape {tuple(arg.shape)}; "
            f"distribute it once with monarch.distribute(tensor, mesh, spec)"
        )
    number = current.observer.number_in(arg) if current.observer is not None else None
    if number is not None:
        layout = mesh.layouts.dense(arg.shape, arg.dtype, placements_of(None, mesh.axes, arg.dim()))
        made = mesh.make(layout)
        mesh.issue("make", ("full", tuple(arg.shape), arg.dtype, layout.placements), (), (number,), (made,))
        return made
    return distribute_to(mesh, arg.detach(), None)


def on_meta(op: Any, args: Any, kwargs: Any) -> Any:
    """Run an op whose result has no values, which torch.func and ``tensor.to("meta")`` ask for."""

    def bare(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")

    return op(*tree_map(bare, args), **tree_map(bare, kwargs))


def with_device(signature: Signature, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return keyword arguments with the device of the mesh; raise for another one."""
    device = kwargs.get("device")
    if device is None:
        return {key: arg for key, arg in kwargs.items() if key not in ("pin_memory",) or arg}
    mesh = mesh_of("device", signature.tensors)
    wanted = torch.device(device)
    if wanted.type not in ("cpu", mesh.kind):
        raise MeshOpError(
            f"device={str(device)!r}: a distributed tensor stays on the devices of its ranks ({mesh.kind}); "
            f"full_tensor() returns its value to the program"
        )
    return {**{key: arg for key, arg in kwargs.items() if key != "pin_memory" or arg}, "device": mesh.device}
