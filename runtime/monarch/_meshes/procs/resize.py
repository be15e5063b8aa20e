"""Resizing of a living mesh."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from math import prod
from typing import Any

from monarch._core.kinds import is_a, is_count
from monarch._core.shapes.extent import axes_text
from monarch._core.shapes.ranks import describe_ranks
from monarch._groups.convening import tell_of_new_ones
from monarch._meshes.actors.actor_mesh import ActorMesh
from monarch._meshes.actors.ask import endpoint_of
from monarch._meshes.inside import called_of, hosts_of, member_at, node_of, region_of, state_of, view_at
from monarch._meshes.mesh_like import ProcMeshLike, ResizableHosts
from monarch._meshes.procs.agents import stop_soon
from monarch._meshes.procs.changes import changing
from monarch._meshes.procs.limits import check_room
from monarch._meshes.procs.queries import actor_meshes_on, dead_ranks, reaches
from monarch._meshes.procs.replace import Arrival, create
from monarch._meshes.procs.state import DeathFuture, ProcsState
from monarch._meshes.procs.stopping import end_if_stopped
from monarch._meshes.registry import meshes_of
from monarch._node.future import Future, to_its_end
from monarch._node.node import Node
from monarch._node.peers.peer import Peer
from monarch._node.services.frame import send_to_all
from monarch._node.services.registry import service
from monarch._wire import messages as m
from monarch.exceptions import (
    ArgumentError,
    CallTimeoutError,
    DeviceMeshError,
    ShapeError,
    StoppedError,
    SupervisionError,
)

_PATIENCE = 60.0
"""Seconds to wait for new processes and actors."""
_HOOK = "__resized__"


def resize(
    mesh: ProcMeshLike,
    onto: ResizableHosts | None,
    sizes: Mapping[str, int],
    patience: float | None = _PATIENCE,
    last: list[Callable[[], None]] | None = None,
) -> ProcMeshLike:
    """See ``ProcMesh.resize``.

    Args:
        mesh: the processes.
        onto: hosts to grow onto.
        sizes: the new size of the first axis.
        patience: seconds to wait for earlier calls of actors that are told of the resize; None for no limit.
        last: gets the step that ends the processes which leave, for the caller to take; None to take it at once.
    """
    if onto is not None and not is_a(onto, ResizableHosts):
        raise ArgumentError(f"resize: expected a mesh of hosts and axis sizes, got {type(onto).__name__}")
    state, node = state_of(mesh), node_of(mesh)
    shared = meshes_of(node).shared_of(state.procs.uid, state.procs.name, "resized")
    if region_of(mesh) != shared.procs.region() or not shared.owned:
        raise StoppedError(
            f"cannot resize a slice or a received reference of {mesh.name}; resize the mesh where it was spawned",
            mesh=mesh.name,
        )
    if _checked(mesh, sizes).items() - dict(region_of(mesh).extent).items():
        _await_calls(shared, node, patience)
    is_over = threading.Event()
    try:
        return to_its_end(node, "resize", lambda: _resize(mesh, shared, onto, sizes, last, is_over))
    except BaseException:
        # An interrupt, maybe before it has begun: then it must not follow a later one.
        is_over.set()
        raise


def _await_calls(shared: ProcsState, node: Node, patience: float | None) -> None:
    """Wait for the earlier calls of actors that are told of the resize.

    A group that such a call makes after the ranks know the new size would wait for ranks that the call does not reach.
    An interrupt, or the end of the patience, leaves the mesh as it was.
    """
    # A death meanwhile ends the call of that rank only; each round skips one more rank at least.
    for _ in range(shared.procs.size):
        with suppress(DeviceMeshError):
            return _await_living(shared, node, patience)


def _await_living(shared: ProcsState, node: Node, patience: float | None) -> None:
    hooked = [each for each in actor_meshes_on(shared, node) if _is_on_all(each) and _has_hook(each)]
    living = [rank for rank in range(shared.procs.size) if node.peers.get(shared.procs.proc(rank)).dead is None]
    views = [view for each in hooked for view in _views(view_at(each, state_of(each).region), living)]
    replies = [(called_of(view), endpoint_of(view, finish_calls).call()) for view in views]
    for name, reply in replies:
        try:
            reply.get(patience)
        except CallTimeoutError:
            raise CallTimeoutError(
                f"{shared.procs.name} was not resized: an earlier call of {name} did not finish within {patience:g} s; "
                f"wait for its result and resize again"
            ) from None


def check_sizes(mesh: ProcMeshLike, sizes: Mapping[str, int]) -> None:
    """Raise ShapeError if a mesh cannot be resized so."""
    _checked(mesh, sizes)


def _resize(
    mesh: ProcMeshLike,
    shared: ProcsState,
    onto: ResizableHosts | None,
    sizes: Mapping[str, int],
    last: list[Callable[[], None]] | None,
    is_over: threading.Event,
) -> ProcMeshLike:
    node = node_of(mesh)
    with changing(shared, node, "resized", _PATIENCE):
        if is_over.is_set():
            return mesh
        procs = shared.procs
        old = dict(zip(procs.labels, procs.sizes, strict=True))
        new = {**old, **_checked(mesh, sizes)}
        if new == old:
            return mesh
        hosts = _hosts(mesh, new, onto)
        per_host = prod(list(new.values())[procs.host_axes :])
        count = len(hosts) * per_host
        dead = dead_ranks(shared, node) if count > procs.size else []
        if dead:
            raise SupervisionError(
                f"{mesh.name} has dead ranks ({describe_ranks(dead)}); call heal_mesh before you resize it",
                mesh=mesh.name,
                ranks=tuple(dead),
            )
        before, going, left = procs.size, [procs.proc(rank) for rank in range(count, procs.size)], procs.hosts
        come = range(before, count)
        check_room(node, Counter(hosts[rank // per_host] for rank in come))
        with shared.lock:
            shared.check_runs("resized")
            roster = procs.resized(hosts, per_host, tuple(new.values()))
            # Before anybody can look up the new processes and ask an agent that does not know them yet.
            peers = [node.peers.get(roster.proc(procs.uid, rank), starting=True) for rank in come]
            # Meshes spawned later include the new processes.
            actors = [each for each in actor_meshes_on(shared, node) if _is_on_all(each)]
            procs.learn(roster)
            for actor in actors:
                _follow(actor)
        made = _grow(mesh, peers, come, actors) if peers else []
        tell_of_new_ones(procs)
        if going:
            leave = partial(_let_go, mesh, before, going, left[len(hosts) :])
            if last is None:
                leave()
            else:
                last.append(leave)
        for each in made:
            each.get(_PATIENCE)
        stayed = [rank for rank in range(min(before, count)) if node.peers.get(procs.proc(rank)).dead is None]
        hooked = [each for each in actors if _has_hook(each)]
        for reply in [future for each in hooked for future in _tell(each, stayed, old, new)]:
            reply.get(_PATIENCE)
    return mesh


def _is_on_all(actor: ActorMesh) -> bool:
    spec = state_of(actor).spec
    return spec is not None and spec.whole


def _has_hook(actor: ActorMesh) -> bool:
    return hasattr(state_of(actor).cls, _HOOK)


def _checked(mesh: ProcMeshLike, sizes: Mapping[str, int]) -> dict[str, int]:
    procs = state_of(mesh).procs
    for axis, size in sizes.items():
        now = region_of(mesh).size(axis)
        if not is_count(size, 1):
            raise ShapeError(f"resize({axis}=...): expected a number of at least 1, got {size!r}")
        if size == now:
            continue
        if axis != procs.labels[0]:
            raise ShapeError(
                f"only the first axis of {mesh.name} ({axes_text(mesh.extent)}) can be resized: "
                f"{procs.labels[0]!r}; changing {axis!r} would renumber the ranks"
            )
    return dict(sizes)


def _hosts(mesh: ProcMeshLike, new: Mapping[str, int], onto: ResizableHosts | None) -> tuple[str, ...]:
    """Return the hosts after the resize."""
    procs, node = state_of(mesh).procs, node_of(mesh)
    if not procs.host_axes:
        if onto is not None:
            raise ArgumentError(
                f"{mesh.name} has no hosts axis ({axes_text(mesh.extent)}), so it cannot move to other hosts"
            )
        return procs.hosts
    axes = procs.labels[: procs.host_axes]
    missing = prod(new[label] for label in axes) - len(procs.hosts)
    if missing <= 0:
        return procs.hosts[: len(procs.hosts) + missing]
    wanted = dict.fromkeys(hosts_of(onto)[rank] for rank in region_of(onto).base_ranks()) if onto is not None else ()
    free = [host for host in wanted if host not in procs.hosts and reaches(node, host)]
    if free and set(procs.hosts) == {node.host}:
        # Its ranks have no address that ranks of other hosts could reach.
        raise ShapeError(f"{mesh.name} runs only on the host of its owner and cannot move; spawn it on attached hosts")
    if len(free) < missing:
        raise ShapeError(
            f"{mesh.name} already runs on all of its hosts ({axes_text(mesh.extent)}); to grow along {axes[0]!r} it "
            f"needs {missing} more: mesh.resize(more, {axes[0]}={new[axes[0]]}), where more is a mesh of other hosts, "
            f"for example from attach_to_workers"
        )
    return (*procs.hosts, *free[:missing])


def _follow(actor: ActorMesh) -> None:
    """Resize an actor mesh on all processes, even if nobody here holds a view of all of it."""
    state = state_of(actor)
    state.region = state.procs.region()
    if state.spec is not None:
        state.spec.region = state.region


def _let_go(mesh: ProcMeshLike, before: int, going: Sequence[str], hosts: Sequence[str]) -> None:
    """End the processes that leave a mesh of so many, and the spares on hosts that leave."""
    node, shared = node_of(mesh), state_of(mesh)
    assert shared.starting is not None
    for rank in range(before - len(going), before):
        meshes_of(node).left.tell(shared.procs.uid, rank)
    living = [proc for proc in going if node.peers.get(proc).dead is None]
    ended = DeathFuture(node, f"{mesh.name}.resize()", [node.peers.get(proc) for proc in living])
    leaving = [node.peers.get(proc) for proc in living]
    stop_soon(node, leaving)
    send_to_all(node, leaving, m.encode(m.Halt(node.proc, "", 0, b"", "its mesh has shrunk")))
    for host in hosts:
        # Other ranks may have moved there.
        if host not in shared.procs.hosts:
            shared.starting.leave(host)
    for proc in living:
        peer = node.peers.get(proc)
        if peer.dead is not None:
            # It may have died just before this wait began.
            ended.lost(peer, peer.dead)
    ended.get(_PATIENCE)


def _grow(mesh: ProcMeshLike, new: list[Peer], ranks: range, actors: list[ActorMesh]) -> list[Future[Any]]:
    node, shared = node_of(mesh), state_of(mesh)
    for rank, peer in zip(ranks, new, strict=True):
        meshes_of(node).joined.tell(shared.procs.uid, rank, peer.proc)
    arrival = Arrival(node, mesh.name, new)
    assert shared.starting is not None
    if shared.procs.host_axes:
        shared.starting.repeat(ranks)
    shared.starting.start(ranks, arrival.port, again=True)
    end_if_stopped(node, shared, new)
    shared.starting.fill()
    return [arrival, *(create(actor, rank) for actor in actors for rank in ranks)]


def _tell(actor: ActorMesh, stayed: list[int], old: Mapping[str, int], new: Mapping[str, int]) -> list[Future[Any]]:
    whole, first = view_at(actor, state_of(actor).region), state_of(actor).procs.labels[0]
    remaining = whole.slice(**{first: slice(0, min(old[first], new[first]))})
    return [endpoint_of(each, tell).call(dict(old), dict(new)) for each in _views(remaining, stayed)]


def _views(actors: ActorMesh, living: list[int]) -> list[ActorMesh]:
    """Return views of the actors on living ranks: one for each rank if some are dead, since a call to all fails."""
    return [actors] if len(actors) == len(living) else [member_at(actors, rank) for rank in living]


@service("resize.finish_calls", "actor")
def finish_calls(actor: Any) -> None:
    """On every rank before a resize: ends in its turn, after the earlier calls of the actor."""


@service("resize.tell", "actor")
def tell(actor: Any, old: dict[str, int], new: dict[str, int]) -> Any:
    """On a rank that stays: tells an actor, in its turn."""
    return actor.__resized__(old, new)
