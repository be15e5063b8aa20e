"""Different arguments for each actor of a mesh: one call with a value for each, and a map of many items."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from monarch._actors.interrupting import drop
from monarch._core.kinds import is_a
from monarch._core.shapes.value_mesh import ValueMesh
from monarch._meshes.inside import called_of, member_at, node_of
from monarch._node.future import Future, when_done
from monarch._node.replies.gather import Gather
from monarch._node.services.asking import tell_proc
from monarch.exceptions import ArgumentError

if TYPE_CHECKING:
    from monarch._meshes.mesh_like import ActorMeshLike
    from monarch._node.node import Node
    from monarch._wire.receiving.leadership import Turn

R = TypeVar("R")
AHEAD = 2
"""Items that each actor has at a time: the next one is there when it has finished one."""
UNREAD = 16
"""Items for each actor whose results wait at most, behind that of a slow item."""


def values_for(mesh: ActorMeshLike, values: Any, what: str) -> list[Any]:
    """Return one value for each actor of a mesh.

    Raises:
        ArgumentError: there are more or fewer, or they are no sequence.
    """
    if is_a(values, ValueMesh):
        values = values.values()
    if is_a(values, str, bytes) or not is_a(values, Sequence):
        raise ArgumentError(
            f"{what}: expected a list or ValueMesh with a value for each actor, got {type(values).__name__}"
        )
    if len(values) != len(mesh):
        raise ArgumentError(f"{what}: expected {len(mesh)} values, one for each actor, got {len(values)}")
    return list(values)


class _Ready:
    """The positions of actors that have finished an item. The receiving thread adds them, the iterating one waits."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self.positions: deque[int] = deque()
        self.thread: Turn | None = None
        """See Waiter."""

    @property
    def done(self) -> bool:
        """Whether there are any."""
        return bool(self.positions)

    def watch(self, future: Future[Any], position: int) -> None:
        """Add a position once a future is done."""
        when_done(future, lambda _: self._add(position))

    def _add(self, position: int) -> None:
        self.positions.append(position)
        self._node.receive_loop.notify(self)


def map_items(mesh: ActorMeshLike, name: str, items: Iterable[Any]) -> Iterator[Any]:
    """Yield the results of an endpoint for each item, in their order; each actor takes the next item when it is free.

    Args:
        mesh: the actors.
        name: the name of the endpoint.
        items: taken as needed, so there may be any number.
    """
    if is_a(items, str, bytes) or not is_a(items, Iterable):
        raise ArgumentError(f"{called_of(mesh)}.{name}.map: expected an iterable, got {type(items).__name__}")
    return _mapped(mesh, name, iter(items))


def _mapped(mesh: ActorMeshLike, name: str, items: Iterator[Any]) -> Iterator[Any]:
    node = node_of(mesh)
    members: list[Any] = [member_at(mesh, position) for position in range(len(mesh))]
    ready = _Ready(node)
    ready.positions.extend([*range(len(members))] * AHEAD)
    calls: deque[Future[Any]] = deque()
    left = True
    try:
        while True:
            while left and ready.positions and len(calls) < UNREAD * len(members):
                position = ready.positions.popleft()
                try:
                    item = next(items)
                except StopIteration:
                    left = False
                    break
                calls.append(getattr(members[position], name).call_one(item))
                ready.watch(calls[-1], position)
                if calls[0].done:
                    # Actors may answer as fast as they are asked: the caller comes first, so that few results pile up.
                    break
            if not calls:
                return
            if calls[0].done or not left or len(calls) >= UNREAD * len(members):
                yield calls.popleft().get()
            else:
                node.receive_loop.wait(ready)
    finally:
        # After an error, an interrupt or close().
        _drop_queued(node, calls)


def _drop_queued(node: Node, calls: Iterable[Future[Any]]) -> None:
    """Let actors skip the calls that they have not begun; nobody reads their results."""
    for call in calls:
        if isinstance(call, Gather) and not call.done:
            # Its end is no failure that other ranks wait for.
            call.watched = False
            tell_proc(node, call.targets[0].proc, drop, call.actor, node.proc, call.port)
