"""``heal_mesh``: what is dead is replaced, and gets the state of one that lives."""

from __future__ import annotations

from typing import Any, TypeVar

from monarch._meshes.actors.actor_mesh import ActorMesh
from monarch._meshes.host_mesh import HostMesh
from monarch._meshes.procs.proc_mesh import ProcMesh
from monarch._meshes.procs.queries import actor_meshes_on
from monarch._meshes.procs.state import ProcsState
from monarch._meshes.registry import meshes_of
from monarch._node.future import to_its_end
from monarch._state.handoff.sender import StateTransfer, giver_of, member_of
from monarch._supervision.healing import heal
from monarch.exceptions import ArgumentError

M = TypeVar("M")


def heal_mesh(
    mesh: M,
    *,
    copy_from: int | str | None = None,
    copy: str = "",
    hosts: HostMesh | None = None,
    timeout: float = 60.0,
) -> M:
    """Put new processes in the place of those of a mesh that have died, at the same coordinates.

    Each runs the ``bootstrap`` of its mesh, and gets the actors that were spawned there, made as they were at first.
    An actor that has failed where nobody waited is made anew, too, in its process. Processes that live keep
    everything. References to the mesh, wherever they are, lead to the new ones from now on; what was sent to the dead
    ones is not sent again. Process groups are made anew when they are next used.

    Args:
        mesh: a mesh of processes or of actors, or a slice of one: all of its processes are healed. It may be awaited
            then, as any mesh.
        copy_from: for replicas: the rank of an actor that lives, or ``"peer"`` for any that does. Each new actor of a
            class that has ``__getstate__`` and ``__setstate__`` gets by the second what the first returns there;
            tensors in it go from rank to rank. All meshes of actors on the processes are given their state so; a mesh
            of actors of another class must be healed with ``copy``.
        copy: the name of a method that returns the tensors of an actor, such as ``state_dict`` of its model: new
            ones get those of one that lives, or of ``copy_from``, in place, as by ``copy_state``.
        hosts: where ranks go whose host is lost: hosts that the mesh is not on yet, as many as were lost.
        timeout: seconds for the new processes and actors to be there, and again for the state.

    Returns:
        The mesh, which is the same one.

    Raises:
        ArgumentError: it is no such mesh, its actors have no such methods, or ``copy_from`` is no rank of it.
        SupervisionError: a state is to be copied, and no actor lives that has it.
        StoppedError: it was stopped, or another process has spawned it, which may heal it.
        SpawnError: its host is lost, too, and there is no other one in ``hosts``.
        ActorError: the constructor of an actor raised, or a method that gives or takes the state.
    """
    if not isinstance(mesh, (ProcMesh, ActorMesh)):
        raise ArgumentError(f"heal_mesh takes a mesh of processes or of actors, and not {type(mesh).__name__}")
    procs, node = mesh._state.procs, mesh._node
    if copy and (not isinstance(mesh, ActorMesh) or not callable(getattr(mesh._state.cls, copy, None))):
        raise ArgumentError(f"copy names a method of the actors of a mesh, and {copy!r} is none of {mesh!r}")
    numbered = isinstance(copy_from, int) and not isinstance(copy_from, bool) and 0 <= copy_from < len(mesh)
    if copy_from not in (None, "peer") and not numbered:
        raise ArgumentError(f'copy_from is "peer" or a rank from 0 to {len(mesh) - 1}, and not {copy_from!r}')
    shared = meshes_of(node).shared_of(procs.uid, procs.name, "healed")
    if copy_from is not None and not copy:
        # Before anything is done that could not be asked for again.
        givers = [mesh] if isinstance(mesh, ActorMesh) else actor_meshes_on(shared, node)
        StateTransfer.check(givers, isinstance(mesh, ActorMesh))
    if hosts is not None and not isinstance(hosts, HostMesh):
        raise ArgumentError(f"hosts is a mesh of hosts, and not {type(hosts).__name__}")
    others = [hosts._hosts[rank] for rank in hosts._region.base_ranks()] if hosts is not None else []
    source = mesh._region.base_rank(copy_from) if isinstance(copy_from, int) else None

    def work() -> None:
        replaced, renewed = heal(shared, node, timeout, others)
        if replaced or renewed:
            _hand_over(mesh, shared, replaced, renewed, copy_from, source, copy, timeout)

    to_its_end(node, "heal", work)
    return mesh


def _hand_over(
    mesh: ProcMesh | ActorMesh,
    shared: ProcsState,
    replaced: list[int],
    renewed: list[tuple[ActorMesh, int]],
    copy_from: int | str | None,
    source: int | None,
    copy: str,
    timeout: float,
) -> None:
    """Return new actors the state that is to be copied."""
    if copy and isinstance(mesh, ActorMesh):
        mine = [rank for each, rank in renewed if each._key == mesh._key]
        _copy(mesh, [*replaced, *mine], source, copy, timeout)
    elif copy_from is not None:
        for each in [mesh] if isinstance(mesh, ActorMesh) else actor_meshes_on(shared, mesh._node):
            mine = [rank for other, rank in renewed if other._key == each._key]
            StateTransfer(each, [*replaced, *mine], source).run(timeout)


def _copy(mesh: ActorMesh, new: list[int], source: int | None, method: str, timeout: float) -> None:
    """Return new actors the tensors of one that has lived on."""
    from monarch._state.copy.copying import copy_state

    region = mesh._state.region
    mine = [rank for rank in new if region.position_of(rank) is not None]
    if not mine:
        return
    giver: Any = member_of(mesh, giver_of(mesh, mine, source))
    for rank in mine:
        taker: Any = member_of(mesh, rank)
        copy_state(getattr(giver, method), getattr(taker, method), timeout=timeout).get(timeout)
