"""Spawning a mesh of actors: its members are fixed in one short step; their messages are sent after it."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from monarch._actors.endpoint import methods_of
from monarch._actors.running import current
from monarch._meshes.actors.actor_mesh import ActorMesh
from monarch._meshes.actors.creation import Creation
from monarch._meshes.actors.state import ActorsState
from monarch._meshes.identity import creator_of
from monarch._meshes.inside import coming_procs, living_procs, node_of, region_of, state_of, targets_of
from monarch._meshes.mesh_like import ProcMeshLike
from monarch._meshes.ownership import own_by_current
from monarch._meshes.registry import give_up_lost, meshes_of
from monarch._node.peers.targets import Targets
from monarch._node.rank_config import ActorSpec
from monarch._wire import messages as m
from monarch._wire.pickling import dumps
from monarch.exceptions import ArgumentError


def spawn_actors(
    procs: ProcMeshLike, name: str, cls: type[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> ActorMesh:
    """Make an actor in each process of a mesh, including replacements of dead ones; see ``ProcMesh.spawn``.

    A heal or resize may run at the same time. Each changes the roster of processes, or the actor meshes on it, in one
    short step under the same lock; so an actor in a new process is made either by this or by the heal.
    """
    shared, node = state_of(procs), node_of(procs)
    roster = shared.procs
    here = current.get()
    key = f"{_short(name)}-{secrets.token_hex(4)}"
    whole = region_of(procs) == roster.region()
    owner = here[0].key if here is not None else ""
    creator = creator_of(here[0]) if here is not None else None
    spec = ActorSpec(name, cls, args, kwargs, roster, region_of(procs), node.proc, owner, creator, whole)
    # User code may run here, so no lock is held.
    body, buffers = dumps(spec, f"spawn({name!r}, {cls.__name__})", lambda: living_procs(procs))
    with shared.lock:
        state = ActorsState(key, name, cls, roster, region_of(procs), True)
        mesh = ActorMesh(state, region_of(procs), node)
        spec.region = state.region
        state.spec = spec
        targets = targets_of(mesh)
        # The replacement of these processes finds this mesh and makes its actors.
        coming = coming_procs(procs)
        ranks = state.region.base_ranks()
        creation = Creation(
            node,
            targets.peers,
            ranks,
            mesh.extent,
            name,
            key,
            coming,
            lambda: state.stopped is not None or state.creation is not creation,
            lambda: [roster.proc(rank) for rank in range(roster.size)],
        )
        state.creation = state.initialized = creation
        meshes_of(node).add_actors(key, mesh)
    meshes_of(node).owners[key] = own_by_current(mesh)
    _send(mesh, targets, m.Create(node.proc, key, creation.port, targets.shape.packed, body), buffers)
    creation.check()
    if coming:
        # Nobody may heal it any more.
        give_up_lost(node, roster.uid)
    return mesh


def _send(mesh: ActorMesh, targets: Targets, create: m.Create, buffers: Sequence[memoryview]) -> None:
    """Send one Create to all living processes."""
    node = node_of(mesh)
    near = [peer for peer in targets.near if peer.dead is None]
    if near:
        bulk = node.bulk.put(buffers, [peer.proc for peer in near]) if buffers else None
        for peer in near:
            if bulk is not None and peer.dead is not None:
                # It has died meanwhile, and will release nothing.
                node.bulk.forget_holder(peer.proc)
        inline = () if bulk else buffers
        frame = m.encode(m.Create(create.src, create.actor, create.port, create.view, create.body, bulk, len(inline)))
        for peer in near:
            peer.send(frame, inline)
    if targets.far:
        frame = m.encode(m.Create(create.src, create.actor, create.port, create.view, create.body, None, len(buffers)))
        node.hosts.cast(node.proc, targets.far, create.port, [frame, *buffers])


def _short(name: str) -> str:
    return "".join(char for char in name if char.isalnum() or char == "_")[:12] or "actor"


def check_names(cls: type) -> None:
    """Refuse an actor class whose endpoints would hide attributes that every mesh has.

    Raises:
        ArgumentError: an endpoint has the name of one.
    """
    taken = [name for name in methods_of(cls) if not name.startswith("_") and hasattr(ActorMesh, name)]
    if taken:
        raise ArgumentError(
            f"{cls.__name__} has an endpoint named {taken[0]!r}, which every mesh already has; give it another name"
        )
