"""A function on each process of a mesh, without a class for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from monarch._actors.actor import Actor
from monarch._actors.endpoint import endpoint
from monarch._core.shapes.value_mesh import ValueMesh
from monarch._meshes.mesh_like import ProcMeshLike
from monarch.exceptions import ArgumentError


class Runner(Actor):
    """Calls what it is sent."""

    @endpoint
    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of a function."""
        return function(*args, **kwargs)


def execute(
    mesh: ProcMeshLike, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> ValueMesh[Any]:
    """What a function returns on each process of a mesh."""
    if not callable(function):
        raise ArgumentError(f"execute takes a function and its arguments, and not {function!r}")
    shared = mesh._state
    with shared.runner_lock:
        if shared.runner is None:
            # Of the whole mesh, so that all views of it share one.
            shared.runner = mesh._view(shared.procs.region()).spawn("execute", Runner)
        runner: Any = shared.runner
    return runner._view(mesh._region).run.call(function, args, kwargs).get()
