"""Queries of the owner of a process mesh: dead ranks, and actor meshes on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from monarch._meshes.inside import state_of
from monarch._meshes.registry import meshes_of
from monarch._node.node import Node

if TYPE_CHECKING:
    from monarch._meshes.actors.actor_mesh import ActorMesh
    from monarch._meshes.procs.state import ProcsState


def dead_ranks(shared: ProcsState, node: Node) -> list[int]:
    """Return the base ranks whose process has died."""
    procs = shared.procs
    return [rank for rank in range(procs.size) if node.peers.get(procs.proc(rank)).dead is not None]


def actor_meshes_on(shared: ProcsState, node: Node) -> list[ActorMesh]:
    """Return the actor meshes on a process mesh that can be recreated there."""
    states = [(each, state_of(each)) for each in list(meshes_of(node).actor_meshes.values())]
    return [
        each
        for each, state in states
        if state.procs == shared.procs and state.stopped is None and state.spec is not None
    ]


def actors_at(uid: str, ranks: Sequence[int], node: Node) -> list[str]:
    """Return the names of the user's actor meshes that have an actor at one of these ranks of a process mesh."""
    meshes = meshes_of(node)
    states = [state_of(each) for each in actor_meshes_on(meshes.own_procs[uid], node)]
    places = [state for state in states if any(state.region.position_of(rank) is not None for rank in ranks)]
    return [state.name for state in places if not state.cls.__module__.startswith("monarch._")]


def reaches(node: Node, host: str) -> bool:
    """Return whether processes can be started on a host, which is not known to be lost."""
    return host == node.host or node.config is not None or host in node.hosts.known
