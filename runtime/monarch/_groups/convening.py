"""How a generation of process groups begins: a rank asks the first one, which serves a store and calls all others."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, ParamSpec, cast

from monarch._actors.running import current
from monarch._actors.table import actors_of
from monarch._core.roster import Procs
from monarch._groups.breaking import describe_lost, spoil_generation
from monarch._groups.environment import rank_gpu, set_mesh_variables
from monarch._groups.pipelined import await_end
from monarch._groups.rendezvous import Expected, is_dead, local_rendezvous, uses_collectives
from monarch._node.current import current_node
from monarch._node.services.asking import tell_proc
from monarch._node.services.frame import ask_frame, send_to_all
from monarch._node.services.registry import request, service
from monarch._python.threads import spawn_thread
from monarch.exceptions import GroupError

if TYPE_CHECKING:
    from monarch._tensors.collectives.world import World

P = ParamSpec("P")

PROGRAM = "the program has no process groups, only ranks do; use them in endpoints and in %%mesh cells"
_GENERATIONS = 1_000_000
"""More generations than one incarnation of a rank convenes."""
_NEWS = 0.5
"""Seconds in which a rank that could not form its part of a generation may hear of a death that explains it."""
_REFUSED = 2.0
"""Seconds for which the refusal of a rank counts for generations that have not begun: others may ask a little later."""
_REMIND = 2.0
"""Seconds after which a request, or a call to join, is sent again by way of the program, which is connected to all
ranks: a process without free descriptors accepts no connection, so it never gets what another rank sends."""
_PATIENCE = 90.0
"""Seconds to wait for a generation; joining ranks report missing ones earlier."""


def ensure_world(patience: float = _PATIENCE) -> World:
    """Return the default group of this process's mesh; make it with the other ranks if none works.

    Args:
        patience: seconds to wait for the other ranks.

    Raises:
        CallTimeoutError: they have not come in time.
        GroupError: this is not a rank, or ranks died, or did not join in time.
    """
    node, own = current_node(), local_rendezvous()
    if node.config is None:
        raise GroupError(PROGRAM)
    _await_failed_calls()
    procs = own.procs()
    if own.world is not None and not uses_collectives():
        own.spoil("the program has destroyed the process group")
    rank_gpu().note()
    expected = own.expect()
    if expected.promise is None:
        return cast("World", expected.world)
    dead = [rank for rank in range(procs.region().nelements) if is_dead(procs.proc(rank))]
    if dead:
        own.settle(None, GroupError(describe_lost(procs, dead), mesh=procs.name, ranks=tuple(dead)))
    elif expected.is_joining:
        # Another rank was faster.
        pass
    elif procs.proc(0) == node.proc:
        convene(procs, expected.newer_than)
    else:
        own.asked = procs.proc(0)
        try:
            tell_proc(node, own.asked, convene, procs, expected.newer_than)
        except OSError as error:
            # Such as no free descriptor. The others may wait for this rank, and the program is connected.
            why = f"rank {node.rank} cannot join the process group: {error}"
            with suppress(OSError):
                tell_proc(node, node.root, pass_refusal, procs, expected.newer_than, why)
            raise
        _ask_again_later(procs, expected)
    world = expected.promise.get(patience)
    own.note_use(world)
    return world


def _ask_again_later(procs: Procs, expected: Expected) -> None:
    """Repeat the request for a generation by way of the program if the first rank does not answer soon."""
    node, own, promise = current_node(), local_rendezvous(), expected.promise
    assert promise is not None

    def ask_again() -> None:
        if not promise.done and own.generation <= expected.newer_than:
            with suppress(OSError):
                tell_proc(node, node.root, pass_request, procs, expected.newer_than)

    node.receive_loop.call_later(_REMIND, ask_again)


def _await_failed_calls() -> None:
    """Wait, in a call sent before a failure was known, until the failed call has ended on all ranks."""
    here, own = current.get(), local_rendezvous()
    failed = own.calls.failed(here[1].src, here[1].port) if here is not None else []
    if here is None or not failed:
        return
    src, port = here[1].src, here[1].port
    own.calls.gates[src] = port
    try:
        number = await_end(src, own.procs().uid, failed, port)
    finally:
        own.calls.gates.pop(src, None)
    own.calls.forget(src, failed)
    if number:
        spoil_generation("a call failed and its collective was aborted; the next use recreates the group", number)


@service("convening.convene", "quick")
def convene(procs: Procs, newer_than: int) -> None:
    """Begin a generation in the first rank of a mesh, unless a newer one has begun."""
    own = local_rendezvous()
    with own.lock:
        # A new incarnation has not counted any, so a broken generation does not answer it.
        if own.convened > newer_than and not (own.broken and own.generation == own.convened):
            return
        # A new incarnation does not know its predecessor's count.
        known = max(own.convened, newer_than, procs.version * _GENERATIONS)
        number = own.convened = known + 1
    spawn_thread("monarch-convene", _convene, number)


@service("convening.pass_refusal", "quick")
def pass_refusal(procs: Procs, newer_than: int, reason: str) -> None:
    """Tell the first rank of a mesh, from the program, that a rank cannot join the next generation."""
    tell_proc(current_node(), procs.proc(0), refuse, newer_than, reason)


@service("convening.pass_request", "quick")
def pass_request(procs: Procs, newer_than: int) -> None:
    """Ask the first rank of a mesh, from the program, to begin a generation."""
    tell_proc(current_node(), procs.proc(0), convene, procs, newer_than)


@service("convening.pass_call", "quick")
def pass_call(procs: Procs, number: int, address: str, port: int, roster: int) -> None:
    """Call the ranks of a mesh to a generation, from the program; those that join it already ignore this."""
    _tell_others(procs, 0, join, procs, number, address, port, roster)


@service("convening.pass_end", "quick")
def pass_end(procs: Procs, rank: int, number: int, reason: str) -> None:
    """Tell the ranks of a mesh, from the program, that a generation has ended before it began, for one of them."""
    _tell_others(procs, rank, abandon, number, reason)


@service("convening.refuse", "quick")
def refuse(newer_than: int, reason: str) -> None:
    """End the generation after one in the first rank, and those that begin soon, since a rank cannot join them."""
    own = local_rendezvous()
    with own.lock:
        number = own.convened
        is_begun = number > newer_than
        own.refused = newer_than, reason, time.monotonic() + _REFUSED
    if is_begun:
        own.abandon(number, reason)
        _tell_abandoned(number, reason)


def _check_refusal(number: int) -> None:
    """Raise if a rank has just said that it cannot join a generation."""
    own = local_rendezvous()
    with own.lock:
        newer_than, reason, until = own.refused
    if number > newer_than and time.monotonic() < until:
        raise GroupError(reason)


def _convene(number: int) -> None:
    try:
        _check_refusal(number)
        _call_all(number)
    except BaseException as error:
        # Whatever it is, such as too few file descriptors: ranks wait for this generation.
        reason = f"rank {current_node().rank} could not create the process group: {type(error).__name__}: {error}"
        local_rendezvous().abandon(number, reason)
        _tell_abandoned(number, reason)


def _call_all(number: int) -> None:
    """Serve a store and call all ranks to it."""
    from monarch._tensors.collectives.connections import open_sockets
    from monarch._tensors.collectives.interfaces import LOOPBACK
    from monarch._tensors.collectives.store import serve_store

    node, own = current_node(), local_rendezvous()
    procs = own.procs()
    assert node.config is not None
    address = (node.config.addresses or (LOOPBACK,))[0]
    roster, size = procs.version, procs.region().nelements
    own.cut_forming()
    before = open_sockets()
    store, port = serve_store(address, size)
    of_store = frozenset(open_sockets() - before)
    own.kept[:] = [*own.kept[-1:], store]
    for rank in range(size):
        if rank != node.rank:
            tell_proc(node, procs.proc(rank), join, procs, number, address, port, roster)
    own.join(number, address, port, roster, store, of_store)

    def call_again() -> None:
        if own.generation == number and own.is_forming and not own.broken:
            with suppress(OSError):
                tell_proc(node, node.root, pass_call, procs, number, address, port, roster)

    node.receive_loop.call_later(_REMIND, call_again)


def _tell_abandoned(number: int, reason: str) -> None:
    """Tell the other ranks, as far as they can be reached, that a generation has ended before it began."""
    node, procs = current_node(), local_rendezvous().procs()
    if not _tell_others(procs, node.rank, abandon, number, reason):
        with suppress(Exception):
            tell_proc(node, node.root, pass_end, procs, node.rank, number, reason)


def _tell_others(procs: Procs, rank: int, function: Callable[P, object], *args: P.args, **named: P.kwargs) -> bool:
    """Call a service of all ranks but one; return False if this process could not connect to some."""
    node, reached = current_node(), True
    for other in range(procs.region().nelements):
        if other != rank:
            try:
                tell_proc(node, procs.proc(other), function, *args, **named)
            except Exception:
                reached = False
    return reached


def _unformed(number: int, reason: str) -> None:
    """Free the other ranks, which wait for this one's part of a generation, unless a death or a retry does so."""
    current_node().receive_loop.call_later(_NEWS, lambda: _tell_unformed(number, reason))


