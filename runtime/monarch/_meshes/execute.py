"""A function on each process of a mesh, without a class for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from monarch._actors.actor import Actor
from monarch._actors.endpoint import endpoint
from monarch._core.shapes.value_mesh import ValueMesh
from monarch.exceptions import ArgumentError

if TYPE_CHECKING:
    from monarch._meshes.proc_mesh import ProcMesh


class Runner(Actor):
    """Calls what it is sent."""

    @endpoint
    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a function."""
        return function(*args, **kwargs)


def execute(
    mesh: ProcMesh, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> ValueMesh[Any]:
    """What a function returns on each process of a mesh."""
    if not callable(function):
        raise ArgumentError(f"execute takes a function and its arguments, and not {function!r}")
    shared = mesh._state
    with shared.runner_lock:
        if shared.runner is None:
            # Of the whole mesh, so that all views of it share one.
            whole = type(mesh)(shared, shared.procs.region(), mesh._node)
            shared.runner = whole.spawn("execute", Runner)
        runner: Any = shared.runner
    return runner._view(mesh._region).run.call(function, args, kwargs).get()
