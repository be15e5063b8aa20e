"""``heal_mesh``: replace dead processes and copy state from living actors."""

from __future__ import annotations

from typing import Any, TypeVar, cast

from monarch._core.kinds import is_a
from monarch._meshes.actors.actor_mesh import ActorMesh
from monarch._meshes.host_mesh import HostMesh
from monarch._meshes.inside import hosts_of, node_of, region_of, state_of
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
    """Replace the dead processes of a mesh at the same coordinates.

    Each new process runs the ``bootstrap`` of its mesh, and its actors are constructed with their original arguments.
    An actor that failed while nobody waited is also recreated, in its process. Living processes keep everything. All
    references to the mesh lead to the new processes from now on; messages to the dead ones are not sent again. Process
    groups are recreated at their next use.

    Args:
        mesh: a mesh of processes or actors, a Mesh, or a slice of one; the whole process mesh is healed.
        copy_from: for replicas: the rank of a living actor, or ``"peer"`` for any. ``__setstate__`` of each new actor
            gets the result of ``__getstate__`` there; of a class without these, ``load_state_dict`` that of
            ``state_dict``. Tensors go from rank to rank. This applies to all actor meshes on the processes; heal a mesh
            whose class lacks these methods with ``copy``.
        copy: the name of a method that returns the tensors of an actor, such as ``state_dict`` of its model: they are
            copied in place from a living actor, or from ``copy_from``, as ``copy_state`` does.
        hosts: new hosts for ranks whose host is lost, one per lost host.
        timeout: seconds for the new processes and actors, and again for the state.

    Returns:
        The same mesh.

    Raises:
        ArgumentError: ``mesh`` is not such a mesh, its actors lack these methods, or ``copy_from`` is not a rank of it.
        SupervisionError: no living actor has the state to copy.
        StoppedError: the mesh was stopped, or another process spawned it; only that one may heal it.
        SpawnError: a host is lost too, and ``hosts`` has no replacement.
        ActorError: a constructor or a state method of an actor raised.
    """
    if is_a(getattr(mesh, "procs", None), ProcMesh) and hasattr(mesh, "execute"):
        # A Mesh of monarch.distributed, which a room above defines.
        heal_mesh(cast("Any", mesh).procs, copy_from=copy_from, copy=copy, hosts=hosts, timeout=timeout)
        return mesh
    if not is_a(mesh, ProcMesh, ActorMesh):
        raise ArgumentError(f"heal_mesh: expected a mesh of processes or actors, got {type(mesh).__name__}")
    whole = cast("ProcMesh | ActorMesh", mesh)
    procs, node = state_of(whole).procs, node_of(whole)
    if copy and (not isinstance(whole, ActorMesh) or not callable(getattr(state_of(whole).cls, copy, None))):
        raise ArgumentError(f"copy: expected the name of a method of {whole!r}, got {copy!r}")
    numbered = isinstance(copy_from, int) and not isinstance(copy_from, bool) and 0 <= copy_from < len(whole)
    if copy_from not in (None, "peer") and not numbered:
        raise ArgumentError(f'copy_from: expected "peer" or a rank from 0 to {len(whole) - 1}, got {copy_from!r}')
    shared = meshes_of(node).shared_of(procs.uid, procs.name, "healed")
    if copy_from is not None and not copy:
        # Check before doing anything that cannot be repeated.
        givers = [whole] if isinstance(whole, ActorMesh) else actor_meshes_on(shared, node)
        StateTransfer.check(givers, isinstance(whole, ActorMesh))
    if hosts is not None and not is_a(hosts, HostMesh):
        raise ArgumentError(f"hosts: expected a mesh of hosts, got {type(hosts).__name__}")
    others = [hosts_of(hosts)[rank] for rank in region_of(hosts).base_ranks()] if hosts is not None else []
    source = region_of(whole).base_rank(copy_from) if isinstance(copy_from, int) else None

    def work() -> None:
        replaced, renewed = heal(shared, node, timeout, others)
        if replaced or renewed:
            _hand_over(whole, shared, replaced, renewed, copy_from, source, copy, timeout)
        if replaced:
            node.events.healed.tell(procs.uid, replaced)

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
    """Copy the state to new actors."""
    if copy and isinstance(mesh, ActorMesh):
        recreated = [rank for each, rank in renewed if state_of(each).key == state_of(mesh).key]
        _copy(mesh, [*replaced, *recreated], source, copy, timeout)
    elif copy_from is not None:
        for each in [mesh] if isinstance(mesh, ActorMesh) else actor_meshes_on(shared, node_of(mesh)):
            recreated = [rank for other, rank in renewed if state_of(other).key == state_of(each).key]
            StateTransfer(each, [*replaced, *recreated], source).run(timeout)


def _copy(mesh: ActorMesh, new: list[int], source: int | None, method: str, timeout: float) -> None:
    """Copy the tensors of a living actor to new ones."""
    from monarch._state.copy.copying import copy_state

    region = state_of(mesh).region
    ranks = [rank for rank in new if region.position_of(rank) is not None]
    if not ranks:
        return
    giver: Any = member_of(mesh, giver_of(mesh, ranks, source))
    for rank in ranks:
        taker: Any = member_of(mesh, rank)
        copy_state(getattr(giver, method), getattr(taker, method), timeout=timeout).get(timeout)
