"""Healing: new processes at the coordinates of those that have died, with their actors; the others lose nothing."""

from __future__ import annotations

from typing import TypeVar

from monarch._actors.actormesh import ActorMesh
from monarch._actors.future import Ready
from monarch._actors.procmesh import ProcMesh
from monarch._actors.replace import replace
from monarch._core.ranks import describe_ranks
from monarch.exceptions import ArgumentError, SpawnError, StoppedError, SupervisionError

M = TypeVar("M")


def heal_mesh(mesh: M, *, copy: str = "", timeout: float = 60.0) -> M:
    """Puts new processes in the place of those of a mesh that have died, at the same coordinates.

    Each runs the ``bootstrap`` of its mesh, and gets the actors that were spawned there, made as they were at first.
    Processes that live keep everything. References to the mesh, wherever they are, lead to the new ones from now on;
    what was sent to the dead ones is not sent again. Process groups are made anew when they are next used.

    Args:
        mesh: a mesh of processes or of actors, or a slice of one: all of its processes are healed. It may be awaited
            then, as any mesh.
        copy: for actors that are replicas of each other, the name of a method that returns the tensors of one,
            such as ``state_dict`` of its model: the new ones get those of one that lives, as by ``copy_state``.
        timeout: seconds for the new processes and actors to be there.

    Returns:
        The mesh, which is the same one.

    Raises:
        ArgumentError: it is no such mesh, or its actors have no such method.
        SupervisionError: tensors are to be copied, and no actor lives that has them.
        StoppedError: it was stopped, or another process has spawned it, which may heal it.
        SpawnError: its host is lost, too.
        ActorError: the constructor of an actor raised.
    """
    if not isinstance(mesh, (ProcMesh, ActorMesh)):
        raise ArgumentError(f"heal_mesh takes a mesh of processes or of actors, and not {type(mesh).__name__}")
    if copy and (not isinstance(mesh, ActorMesh) or not callable(getattr(mesh._state.cls, copy, None))):
        raise ArgumentError(f"copy names a method of the actors of a mesh, and {copy!r} is none of {mesh!r}")
    procs, runtime = mesh._state.procs, mesh._runtime
    shared = runtime.own_procs.get(procs.uid)
    if shared is None or shared.stopped is not None:
        why = "was stopped" if shared is not None else "was spawned elsewhere"
        raise StoppedError(f"{procs.name} {why}, so it cannot be healed here", mesh=procs.name)
    dead = [rank for rank in range(procs.region().nelements) if runtime.peer(procs.proc(rank)).dead is not None]
    lost = [rank for rank in dead if not _reaches(mesh, procs.hosts[rank // procs.per_host])]
    if lost:
        raise SpawnError(
            f"{describe_ranks(lost)} of {procs.name} cannot be replaced: their host is lost; make a new mesh of the "
            f"hosts that there are",
            mesh=procs.name,
            ranks=tuple(lost),
        )
    if dead:
        whole = ProcMesh(shared, procs.region(), runtime)
        actors = [
            each
            for each in list(runtime.meshes.values())
            if each._state.procs == procs and each._stopped is None and each._state.spec is not None
        ]
        for made in replace(whole, dead, actors):
            made.get(timeout)
        shared.initialized = Ready(runtime, procs.name, True)
        for each in actors:
            each._state.initialized = Ready(runtime, each._name, True)
    if dead and copy and isinstance(mesh, ActorMesh):
        _copy(mesh, dead, copy, timeout)
    return mesh


def _copy(mesh: ActorMesh, new: list[int], method: str, timeout: float) -> None:
    """Gives new actors the tensors of one that has lived on."""
    from monarch._transfers.copying import copy_state

    region = mesh._state.region
    whole = mesh._view(region)
    living = [rank for rank in region.base_ranks() if rank not in new]
    if not living:
        raise SupervisionError(
            f"{mesh._name} is healed, but no actor of it has lived on that its tensors could be copied from",
            mesh=mesh._name,
        )
    positions = {rank: region.position_of(rank) for rank in (living[0], *new)}
    source = getattr(whole._member(positions[living[0]] or 0), method)
    for rank in new:
        position = positions[rank]
        if position is not None:
            copy_state(source, getattr(whole._member(position), method), timeout=timeout).get(timeout)


def _reaches(mesh: ProcMesh | ActorMesh, host: str) -> bool:
    runtime = mesh._runtime
    return host == runtime.host or runtime.config is not None or host in runtime.hosts
