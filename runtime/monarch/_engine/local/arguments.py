"""Rank-local tensors as arguments of endpoints: each actor gets the tensor of its rank."""

from __future__ import annotations

from collections import deque
from typing import Any, cast

from monarch._actors.endpoint import EXPLICIT, UNDECORATED
from monarch._engine.dtensor_compat import without_modes
from monarch._engine.issuing.encoding import Input
from monarch._engine.issuing.stream import new_number
from monarch._engine.local.checking import check_input
from monarch._engine.local.remote import Remote
from monarch._engine.local.tensor import RankTensor
from monarch._engine.meshes.tensor_mesh import TensorMesh
from monarch._engine.rank.operations.lending import received
from monarch._meshes.actors.adverbs import as_endpoint
from monarch._meshes.inside import member_at, region_of, state_of
from monarch._node.current import current_node
from monarch._node.services.registry import service
from monarch.exceptions import ArgumentError

_WAIT_S = 600.0
"""Seconds for an endpoint to return."""
_MOST = 1000
"""Arguments of which the ranks remember whether they have failed."""
_arguments: deque[tuple[TensorMesh, int]] = deque()
"""Newest last; single operations, from any thread."""
_calling: set[TensorMesh] = set()
"""Meshes whose ranks may still have to call their actors for an ``rref``; likewise."""
_remotes: dict[Any, Remote] = {}
"""By key and ranks of a mesh of actors, and name and flags of the endpoint; likewise."""


def argument(tensor: RankTensor) -> tuple[Any, ...]:
    """Return what stands for a tensor in a message: its present value on the rank that gets it."""
    check_input("an argument of an endpoint", tensor)
    mesh: TensorMesh = tensor.monarch_layout.mesh
    if mesh in _calling:
        # An actor that got this first would wait for its argument, and the op that gives it for the actor.
        with without_modes():
            mesh.recovery.ask(lambda: mesh.actors.ready.call([]).get())
        _calling.discard(mesh)
    number = new_number()
    template = mesh.operation("lend", (Input(0),))
    with without_modes():
        mesh.stream.issue(template, (tensor.monarch_ref.number,), (number,), (number,), 0)
        mesh.stream.flush()
    _arguments.append((mesh, number))
    if len(_arguments) > _MOST:
        old, last = _arguments.popleft()
        old.stream.pending.append(last)
    shared = state_of(mesh.procs).procs
    return received, (number, shared.uid, mesh.procs.name)


class _OnActor:
    """Calls the endpoint of the actor on this rank.

    Args:
        actors: the whole mesh of actors.
        name: the name of the endpoint.
        flags: the flags of the endpoint; ``as_endpoint`` sets them.
    """

    def __init__(self, actors: Any, name: str, flags: int) -> None:
        self.actors = actors
        self.name = name
        self.flags = flags
        self.__qualname__ = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        region, rank = region_of(self.actors), current_node().rank
        position = region.position_of(rank)
        if position is None:
            raise ArgumentError(f"rref: {self.actors!r} has no actor on rank {rank}")
        endpoint = getattr(member_at(self.actors, position), self.name)
        if self.flags & UNDECORATED:
            endpoint = as_endpoint(endpoint, explicit_response_port=bool(self.flags & EXPLICIT))
        return endpoint.call_one(*args, **kwargs).get(_WAIT_S)


@service("arguments.rref", "local")
def rref(actors: Any, name: str, flags: int, propagate: Any, args: Any, kwargs: Any) -> Any:
    """Call an endpoint on all ranks, in order with their ops; return its results as rank-local tensors."""
    shared = cast("Any", state_of(actors))
    key: Any = (shared.key, region_of(actors), name, flags)
    found = _remotes.get(key)
    if found is None:
        if len(_remotes) > _MOST:
            _remotes.clear()
        found = _remotes[key] = Remote(_OnActor(actors, name, flags), propagate)
    found = found.with_propagate(propagate)
    try:
        return found.rref(*args, **kwargs)
    finally:
        if found.mesh is not None:
            _calling.add(found.mesh)
