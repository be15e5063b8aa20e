"""The end of all processes of a mesh, on the owner's wish."""

from __future__ import annotations

from collections.abc import Sequence

from monarch._meshes.procs.agents import stop_soon
from monarch._meshes.procs.state import DeathFuture, ProcsState
from monarch._meshes.registry import meshes_of
from monarch._node.future import Future, when_done
from monarch._node.node import Node
from monarch._node.peers.peer import Peer
from monarch._node.services.frame import send_to_all
from monarch._wire import messages as m


def begin_stop(node: Node, state: ProcsState, reason: str, react: float, drain: float | None = None) -> Future[None]:
    """Let the processes of a mesh end, unless they do already; return a future that is done when they have ended.

    Args:
        node: the node of the owner.
        state: the state of the mesh.
        reason: for later callers.
        react: seconds of silence after which their agents kill them.
        drain: seconds for messages sent before; None for the limit of the processes.
    """
    if state.stopping is not None:
        return state.stopping
    procs = state.procs
    with state.lock:
        # A heal, a resize or new spares come before this, or find the mesh stopped.
        state.stopped = reason
        names = [procs.proc(rank) for rank in range(procs.region().nelements)]
        names.extend(state.starting.end() if state.starting is not None else ())
    peers = [node.peers.get(proc) for proc in names]
    ended = DeathFuture(node, f"{procs.name}.stop()", [peer for peer in peers if peer.dead is None])
    if not ended.done:
        meshes_of(node).stopping.tell(procs.uid, [peer.proc for peer in ended.targets], ended.port)
    _halt(node, peers, reason, react, drain)
    node.hosts.hurry(peer.host for peer in ended.targets)
    state.stopping = ended
    when_done(ended, lambda _: state.ended.tell())
    return ended


def end_if_stopped(node: Node, state: ProcsState, peers: Sequence[Peer]) -> None:
    """End processes that were just started if a stop has begun meanwhile, whose messages may have come before them."""
    reason = state.stopped
    if reason is not None:
        _halt(node, peers, reason)


def _halt(
    node: Node, peers: Sequence[Peer], reason: str, react: float | None = None, drain: float | None = None
) -> None:
    stop_soon(node, peers, react)
    send_to_all(node, peers, m.encode(m.Halt(node.proc, "", 0, b"", reason, drain)))
