"""Healing: new processes, with actors, at the coordinates of dead ones; the others lose nothing."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from monarch._core.roster import split_proc
from monarch._core.shapes.extent import Extent
from monarch._core.shapes.ranks import describe_ranks
from monarch._groups.made_again import begin_afresh
from monarch._meshes.actors.actor_mesh import ActorMesh
from monarch._meshes.actors.ask import endpoint_of
from monarch._meshes.actors.state import ActorsState
from monarch._meshes.inside import member_at, node_of, packed_of, state_of, targets_of, view_at
from monarch._meshes.procs.changes import changing
from monarch._meshes.procs.queries import actor_meshes_on, dead_ranks, reaches
from monarch._meshes.procs.replace import create, replace
from monarch._meshes.procs.state import ProcsState
from monarch._meshes.registry import meshes_of
from monarch._node.future import DoneFuture, Future
from monarch._node.node import Node
from monarch._node.replies.gather import Gather
from monarch._supervision.late_deaths import await_deaths
from monarch._wire import messages as m
from monarch.exceptions import CallTimeoutError, MonarchError, SpawnError, StoppedError

_TRIES = 5
"""Attempts, since a new process may die during setup."""
_SETTLING_S = 3.0
"""Seconds for ranks that wait for a failed actor to be freed."""
_ALONE = (
    "a constructor that a heal runs again must not wait for other ranks, which do not run theirs: make process groups, "
    "and call collectives, in an endpoint (a constructor may wrap a model in DistributedDataParallel)"
)
"""A likely reason for a heal that takes too long."""


def heal(
    shared: ProcsState, node: Node, timeout: float, hosts: Sequence[str] = ()
) -> tuple[list[int], list[tuple[ActorMesh, int]]]:
    """Replace dead processes and failed actors.

    Args:
        shared: the state of the mesh.
        node: the node of this process, which owns it.
        timeout: seconds for the whole heal.
        hosts: ids of hosts that may replace lost ones.

    Returns:
        The ranks with new processes; and the actors recreated in living processes, by rank.

    Raises:
        StoppedError: the mesh was stopped in the meantime.
        SpawnError: a host is lost too, or new processes keep dying.
        ActorError: the constructor of an actor raised.
        SupervisionError: another heal or resize of the mesh is still running at the timeout.
    """
    until = time.monotonic() + timeout
    with changing(shared, node, "healed", timeout):
        try:
            replaced = _replace_dead(shared, node, until, hosts)
            renewed = _renew_failed(shared, node, until, replaced)
        except CallTimeoutError as error:
            if "__init__()" in str(error):
                error.args = (f"{error}; {_ALONE}",)
            raise
        if replaced and (shared.initialized is None or shared.initialized.done):
            shared.initialized = DoneFuture(node, shared.procs.name, True)
        if shared.starting is not None:
            shared.starting.fill()
        return sorted(replaced), renewed


def replace_procs(node: Node, procs: Sequence[str], timeout: float) -> None:
    """Replace living processes of meshes that this process owns, and restart their actors."""
    ranks: dict[str, list[int]] = {}
    for uid, rank in map(split_proc, procs):
        ranks.setdefault(uid, []).append(rank)
    for uid, each in ranks.items():
        _replace(meshes_of(node).own_procs[uid], node, sorted(set(each)), timeout)


def _replace(shared: ProcsState, node: Node, ranks: Sequence[int], timeout: float) -> None:
    until = time.monotonic() + timeout
    with changing(shared, node, "healed", timeout):
        for each in replace(shared, node, ranks):
            each.get(max(0.0, until - time.monotonic()))
    node.events.replaced.tell(shared.procs.uid, list(ranks), True)


def _replace_dead(shared: ProcsState, node: Node, until: float, hosts: Sequence[str]) -> set[int]:
    """Replace dead processes and return their ranks."""
    replaced: set[int] = set()
    await_deaths(node, [shared.procs.proc(rank) for rank in range(shared.procs.size)])
    for attempt in range(_TRIES):
        dead = dead_ranks(shared, node)
        if not dead:
            break
        if shared.stopped is not None or node.closed:
            raise StoppedError(f"{shared.procs.name} was stopped before it was healed", mesh=shared.procs.name)
        moved = _move(shared, node, dead, hosts)
        made = replace(shared, node, dead, moved)
        replaced.update(dead)
        error = _first_error(made, until)
        if error is not None and (attempt == _TRIES - 1 or not dead_ranks(shared, node)):
            raise error
    return replaced


def _renew_failed(shared: ProcsState, node: Node, until: float, replaced: set[int]) -> list[tuple[ActorMesh, int]]:
    """Recreate failed actors of living processes and return them."""
    renewed: list[tuple[ActorMesh, int]] = []
    for mesh in actor_meshes_on(shared, node):
        state = state_of(mesh)
        failed = set(state.failed)
        if failed - replaced:
            # Else a new one would join collectives that others wait in for the old one.
            node.watch.settle(shared.procs.uid, min(_SETTLING_S, max(0.0, until - time.monotonic())))
        for rank in sorted(failed - replaced):
            _make_again(mesh, rank, until)
            renewed.append((mesh, rank))
        if failed - replaced:
            _begin_others(mesh, failed | replaced)
        state.failed -= failed
        if state.creation is not None:
            # Actors under construction report their own errors, which may follow.
            state.creation.recreated(failed | replaced, partial(_is_whole, node, state))
        else:
            _is_whole(node, state)
    return renewed


def _is_whole(node: Node, state: ActorsState) -> None:
    """Note that all actors of a mesh exist, so that the errors of its spawn no longer count."""
    state.creation, state.initialized = None, DoneFuture(node, state.name, True)


def _move(shared: ProcsState, node: Node, dead: Sequence[int], hosts: Sequence[str]) -> dict[str, str]:
    """Choose replacements for lost hosts."""
    procs = shared.procs
    lost = [rank for rank in dead if not reaches(node, procs.host(rank))]
    gone = list(dict.fromkeys(procs.host(rank) for rank in lost))
    free = [host for host in dict.fromkeys(hosts) if host not in procs.hosts and reaches(node, host)]
    if len(free) < len(gone):
        raise SpawnError(
            f"{describe_ranks(lost)} of {procs.name} cannot be replaced: their host is lost; pass one new host for "
            f"each lost one, as in heal_mesh(mesh, hosts=...), or spawn a new mesh on the remaining hosts",
            mesh=procs.name,
            ranks=tuple(lost),
        )
    return dict(zip(gone, free, strict=False))


def _first_error(made: list[Future[Any]], until: float) -> BaseException | None:
    """Wait for all futures and return the first error."""
    first: BaseException | None = None
    for each in made:
        error = each.exception(max(0.0, until - time.monotonic()))
        first = first or error
    return first


def _make_again(mesh: ActorMesh, rank: int, until: float) -> None:
    """End a failed actor in a living process and construct another."""
    node, state = node_of(mesh), state_of(mesh)
    position = state.region.position_of(rank)
    if position is None:
        return
    member = member_at(view_at(mesh, state.region), position)
    peers = targets_of(member).peers
    ended: Gather[None] = Gather(
        node, peers, Extent((), ()), state.name, "stop", lambda _, __: None, state.key, patient=True
    )
    peers[0].send(m.encode(m.Halt(node.proc, state.key, ended.port, packed_of(member), "recreated because it failed")))
    ended.check()
    with suppress(MonarchError):
        # Ignore the result of its cleanup: its state may be broken.
        ended.get(max(0.0, until - time.monotonic()))
    create(mesh, rank).get(max(0.0, until - time.monotonic()))


def _begin_others(mesh: ActorMesh, made: Collection[int]) -> None:
    """Let the modules in DDP of the other actors begin afresh with those of new ones, before their next call."""
    region = state_of(mesh).region
    for rank in region.base_ranks():
        position = region.position_of(rank)
        if rank not in made and position is not None:
            endpoint_of(member_at(view_at(mesh, region), position), begin_afresh).broadcast()
