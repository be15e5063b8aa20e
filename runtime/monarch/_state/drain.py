"""``drain``: move the ranks off hosts that are taken back, with their state, or shrink the mesh."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import Any

from monarch._core.kinds import is_a
from monarch._core.roster import Procs
from monarch._core.shapes.extent import axes_text
from monarch._core.shapes.ranks import describe_ranks
from monarch._meshes.actors.actor_mesh import ActorMesh
from monarch._meshes.actors.ask import ask, endpoint_of
from monarch._meshes.host_mesh import HostMesh
from monarch._meshes.inside import hosts_of, node_of, region_of, state_of
from monarch._meshes.procs.changes import changing
from monarch._meshes.procs.proc_mesh import ProcMesh
from monarch._meshes.procs.queries import actor_meshes_on, reaches
from monarch._meshes.procs.replace import replace
from monarch._meshes.procs.resize import resize
from monarch._meshes.procs.state import ProcsState
from monarch._meshes.registry import meshes_of
from monarch._node.future import Future, in_thread
from monarch._node.node import Node
from monarch._node.services.registry import name_of
from monarch._state.contract import copied_by
from monarch._state.handoff import receiver
from monarch._state.handoff.sender import member_of
from monarch._wire import messages as m
from monarch.exceptions import ArgumentError, CallTimeoutError, DeviceMeshError, MonarchError, ShapeError

Means = tuple[Callable[..., Any], Callable[..., Any], tuple[Any, ...]]
"""The services that give and take the state of an actor, and arguments of the first."""
_START_S = 60.0
"""Seconds for new processes and actors."""


class BusyError(CallTimeoutError):
    """Calls still run on ranks that are to move.

    Attributes:
        busy: the ranks.
    """

    def __init__(self, name: str, busy: Sequence[int]) -> None:
        run = "runs" if len(busy) == 1 else "run"
        super().__init__(
            f"{name} was not drained: {describe_ranks(busy)} still {run} earlier calls; "
            f"wait for their results and try again"
        )
        self.busy = tuple(busy)


@dataclass
class Drained:
    """The result of ``drain``.

    Attributes:
        moved: ranks that run on another host now.
        gone: ranks that have left the mesh.
        lost: moved ranks whose state is lost, with the reason.
        reports: by moved rank, what the service that gave the state of an actor reported.
        successors: by moved rank, the rank that has left and whose state it has.
        recreated: the meshes of actors whose state did not move.
    """

    moved: list[int] = field(default_factory=list[int])
    gone: list[int] = field(default_factory=list[int])
    lost: dict[int, str] = field(default_factory=dict[int, str])
    reports: dict[int, Any] = field(default_factory=dict[int, Any])
    successors: dict[int, int] = field(default_factory=dict[int, int])
    recreated: list[str] = field(default_factory=list[str])


def drain(mesh: ProcMesh, hosts: HostMesh, *, onto: HostMesh | None = None, timeout: float = 30.0) -> ProcMesh:
    """Move the ranks of a mesh off hosts that are going away, while these still run.

    Each rank gets a new process on a host of ``onto``, with its actors constructed again with their original arguments.
    Actors with ``__getstate__`` and ``__setstate__``, or ``state_dict`` and ``load_state_dict``, keep their state: it
    goes from the old process to the new one, in its turn among their calls. If ``onto`` has too few hosts, the mesh
    shrinks: its last ranks end, and the hosts that these leave take the others.

    Args:
        mesh: the processes.
        hosts: the hosts that are going away.
        onto: other hosts, on which the mesh does not run.
        timeout: seconds for the running calls of the actors to end and for their state.

    Returns:
        The same mesh.

    Raises:
        ArgumentError: ``mesh`` or ``hosts`` are not such meshes.
        ShapeError: no host would be left.
        CallTimeoutError: a call still runs; the mesh is as before.
        SpawnError: a new process has failed.
        ActorError: the constructor or a state method of an actor raised.
    """
    if not is_a(mesh, ProcMesh) or not is_a(hosts, HostMesh) or not (onto is None or is_a(onto, HostMesh)):
        raise ArgumentError("drain: expected a mesh of processes, and meshes of hosts")
    leaving = [hosts_of(hosts)[rank] for rank in region_of(hosts).base_ranks()]
    others = [hosts_of(onto)[rank] for rank in region_of(onto).base_ranks()] if onto is not None else []
    drain_hosts(mesh, leaving, others, timeout)
    return mesh


def drain_hosts(
    mesh: ProcMesh,
    leaving: Sequence[str],
    onto: Sequence[str],
    timeout: float,
    means: Callable[[ActorMesh], Means | None] = lambda mesh: None,
    between: Callable[[list[int]], object] = lambda ranks: None,
    *,
    succeed: bool = False,
    begun: Callable[[Future[None], Drained], object] = lambda future, drained: None,
) -> Drained:
    """Do what ``drain`` says, by ids of hosts; those that are lost already have no state to move.

    Args:
        mesh: the processes.
        leaving: the hosts that go. If the mesh shrinks, its lost hosts go too.
        onto: other hosts.
        timeout: seconds for the running calls and for the state.
        means: how the state of an actor mesh moves; None for its own methods, if it has them.
        between: called with the moved ranks when their actors exist, before they get their state.
        succeed: whether ranks of a lost host get the state of those that leave the host they move to.
        begun: called with the future of the move, and the result to come, once nothing ends it half way, also no
            interrupt of this thread.

    Raises:
        BusyError: a call still runs; the mesh is as before.
    """
    node, until = node_of(mesh), time.monotonic() + timeout
    procs = state_of(mesh).procs
    shared = meshes_of(node).shared_of(procs.uid, procs.name, "drained")
    before, size = procs.hosts, procs.size
    free = [host for host in dict.fromkeys(onto) if host not in (*before, *leaving) and reaches(node, host)]
    going = [host for host in dict.fromkeys(before) if host in leaving]
    if len(going) > len(free):
        going = [host for host in dict.fromkeys(before) if host in leaving or not reaches(node, host)]
    fewer = max(0, len(going) - len(free))
    drained = Drained()
    if not going:
        return drained
    if fewer >= len(before):
        raise ShapeError(
            f"all hosts of {mesh.name} are being taken back ({axes_text(mesh.extent)}); pass other hosts as onto="
        )
    if fewer and procs.host_axes != 1:
        raise ShapeError(f"{mesh.name} has several axes of hosts ({axes_text(mesh.extent)}), so it cannot shrink")
    kept, tail = before[: len(before) - fewer], before[len(before) - fewer :]
    moves = dict(zip([host for host in kept if host in going],
                     [*(host for host in tail if host not in going), *free], strict=False))  # fmt: skip
    ranks = [rank for rank in range(len(kept) * procs.per_host) if before[rank // procs.per_host] in moves]
    if succeed:
        drained.successors = _successors(node, procs, moves)
    actors = actor_meshes_on(shared, node)
    moving = _actors(actors, means)
    drained.recreated = [state_of(each).name for each in actors if all(each is not mesh for mesh, _ in moving)]
    packed = _pack(node, mesh.name, moving, ranks, until, drained)
    last: list[Callable[[], None]] = []

    def finish() -> None:
        try:
            if fewer:
                # Those that leave may hold the state of their successors, in memory that these read.
                later = last if drained.successors else None
                resize(mesh, None, {procs.labels[0]: len(kept)}, max(1.0, until - time.monotonic()), later)
                drained.gone = list(range(procs.size, size))
            if ranks:
                _move(mesh, shared, ranks, moves, packed, timeout, between, drained)
        finally:
            packed.end()
            for leave in last:
                leave()

    here = copy_context()
    moved = in_thread(node, "drain", lambda: here.run(finish))
    begun(moved, drained)
    moved.get()
    return drained


def _move(
    mesh: ProcMesh,
    shared: ProcsState,
    ranks: list[int],
    moves: Mapping[str, str],
    packed: _AllPacked,
    timeout: float,
    between: Callable[[list[int]], object],
    drained: Drained,
) -> None:
    """Start the ranks on their new hosts, and give them their state."""
    node, procs = node_of(mesh), shared.procs
    old = [(procs.host(rank), procs.proc(rank)) for rank in ranks]
    with changing(shared, node, "healed", _START_S):
        _await(replace(shared, node, ranks, moves), time.monotonic() + _START_S)
        if shared.starting is not None:
            shared.starting.fill()
    drained.moved = ranks
    try:
        between(ranks)
    finally:
        # Whatever has failed on one rank, nobody else has the state of the others.
        packed.unpack(timeout)
    for host in moves:
        names = [proc for each, proc in old if each == host]
        if reaches(node, host):
            node.peers.to_agent(host, m.Stop(node.proc, names, 0.0))
    node.events.healed.tell(procs.uid, ranks)


@dataclass
class _Packed:
    """The state of one actor for a rank that moves."""

    mesh: ActorMesh
    rank: int
    source: ActorMesh
    """The actor that it is from."""
    token: str
    take: str
    state: Any


class _AllPacked(list[_Packed]):
    """The state of the ranks that move."""

    def unpack(self, timeout: float) -> None:
        """Give it to the new actors; raise the first error."""
        answers: Mapping[int, Future[Any]] = {
            number: endpoint_of(member_of(each.mesh, each.rank), receiver.unpack).call_one(
                each.state, each.take, timeout
            )
            for number, each in enumerate(self)
        }
        errors = {number: answer.exception(timeout + 5.0) for number, answer in answers.items()}
        ranks = sorted({self[number].rank for number, error in errors.items() if error is not None})
        if ranks:
            first = next(error for error in errors.values() if error is not None)
            whose = "its" if len(ranks) == 1 else "their"
            raise MonarchError(f"{describe_ranks(ranks)} moved without {whose} state: {first}") from first

    def end(self) -> None:
        """Release what the senders have exported, as far as they live."""
        for each in self:
            with suppress(DeviceMeshError):
                ask(each.source, receiver.end, each.token)


def _actors(meshes: Sequence[ActorMesh], means: Callable[[ActorMesh], Means | None]) -> list[tuple[ActorMesh, Means]]:
    found: list[tuple[ActorMesh, Means]] = []
    for mesh in meshes:
        how = means(mesh)
        if how is None and copied_by(state_of(mesh).cls):
            how = receiver.state_of, receiver.set_state, ()
        if how is not None:
            found.append((mesh, how))
    return found


def _successors(node: Node, procs: Procs, moves: Mapping[str, str]) -> dict[int, int]:
    """Return, by rank of a lost host, the rank of the host that takes its place; none if that host is new."""
    first = {host: index * procs.per_host for index, host in enumerate(procs.hosts)}
    return {
        first[old] + each: first[new] + each
        for old, new in moves.items()
        if new in first and not reaches(node, old)
        for each in range(procs.per_host)
    }


def _pack(
    node: Node,
    name: str,
    actors: Sequence[tuple[ActorMesh, Means]],
    ranks: Sequence[int],
    until: float,
    drained: Drained,
) -> _AllPacked:
    """Ask the ranks, or those whose state they get, for the state of their actors, in its turn, and return it."""
    asked: list[tuple[_Packed, Future[Any]]] = []
    for mesh, (give, take, args) in actors:
        for rank in ranks:
            source = drained.successors.get(rank, rank)
            if all(state_of(mesh).region.position_of(each) is not None for each in (rank, source)):
                place = member_of(mesh, source)
                packed = _Packed(mesh, rank, place, secrets.token_hex(8), name_of(take), None)
                try:
                    call = endpoint_of(place, receiver.pack).call_one(packed.token, name_of(give), args)
                except DeviceMeshError as error:
                    drained.lost[rank] = str(error)
                else:
                    asked.append((packed, call))
    found = _AllPacked()
    late: list[tuple[_Packed, Future[Any]]] = []
    try:
        for packed, answer in asked:
            try:
                packed.state, report = answer.get(max(0.1, until - time.monotonic()))
            except CallTimeoutError:
                late.append((packed, answer))
            except DeviceMeshError as error:
                # It is dead already.
                drained.lost[packed.rank] = str(error).partition("\n")[0]
            else:
                found.append(packed)
                if report is not None:
                    drained.reports[packed.rank] = report
        if late:
            raise BusyError(name, sorted({drained.successors.get(each.rank, each.rank) for each, _ in late}))
    except BaseException:
        found.end()
        for packed, answer in asked:
            if packed not in found:
                _withdraw(packed, answer)
        raise
    return found


def _withdraw(packed: _Packed, answer: Future[Any]) -> None:
    """Forget a question: what it exports is released in its turn, after the call that it waits for."""
    answer.add_done_callback(_read)
    with suppress(DeviceMeshError):
        endpoint_of(packed.source, receiver.release).call_one(packed.token).add_done_callback(_read)


def _read(answer: Future[Any]) -> None:
    """Note that nobody wants an answer, so that its error is not reported."""
    answer.exception()


def _await(made: Sequence[Future[Any]], until: float) -> None:
    for each in made:
        each.get(max(0.0, until - time.monotonic()))
