"""A function on each process of a mesh, without a class for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from monarch._actors.actor import Actor
from monarch._actors.endpoint import endpoint
from monarch._core.shapes.value_mesh import ValueMesh
from monarch._meshes.inside import region_of, state_of, view_at
from monarch._meshes.mesh_like import ProcMeshLike
from monarch._node.future import Future
from monarch._node.replies.gather import is_gather
from monarch.exceptions import ArgumentError


class Runner(Actor):
    """An actor that calls the functions it receives."""

    @endpoint
    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of the function."""
        return function(*args, **kwargs)


def execute(
    mesh: ProcMeshLike, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> ValueMesh[Any]:
    """Call a function in each process of a mesh and return the results."""
    if not callable(function):
        raise ArgumentError(f"execute: expected a function, got {function!r}")
    shared = state_of(mesh)
    with shared.runner_lock:
        if shared.runner is None:
            # On the whole mesh, so that all views share it.
            shared.runner = view_at(mesh, shared.procs.region()).spawn("execute", Runner)
        runner: Any = shared.runner
    call: Future[ValueMesh[Any]] = view_at(runner, region_of(mesh)).run.call(function, args, kwargs)
    if is_gather(call):
        call.rename(f"execute({getattr(function, '__name__', type(function).__name__)})")
    return call.get()
