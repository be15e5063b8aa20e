"""Attaching a detached mesh: this program becomes the controller of what runs there."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from monarch._core.supervision import Restart
from monarch._meshes.actors.actor_mesh import ActorMesh
from monarch._meshes.actors.execute import Runner
from monarch._meshes.actors.state import ActorsState
from monarch._meshes.procs.proc_mesh import whole_of
from monarch._meshes.procs.starting import ProcStarter
from monarch._meshes.procs.state import ProcsState
from monarch._meshes.registry import meshes_of
from monarch._node.future import DoneFuture
from monarch._node.liveness import Liveness
from monarch._node.node import Node
from monarch._node.rank_config import ActorSpec, RankConfig
from monarch._node.services.asking import ask_proc, tell_proc
from monarch._procs.agent.detached_records import find
from monarch._procs.os.posix import outlives
from monarch._procs.session_folder import host_of
from monarch._session.detached.agents import PATIENCE_S
from monarch._session.detached.meshes import DetachedMesh, connect, end_recorded, need_program, say_nothing
from monarch._session.detached.reattach import adopt, end_orphans, make_spec, spec_of
from monarch._session.launching.waiting import Tell
from monarch._session.session import need_session
from monarch._wire import messages as m
from monarch._wire.pickling import loads
from monarch.exceptions import CallTimeoutError, DetachedMeshInUseError, MonarchError

_Differences: TypeAlias = (
    "tuple[dict[str, str | None], dict[int, dict[str, str | None]], int, dict[str, range], Restart | None]"
)
"""Environment of the mesh, and of ranks that differ; number of spares, ranks by role, and rule of restarts."""
_ENDING_S = 1.0
"""Seconds for a mesh to end that is about to."""
_Claims: TypeAlias = "Sequence[Mapping[str, Any]]"


def attach(name: str, timeout: float = PATIENCE_S, *, tell: Tell | None = None) -> DetachedMesh:
    """Make this program the controller of a detached mesh, and show the output since the last program.

    Args:
        name: its name.
        timeout: seconds for its processes to answer, even if their actors are busy.
        tell: called with a line before the time of its hosts ends, and whether it matters later.

    Raises:
        NoDetachedMeshError: no mesh has this name, its lease has ended, or none of its hosts is left.
        DetachedMeshInUseError: another program has it attached; the text names the process.
        MonarchError: its record is unusable; see ``records``.
    """
    detached, claims = connect(find(name))
    try:
        node = need_program().node
        adopted, former = _take(detached, node, claims, timeout)
        detached.lose_missing()
        # Only now: after an interrupted attach, the next one still finds and counts them.
        for proc in adopted:
            tell_proc(node, proc, end_orphans, former)
    except BaseException:
        # This program may try again, or another one may attach it.
        detached.leave()
        raise
    detached.watch_hosts(tell or say_nothing)
    return detached


def has_attached(name: str) -> bool:
    """Return whether this program has a detached mesh of this name attached."""
    return any(mesh.name == name for mesh in list(need_program().detached.values()))


def leave(name: str) -> None:
    """Detach from a mesh by its name, such as after an interrupt just before it was known by another one."""
    for mesh in {id(each): each for each in list(need_program().detached.values())}.values():
        if mesh.name == name:
            mesh.leave()


def end(name: str) -> None:
    """End a detached mesh that no other program has attached.

    Raises:
        NoDetachedMeshError: no mesh has this name, or its agent on this machine does not answer.
        DetachedMeshInUseError: another program has it attached.
    """
    record = find(name)
    try:
        end_recorded(record)
    except DetachedMeshInUseError:
        raise
    except MonarchError:
        # It may have ended by itself, as without hosts.
        if outlives(record.pid, record.start, _ENDING_S):
            raise


def _take(detached: DetachedMesh, node: Node, claims: _Claims, timeout: float) -> tuple[list[str], list[str]]:
    """Make meshes of the processes and actors, and make this program the owner of the ranks.

    Returns:
        The procs that have answered, and the former controllers.
    """
    output = need_session(node).output
    # Do not repeat output that an earlier program showed, nor take the end of that program for a loss.
    output.know({(proc, stream): offset for known in claims for proc, stream, offset in known["passed"]})
    detached.listen()
    output.flush()
    deadline = time.monotonic() + timeout
    former = sorted({proc for known in claims for proc in known["former"]})
    alive = {proc: pid for known in claims for proc, _, pid in known["procs"]}
    asked = [(proc, ask_proc(proc, adopt, node.proc, former)) for proc in alive]
    where: dict[str, list[str]] = {}
    adopted: list[str] = []
    for proc, answer in asked:
        try:
            _, keys, lost = answer.get(max(0.0, deadline - time.monotonic()))
        except CallTimeoutError:
            detached.problems.append(
                f"process {proc} does not answer (it may be in C code); attach again when it is done"
            )
        except MonarchError as error:
            detached.problems.append(f"process {proc} was lost in the meantime: {error}")
        else:
            adopted.append(proc)
            for key in keys:
                where.setdefault(key, []).append(proc)
            detached.lost_tensors = max(detached.lost_tensors, lost)
    # Each host knows the processes of a mesh as they were at its last request; together they know the newest.
    orders = _orders(claims)
    for config, order, description in {each[0].procs.uid: each for each in orders}.values():
        _add_procs(detached, node, config, order, description, alive)
    for key, procs in where.items():
        _add_actors(detached, node, key, procs, max(1.0, deadline - time.monotonic()))
    return adopted, former


def _orders(claims: _Claims) -> list[tuple[RankConfig, m.Spawn, bytes]]:
    """Return each request for procs, with its configuration and the description of their mesh."""
    found: list[tuple[RankConfig, m.Spawn, bytes]] = []
    for known in claims:
        for order, description in known["orders"]:
            spawn = m.decode(order)
            assert isinstance(spawn, m.Spawn)
            found.append((loads(spawn.config), spawn, description))
    return found


def _add_procs(
    detached: DetachedMesh,
    node: Node,
    config: RankConfig,
    order: m.Spawn,
    description: bytes,
    alive: Mapping[str, int],
) -> None:
    """Return the process mesh of an order."""
    procs = config.procs
    procs.owner = node.proc
    if not meshes_of(node).own_procs:
        # No rank has this program's secret for buffers yet, so take over theirs.
        node.hosts.secret = config.secret
    # If the program died before it stored the differences, all ranks are alike.
    how: _Differences = loads(description) if description else (order.env, {}, 0, {}, None)
    variables, of_ranks, want_spares, roles, restart = how
    shared = ProcsState(procs, True)
    shared.roles = roles
    start = ProcStarter(
        node, procs, config.bootstrap, "", variables, of_ranks, order.binds, order.path, order.cwd, want_spares
    )
    for host in detached.ids:
        here = [proc for proc in alive if host_of(proc) == host]
        start.spares[host] = [
            name for name in _names(here, f"{procs.uid}.s") if name not in procs.roster.names.values()
        ]
    shared.starting = start
    shared.supervision.restart = restart
    node.part(Liveness).watch(procs.uid, None)
    meshes_of(node).add_procs(procs.uid, procs.name, "", shared)
    for rank in procs.region().base_ranks():
        proc = procs.proc(rank)
        meshes_of(node).joined.tell(procs.uid, rank, proc)
        if proc in alive:
            node.events.ready.tell(m.Ready(proc, alive[proc]))
    detached.procs.append(whole_of(shared, node))
    for rank in procs.region().base_ranks():
        # Asks for news of its death, even an old one.
        node.peers.get(procs.proc(rank))


def _names(procs: Iterable[str], prefix: str) -> list[str]:
    """Return the names of procs with a prefix."""
    return [name for name in (proc.partition("/")[2] for proc in procs) if name.startswith(prefix)]


def _add_actors(detached: DetachedMesh, node: Node, key: str, procs: list[str], timeout: float) -> None:
    """Return the actor mesh of a key that some procs have reported."""
    try:
        whole, body, buffers = ask_proc(procs[0], spec_of, key).get(timeout)
        spec: ActorSpec = make_spec(body, buffers)
    except MonarchError as error:
        detached.problems.append(f"actors {key.rpartition('-')[0]!r} cannot be used here: {error}")
        return
    spec.owner, spec.owner_actor = node.proc, ""
    if spec.whole:
        spec.region = spec.procs.region()
    state = ActorsState(key, spec.name, spec.cls, spec.procs, spec.region, True)
    state.initialized = DoneFuture(node, spec.name, None)
    # Without its arguments an actor cannot be recreated.
    state.spec = spec if whole else None
    mesh = ActorMesh(state, spec.region, node)
    meshes_of(node).add_actors(key, mesh)
    meshes_of(node).owners[key] = ""
    if spec.cls is Runner:
        shared = meshes_of(node).own_procs.get(spec.procs.uid)
        if shared is not None:
            shared.runner = mesh
    else:
        detached.actors.append(mesh)
