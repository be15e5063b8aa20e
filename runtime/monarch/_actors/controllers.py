"""Singletons of a session: actors that anyone may ask for by name, and that live in the program itself."""

from __future__ import annotations

import threading
from typing import Any, TypeVar, cast

from monarch._actors.actor import Actor
from monarch._actors.actormesh import ActorMesh
from monarch._actors.future import Future, in_thread
from monarch._actors.gather import Gather
from monarch._actors.process import get_runtime
from monarch._actors.procmesh import this_proc
from monarch._core.extent import Extent
from monarch._wire import messages as m
from monarch._wire.pickling import dumps

A = TypeVar("A", bound=Actor)

_lock = threading.Lock()
_controllers: dict[str, dict[str, ActorMesh]] = {}


def get_or_spawn_controller(name: str, cls: type[A], *args: Any, **kwargs: Any) -> Future[A]:
    """The actor of this name, which is made in the program's process when it is first asked for, from anywhere.

    Args:
        name: unique in the session.
        cls: its class, if it has to be made.
        args: for its constructor; left out of account if it is there already.
        kwargs: likewise.
    """
    runtime = get_runtime()
    if runtime.config is None:
        return in_thread(runtime, f"controller {name!r}", lambda: cast("A", _local(name, cls, args, kwargs)))
    # The program has an actor for this, known by its key in every process.
    gather: Gather[Any] = Gather(
        runtime, [runtime.peer(runtime.root)], Extent((), ()), "controllers", "get", lambda _, values: values[0]
    )
    body, buffers = dumps(((name, cls, args, kwargs), {}))
    bulk = runtime.put(buffers, [runtime.root]) if buffers else None
    call = m.Call(runtime.proc, CONTROLLERS, "get", gather.port, m.pack(((), 0, (), ())), "", 0, body, bulk)
    runtime.peer(runtime.root).send(m.encode(call))
    return cast("Future[A]", gather)


def _local(name: str, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ActorMesh:
    proc = get_runtime().proc
    with _lock:
        known = _controllers.setdefault(proc, {})
        if name not in known:
            mesh = cast("ActorMesh", this_proc().spawn(name, cls, *args, **kwargs))
            mesh.initialized.get()
            known[name] = mesh
        return known[name]


CONTROLLERS = "controllers"
"""Key of the actor that makes the others."""


class Controllers(Actor):
    """Lives in the program, for those who ask from other processes."""

    def get(self, name: str, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ActorMesh:
        """The actor of this name."""
        return _local(name, cls, args, kwargs)
