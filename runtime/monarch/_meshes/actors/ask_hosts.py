"""Large requests to one process of each of many hosts: this process sends each once, and the hosts pass it on."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

from monarch._core.shapes.extent import Extent
from monarch._meshes.inside import node_of, state_of, targets_of
from monarch._meshes.mesh_like import ActorMeshLike
from monarch._node.future import when_done
from monarch._node.node import Node
from monarch._node.peers.peer import Peer, RemotePeer
from monarch._node.replies.gather import Gather
from monarch._node.services.frame import ask_frame
from monarch._node.services.registry import request
from monarch._node.spreads.arrivals import SLOW
from monarch._wire import messages as m
from monarch.exceptions import CallTimeoutError

P = ParamSpec("P")
R = TypeVar("R")
_LOOK = 0.25
"""Seconds between checks whether a host that passes the request on, or a connection to it, has been lost."""

_HANGS = 5.0
"""Seconds, and more for large requests, after which a host that passes one on counts as hanging."""


class _BySender:
    """Gives the answers to a Gather, in the order of some processes."""

    def __init__(self, node: Node, gather: Gather[Any]) -> None:
        self._gather = gather
        self._places = {peer.proc: place for place, peer in enumerate(gather.targets)}
        self.port = port = node.ports.open(self)
        when_done(gather, lambda _: node.ports.close(port))

    def reply(self, reply: m.Reply, frames: Sequence[bytes]) -> None:
        """Take an answer; any but the first of a process is ignored."""
        place = self._places.get(reply.src)
        if place is not None:
            port = self._gather.port
            self._gather.reply(m.Reply(reply.src, port, place, reply.status, 0, reply.body, reply.bulk), frames)


class HostsAsked:
    """A request on its way; ``wait`` returns the answers."""

    def __init__(self, node: Node, name: str, peers: Sequence[Peer], asked: Any) -> None:
        self._node = node
        self._gather: Gather[list[Any]] = Gather(
            node, peers, Extent(("hosts",), (len(peers),)), name, asked.name, lambda _, values: values, patient=True
        )
        self._frame = ask_frame(node, asked, _BySender(node, self._gather).port)
        self._losses = self._count_losses()
        steps = len(peers).bit_length()
        self._slow = time.monotonic() + _HANGS + steps * len(self._frame) / SLOW
        """When it must have arrived, unless a host on the way hangs."""
        far: dict[str, list[str]] = {}
        for peer in peers:
            if isinstance(peer, RemotePeer) and peer.dead is None:
                far.setdefault(peer.host, []).append(peer.proc)
            else:
                peer.send(self._frame)
        node.hosts.spreads.pass_on([(node.hosts.gateway(host), procs) for host, procs in far.items()], self._frame)
        self._gather.check()

    def _count_losses(self) -> int:
        return self._node.peers.deaths + self._node.hosts.spreads.breaks

    def wait(self, timeout: float) -> list[Any]:
        """Return the answers, in the order of the processes.

        Raises:
            CallTimeoutError: not all have answered in time.
            MonarchError: a process has died, or the service raised an error.
        """
        end = time.monotonic() + timeout
        while True:
            left = end - time.monotonic()
            try:
                return self._gather.get(max(0.001, min(_LOOK, left)))
            except CallTimeoutError:
                if left <= _LOOK:
                    raise self._gather.timeout_error(timeout) from None
            losses = self._count_losses()
            if losses != self._losses or time.monotonic() > self._slow:
                # That host, or that connection, may have been to pass the request on; or the host hangs.
                self._losses, self._slow = losses, math.inf
                late = self._gather.waits_for()
                for peer in late:
                    peer.send(self._frame)
                self._node.hosts.hurry(peer.host for peer in late)


def ask_hosts(places: Sequence[ActorMeshLike], service: Callable[P, R], *args: P.args, **named: P.kwargs) -> HostsAsked:
    """Ask one process of each host for a service that may be asked twice with the same result.

    Args:
        places: meshes of one actor each, on different hosts.
        service: the service.
        args: its arguments, the same for all.
        named: its arguments by name.
    """
    peers = [targets_of(place).peers[0] for place in places]
    return HostsAsked(node_of(places[0]), state_of(places[0]).name, peers, request(service, *args, **named))
