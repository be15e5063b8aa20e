"""``with mesh.activate():``: ops of torch that make tensors make one on each rank."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType
from typing import Any, cast

import torch

from monarch._engine import wiring
from monarch._engine.dtensor_compat import DispatchMode, lift_fresh, without_modes
from monarch._engine.issuing.observer import current
from monarch._engine.issuing.stream import Ref
from monarch._engine.layouts.rank_layout import dense_layout
from monarch._engine.local.current import active, active_mesh
from monarch._engine.local.dispatching import constant, dispatch, make
from monarch._engine.local.streams import streams
from monarch._engine.local.tensor import RankTensor
from monarch._engine.meshes.tensor_mesh import TensorMesh, tensor_mesh_of
from monarch._engine.tensors import devices
from monarch._node.services.registry import service
from monarch._python.frames import caller
from monarch.exceptions import ArgumentError, AxisError

wiring.wire()
_MONARCH = os.path.dirname(os.path.dirname(__file__))
_TORCH = os.path.dirname(torch.__file__)
_OF_THE_PROGRAM = ("serialization.py", "_utils.py", os.path.join("utils", "data", ""), "storage.py")
"""Parts of torch that read data for the program."""


class _Mode(DispatchMode):
    """Sees the ops of a block.

    Args:
        mesh: on whose ranks they make tensors.
    """

    def __init__(self, mesh: TensorMesh) -> None:
        self._mesh = mesh
        # torch does not type it.
        super().__init__()  # pyright: ignore[reportUnknownMemberType]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        __tracebackhide__ = True
        kwargs = kwargs or {}
        has_tensors = False
        for arg in (*args, *kwargs.values()) if kwargs else args:
            kind = arg.__class__
            if kind is RankTensor:
                return dispatch(func, args, kwargs)
            if isinstance(arg, torch.Tensor):
                has_tensors = True
            elif kind is list or kind is tuple:
                for each in arg:
                    if each.__class__ is RankTensor:
                        return dispatch(func, args, kwargs)
                    has_tensors = has_tensors or isinstance(each, torch.Tensor)
        if has_tensors:
            if func is lift_fresh and type(args[0]) is torch.Tensor and not _is_of_the_program():
                # torch.tensor() has made a value.
                return constant(self._mesh, streams.active, args[0])
            return func(*args, **kwargs)
        device = kwargs.get("device")
        if (device is not None and torch.device(device).type == "meta") or _is_of_the_program():
            return func(*args, **kwargs)
        return make(self._mesh, streams.active, func, args, kwargs)


def _is_of_the_program() -> bool:
    """Return whether the runtime or torch's readers of data run an op, not the user's code."""
    frame: FrameType | None = caller(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_TORCH):
            if any(part in name for part in _OF_THE_PROGRAM):
                return True
        # The block of ``own_devices`` runs the function of the user.
        elif name != devices.__file__ and not name.startswith("<frozen"):
            return name.startswith(_MONARCH)
        frame = frame.f_back
    return False


@service("local.activate", "local")
def activate(mesh: Any) -> AbstractContextManager[Any]:
    """Return a block in which ops of torch make rank-local tensors.

    Args:
        mesh: a Mesh, or a mesh of processes or a slice of one.
    """
    if current.observer is not None:
        current.observer.local()
    return _activated(mesh)


@contextmanager
def _activated(mesh: Any) -> Generator[Any]:
    target = tensor_mesh_of(mesh)
    if target.actors is None:
        raise ArgumentError("a simulated mesh has no rank-local tensors; simulate distributed tensors")
    active.meshes.append(target)
    try:
        with _Mode(target), own_devices(target):
            yield mesh
    finally:
        active.meshes.pop()


def own_devices(mesh: Any) -> AbstractContextManager[Any]:
    """Return a block in which ``device="cuda"`` asks for the GPUs of the ranks, even if the program has none."""
    return devices.OwnDevices(lambda: active_mesh() is mesh) if mesh.kind == "cuda" else nullcontext()


class NoMesh:
    """``with no_mesh.activate():`` computes in the program, inside of a block with an active mesh."""

    @contextmanager
    def activate(self) -> Generator[None]:
        """Return the block."""
        active.meshes.append(None)
        try:
            with without_modes():
                yield
        finally:
            active.meshes.pop()

    def __repr__(self) -> str:
        return "no_mesh"


no_mesh = NoMesh()


def get_active_mesh() -> Any:
    """Return the mesh that is active in the calling thread.

    Raises:
        ArgumentError: no mesh is active.
    """
    found = active_mesh()
    if found is None:
        raise ArgumentError("no device mesh is active; use 'with mesh.activate():'")
    return found.public


@service("local.rank_tensor", "local")
def rank_tensor(mesh: Any, dim: str | None) -> Any:
    """Return the coordinate of each rank along an axis of a mesh, as a tensor of int64.

    Args:
        mesh: a Mesh, or a mesh of processes or a slice of one.
        dim: the axis; None for a dict of all of them.

    Raises:
        AxisError: the mesh has no axis of this name.
    """
    target = tensor_mesh_of(mesh)
    if dim is None:
        return {axis: rank_tensor(mesh, axis) for axis in target.axes}
    if dim not in target.axes:
        raise AxisError(f"rank_tensor: the mesh has no axis {dim!r}; it has {', '.join(target.axes)}")
    layout = dense_layout(target, (), torch.int64)
    made = RankTensor(Ref(target.stream, layout), layout, streams.active)
    target.issue("rank_tensor", (dim,), (), (), (cast("Any", made),))
    return made