def _tell_unformed(number: int, reason: str) -> None:
    node, own = current_node(), local_rendezvous()
    others = [own.procs().proc(rank) for rank in range(own.procs().region().nelements) if rank != node.rank]
    if own.generation != number or any(map(is_dead, others)):
        return
    if not _tell_others(own.procs(), node.rank, spoil_generation, f"rank {node.rank}: {reason}", number):
        with suppress(Exception):
            tell_proc(node, node.root, pass_end, own.procs(), node.rank, number, f"rank {node.rank}: {reason}")


# Whoever joins has imported this module.
local_rendezvous().on_unformed = _unformed


@service("convening.abandon", "quick")
def abandon(number: int, reason: str) -> None:
    """End a generation in the other ranks, since the first rank could not call all of them to it."""
    local_rendezvous().abandon(number, reason)


@service("convening.join", "quick")
def join(procs: Procs, number: int, address: str, port: int, roster: int) -> None:
    """Join a generation in the other ranks, called by the first rank with a version of the roster."""
    local_rendezvous().join(number, address, port, roster)


@service("convening.renew", "quick")
def renew(procs: Procs, roster: int) -> None:
    """Handle the replacement of ranks; the arrival of the roster updates all references in this process.

    It comes from the program. The first rank's call to a new generation may be faster: a generation with this version
    of the roster includes the new ranks and stays.
    """
    node, own = current_node(), local_rendezvous()
    if node.config is None:
        # If the owner is a rank, the program knows more processes.
        tell_of_new_ones(procs)
        return
    for mailbox in list(actors_of(node).here.values()):
        spec = mailbox.spec
        if spec is not None and spec.whole and spec.procs == procs:
            spec.region = procs.region()
    if node.config.procs == procs:
        # A mesh that was resized has another size.
        set_mesh_variables()
    if node.config.procs == procs and own.roster < roster:
        reason = f"ranks of {procs.name} were replaced, added or removed; the next use of the group recreates it"
        own.spoil(reason)
        if own.asked not in ("", procs.proc(0)):
            # Nobody answers for the process that was asked, whose death this one may never hear of now.
            own.settle(None, GroupError(reason, mesh=procs.name))


def tell_of_new_ones(procs: Procs) -> None:
    """Tell all known processes which ranks of a mesh were replaced."""
    node = current_node()
    frame = ask_frame(node, request(renew, procs, procs.version), 0)
    others = [
        peer for proc, peer in list(node.peers.known.items()) if proc != node.proc and not proc.endswith("/agent")
    ]
    send_to_all(node, others, frame)
