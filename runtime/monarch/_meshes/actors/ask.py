"""Requests for services to the processes of a mesh, whatever their actors do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from monarch._actors.endpoint import FUNCTION
from monarch._meshes.actors.adverbs import Endpoint
from monarch._meshes.inside import node_of, state_of, targets_of
from monarch._meshes.mesh_like import ActorMeshLike
from monarch._node.future import Future
from monarch._node.replies.gather import Gather
from monarch._node.services.frame import ask_frame
from monarch._node.services.registry import name_of, request

P = ParamSpec("P")
R = TypeVar("R")


def ask(mesh: ActorMeshLike, service: Callable[P, R], *args: P.args, **named: P.kwargs) -> Future[dict[int, R]]:
    """Ask the processes of an actor mesh for a service and return a future of the answers, by position."""
    asked = request(service, *args, **named)
    node = node_of(mesh)
    targets = targets_of(mesh)

    def finish(_: Gather[Any], values: list[Any]) -> dict[int, R]:
        return dict(enumerate(values))

    gather: Gather[Any] = Gather(
        node, targets.peers, targets.shape.region.extent, state_of(mesh).name, asked.name, finish
    )
    frame = ask_frame(node, asked, gather.port, targets.shape.packed)
    for peer in targets.near:
        peer.send(frame)
    if targets.far:
        node.hosts.cast(node.proc, targets.far, gather.port, [frame])
    gather.check()
    return gather


def endpoint_of(mesh: ActorMeshLike, service: Callable[..., Any]) -> Endpoint[..., Any]:
    """Return a service of kind ``actor`` as an endpoint of a mesh: calls queue in each mailbox."""
    return Endpoint(mesh, name_of(service), None, FUNCTION)
