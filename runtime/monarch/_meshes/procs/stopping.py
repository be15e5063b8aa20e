"""The end of all processes of a mesh, on the owner's wish."""

from __future__ import annotations

from monarch._meshes.procs.agents import stop_soon
from monarch._meshes.procs.state import Ended, ProcsState
from monarch._meshes.registry import meshes_of
from monarch._node.future import Future, when_done
from monarch._node.node import Node
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
    state.stopped = reason
    procs = state.procs
    peers = [node.peers.get(procs.proc(rank)) for rank in range(procs.region().nelements)]
    peers.extend(node.peers.get(proc) for proc in (state.starting.waiting() if state.starting is not None else ()))
    ended = Ended(node, f"{procs.name}.stop()", [peer for peer in peers if peer.dead is None])
    if not ended.done:
        meshes_of(node).stopping.tell(procs.uid, [peer.proc for peer in ended.targets], ended.port)
    stop_soon(node, peers, react)
    send_to_all(node, peers, m.encode(m.Halt(node.proc, "", 0, b"", reason, drain)))
    node.hosts.hurry(peer.host for peer in ended.targets)
    state.stopping = ended
    when_done(ended, lambda _: state.ended.tell())
    return ended
