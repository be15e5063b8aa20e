"""Making a mesh larger or smaller while it lives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from monarch._actors.actormesh import ActorMesh
from monarch._actors.call import Endpoint
from monarch._actors.cells import FUNCTION
from monarch._actors.future import Future
from monarch._actors.healing import actors_of, dead_ranks
from monarch._actors.membership import tell_of_new_ones
from monarch._actors.peers import Peer
from monarch._actors.procmesh import GRACE, Ended, ProcMesh
from monarch._actors.replace import Arrival, create
from monarch._core.extent import axes_text
from monarch._core.ranks import describe_ranks
from monarch._wire import messages as m
from monarch.exceptions import ShapeError, StoppedError, SupervisionError

_PATIENCE = 60.0
"""Seconds for new processes and actors to be there."""
_HOOK = "__resized__"
_TELL = "monarch._actors.resize:tell"


def resize(mesh: ProcMesh, sizes: Mapping[str, int]) -> ProcMesh:
    """See ``ProcMesh.resize``."""
    state, runtime = mesh._state, mesh._runtime
    shared = runtime.shared_of(state.procs.uid, state.procs.name, "resized")
    if mesh._region != shared.procs.region() or not shared.owned:
        raise StoppedError(f"this is a slice of {mesh.name}, or a reference; resize the mesh itself", mesh=mesh.name)
    with shared.lock:
        procs = shared.procs
        old = dict(zip(procs.labels, procs.sizes, strict=True))
        new = {**old, **_checked(mesh, sizes)}
        if new == old:
            return mesh
        dead = dead_ranks(shared, runtime)
        if dead:
            raise SupervisionError(
                f"{mesh.name} has {describe_ranks(dead)} dead; heal_mesh it before it is resized",
                mesh=mesh.name,
                ranks=tuple(dead),
            )
        actors = [
            each for each in actors_of(shared, runtime) if each._state.spec is not None and each._state.spec.whole
        ]
        before, going = procs.size, _going(mesh, new)
        per_host = procs.per_host * new[procs.labels[0]] // old[procs.labels[0]]
        roster = procs.resized(per_host, tuple(new.values()))
        # Before anybody can look them up and ask an agent of them, which knows nothing yet.
        come = range(before, per_host * len(procs.hosts))
        peers = [runtime.peer(roster.proc(procs.uid, rank), starting=True) for rank in come]
        procs.learn(roster)
        for actor in actors:
            _follow(actor)
        made = _grow(mesh, peers, come, actors) if peers else []
        tell_of_new_ones(procs)
        if going:
            _let_go(mesh, going)
        for each in made:
            each.get(_PATIENCE)
        for told in [_tell(each, before, old, new) for each in actors if hasattr(each._state.cls, _HOOK)]:
            told.get(_PATIENCE)
    return mesh


def _checked(mesh: ProcMesh, sizes: Mapping[str, int]) -> dict[str, int]:
    procs = mesh._state.procs
    for axis, size in sizes.items():
        now = mesh._region.size(axis)
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ShapeError(f"resize({axis}=...) takes a number of at least 1, and not {size!r}")
        if size == now:
            continue
        if procs.host_axes:
            raise ShapeError(
                f"{mesh.name} is on several hosts ({axes_text(mesh.extent)}), where a resize would renumber its ranks; "
                f"spawn a mesh of the new size beside it, and copy_state or a checkpoint takes the state over"
            )
        if axis != procs.labels[0]:
            raise ShapeError(
                f"only the first axis of {mesh.name} ({axes_text(mesh.extent)}) can be resized, which is "
                f"{procs.labels[0]!r}: to change {axis!r} would renumber the ranks"
            )
    return dict(sizes)


def _going(mesh: ProcMesh, new: Mapping[str, int]) -> list[str]:
    """The processes that leave."""
    procs = mesh._state.procs
    keep = procs.size * new[procs.labels[0]] // procs.sizes[0]
    return [procs.proc(rank) for rank in range(keep, procs.size)]


def _follow(actor: ActorMesh) -> None:
    """The mesh of actors is on all of the processes, also if nobody here has a view of all of it."""
    state = actor._state
    state.region = state.procs.region()
    if state.spec is not None:
        state.spec.region = state.region


def _let_go(mesh: ProcMesh, going: list[str]) -> None:
    runtime, shared = mesh._runtime, mesh._state
    for rank in range(shared.procs.size, shared.procs.size + len(going)):
        runtime.supervising.left(shared.procs.uid, rank)
    ended = Ended(runtime, f"{mesh.name}.resize()", going)
    by_host: dict[str, list[str]] = {}
    halt = m.encode(m.Halt(runtime.proc, "", 0, b"", "its mesh has become smaller"))
    for proc in going:
        by_host.setdefault(runtime.peer(proc).host, []).append(proc)
    for host, names in by_host.items():
        runtime.to_agent(host, m.Stop(runtime.proc, names, GRACE))
    for proc in going:
        runtime.peer(proc).send(halt)
    ended.get(_PATIENCE)


def _grow(mesh: ProcMesh, new: list[Peer], ranks: range, actors: list[ActorMesh]) -> list[Future[Any]]:
    runtime, shared = mesh._runtime, mesh._state
    for rank, peer in zip(ranks, new, strict=True):
        runtime.supervising.joined(shared.procs.uid, rank, peer.proc)
    there = Arrival(runtime, mesh.name, new)
    assert shared.starting is not None
    shared.starting.start(ranks, there.port)
    return [there, *(create(actor, rank) for actor in actors for rank in ranks)]


def _tell(actor: ActorMesh, before: int, old: Mapping[str, int], new: Mapping[str, int]) -> Future[Any]:
    region = actor._state.region
    there = actor._view(region)
    if before < region.nelements:
        first = actor._state.procs.labels[0]
        there = there.slice(**{first: slice(0, old[first])})
    return Endpoint[..., Any](there, _TELL, None, FUNCTION).call(dict(old), dict(new))


def tell(actor: Any, old: dict[str, int], new: dict[str, int]) -> Any:
    """On a rank that stays: tells an actor, in its turn."""
    return actor.__resized__(old, new)
