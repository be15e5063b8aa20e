"""Putting a new process in the place of one of a mesh: at the same coordinates, as a new incarnation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from monarch._actors.actormesh import ActorMesh
from monarch._actors.future import Future
from monarch._actors.gather import Gather
from monarch._actors.procmesh import ProcMesh
from monarch._core.extent import Extent
from monarch._wire import messages as m
from monarch._wire.pickling import dumps
from monarch.exceptions import StoppedError

_NONE = Extent((), ())


def replace(mesh: ProcMesh, ranks: Sequence[int], actors: Sequence[ActorMesh]) -> list[Future[Any]]:
    """Ends the processes of some ranks, starts new ones, and makes actors there as they were made at first.

    Args:
        mesh: the whole mesh of processes, in its owner.
        ranks: which of them.
        actors: meshes of actors to make again there, with the arguments that they were spawned with.

    Returns:
        Futures that are done when the new actors are there.

    Raises:
        StoppedError: the mesh is not owned here, or was stopped.
    """
    state, runtime = mesh._state, mesh._runtime
    if state.start is None or state.stopped is not None:
        raise StoppedError(
            f"{mesh.name} is not owned here, or was stopped, so it has no ranks to replace", mesh=mesh.name
        )
    procs = state.procs
    old: dict[str, list[str]] = {}
    for rank in ranks:
        peer = runtime.peer(procs.proc(rank))
        old.setdefault(peer.host, []).append(peer.proc)
    for host, names in old.items():
        runtime.to_agent(host, m.Stop(runtime.proc, names, 0.0))
    for rank in ranks:
        procs.incarnations[rank] = procs.incarnations.get(rank, 0) + 1
    procs.generation += 1
    for rank in ranks:
        runtime.peer(procs.proc(rank), starting=True)
    # Those that stay find the new ones by this when they make their process groups anew.
    frame = m.encode(m.Ask(runtime.proc, 0, b"", "monarch._actors.membership:renew", dumps((procs,))[0]))
    for rank in set(range(procs.region().nelements)) - set(ranks):
        runtime.peer(procs.proc(rank)).send(frame)
    # What the actors answer says that the processes are there too.
    state.start(list(ranks), 0)
    made: list[Future[Any]] = []
    for actor in actors:
        for rank in ranks:
            made.append(_create(actor, rank))
    return made


def _create(actor: ActorMesh, rank: int) -> Future[Any]:
    position = actor._state.region.position_of(rank)
    assert position is not None and actor._state.spec is not None
    member = actor._view(actor._state.region)._member(position)
    runtime = actor._runtime
    body, buffers = dumps(actor._state.spec)
    targets = member._members_at()
    gather: Gather[Any] = Gather(runtime, targets.peers, _NONE, actor._name, "__init__", _nothing, actor._key)
    create = m.Create(runtime.proc, actor._key, gather.port, member._view_bytes, body, None, len(buffers))
    targets.peers[0].send(m.encode(create), buffers)
    gather.check()
    return gather


def _nothing(_: Any, __: Any) -> None:
    return None
