"""Controllers: singleton actors of a session that live in the program and are looked up by name."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar, cast

from monarch._actors.actor import Actor
from monarch._core.shapes.extent import Extent
from monarch._meshes.actors.actor_mesh import ActorMesh
from monarch._meshes.procs.proc_mesh import this_proc
from monarch._node.current import current_node, open_node
from monarch._node.future import Future, in_thread
from monarch._node.node import Node
from monarch._node.remote_errors import pack_failure
from monarch._node.replies.gather import Gather
from monarch._python.threads import spawn_thread
from monarch._wire import messages as m
from monarch._wire.pickling import dumps, dumps_whole
from monarch.exceptions import MonarchError

A = TypeVar("A", bound=Actor)

_lock = threading.Lock()
_controllers: dict[str, dict[str, _Named]] = {}
"""By proc id and name. Under _lock."""


def get_or_spawn_controller(name: str, cls: type[A], *args: Any, **kwargs: Any) -> Future[A]:
    """Return the actor of this name. The first request, from any process, spawns it in the program's process.

    Args:
        name: unique in the session.
        cls: its class.
        args: positional arguments of its constructor; ignored if the actor exists.
        kwargs: keyword arguments; likewise.
    """
    node = open_node()
    if node.config is None:
        return in_thread(node, f"controller {name!r}", lambda: cast("A", _local(name, cls, args, kwargs)))
    body, buffers = dumps(((name, cls, args, kwargs), {}))
    # The program has a directory for this, with the same key in every process.
    gather: Gather[Any] = Gather(
        node, [node.peers.get(node.root)], Extent((), ()), "controllers", "get", lambda _, values: values[0]
    )
    bulk = node.bulk.put(buffers, [node.root]) if buffers else None
    frames = 0 if bulk else len(buffers)
    call = m.Call(node.proc, CONTROLLERS, "get", gather.port, m.pack(((), 0, (), ())), "", 0, body, bulk, frames)
    node.peers.get(node.root).send(m.encode(call), () if bulk else buffers)
    gather.check()
    return cast("Future[A]", gather)


class _Named(NamedTuple):
    """A controller; the lock is held while it is spawned."""

    lock: threading.Lock
    made: list[ActorMesh]


def _local(name: str, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ActorMesh:
    with _lock:
        named = _controllers.setdefault(current_node().proc, {}).setdefault(name, _Named(threading.Lock(), []))
    # A lock for each name, since the constructor of one may ask for another.
    with named.lock:
        if not named.made:
            mesh = cast("ActorMesh", this_proc().spawn(name, cls, *args, **kwargs))
            try:
                mesh.initialized.get()
            except BaseException:
                mesh.stop()
                raise
            named.made.append(mesh)
        return named.made[0]


CONTROLLERS = "controllers"
"""Key of the program's directory of controllers."""


class ControllerDirectory:
    """The program's directory of controllers, addressed like an actor. Each request has its own thread."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def deliver(self, call: m.Call, more: Sequence[Any]) -> None:
        """Handle the request of a rank."""
        spawn_thread("monarch-controllers", self._answer, call, more)

    def _answer(self, call: m.Call, more: Sequence[Any]) -> None:
        node = self._node
        node.replies.finished(call.src, call.cost, True)
        try:
            (name, cls, args, kwargs), _ = node.bulk.load(call, more)
            body = dumps_whole(_local(name, cls, args, kwargs))
        except BaseException as error:
            node.replies.send(call.src, call.port, 0, m.ERROR, pack_failure(error, isinstance(error, MonarchError)))
        else:
            node.replies.send(call.src, call.port, 0, m.RESULT, body)
