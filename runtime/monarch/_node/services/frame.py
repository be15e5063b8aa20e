"""Service request messages."""

from __future__ import annotations

from collections.abc import Iterable

from monarch._core.roster import split_proc
from monarch._core.shapes.region import Region
from monarch._node.node_like import NodeLike
from monarch._node.peers.gateway import Gateway
from monarch._node.peers.peer import Peer, RemotePeer
from monarch._node.services.registry import ServiceRequest
from monarch._wire import messages as m
from monarch._wire.pickling import dumps_whole


def ask_frame(node: NodeLike, asked: ServiceRequest, port: int, view: bytes = b"") -> bytes:
    """Return the request message for a service, for one or more processes.

    Args:
        node: the node of this process.
        asked: the service with its arguments.
        port: the port for the answer; 0 for none.
        view: the packed view whose positions the answers name.
    """
    return m.encode(m.Ask(node.proc, port, view, asked.name, dumps_whole(asked.args)))


def send_to_all(node: NodeLike, peers: Iterable[Peer], frame: bytes, port: int = 0) -> None:
    """Send a message to the living ones of some processes.

    Those on other hosts get it by one message for each host or, with many hosts, share of hosts.

    Args:
        node: the node of this process.
        peers: the processes.
        frame: the message.
        port: that they answer to; 0 for none.
    """
    far: dict[Gateway, list[str]] = {}
    for peer in peers:
        if peer.dead is not None:
            continue
        if isinstance(peer, RemotePeer):
            far.setdefault(peer.gateway, []).append(peer.proc)
        else:
            peer.send(frame)
    node.hosts.cast(node.proc, list(far.items()), port, [frame])


def ask_ranks(node: NodeLike, asked: ServiceRequest, port: int, peers: Iterable[Peer]) -> None:
    """Ask processes for a service: ranks of one mesh on other hosts by one message, which goes from host to host.

    Args:
        node: the node of this process.
        asked: the service with its arguments.
        port: the port for the answers.
        peers: the processes. Answers that were folded on their way name a rank of the mesh in place of a process.
    """
    living = [peer for peer in peers if peer.dead is None]
    places = [split_proc(peer.proc) for peer in living]
    ranks = {rank for _, rank in places}
    far: dict[Gateway, list[str]] = {}
    for peer in living:
        if isinstance(peer, RemotePeer):
            far.setdefault(peer.gateway, []).append(peer.proc)
    of_one_mesh = len({uid for uid, _ in places}) == 1 and bool(places[0][0]) and len(ranks) == len(living)
    if len(far) < 2 or not of_one_mesh:
        frame = ask_frame(node, asked, port)
        for peer in living:
            peer.send(frame)
        return
    view = Region(("ranks",), 0, (max(ranks) + 1,), (1,))
    frame = ask_frame(node, asked, port, m.pack(view.pack()))
    for peer in living:
        if not isinstance(peer, RemotePeer):
            peer.send(frame)
    node.hosts.cast(node.proc, list(far.items()), port, [frame])
