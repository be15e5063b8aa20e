"""Service request messages."""

from __future__ import annotations

from monarch._node.node_like import NodeLike
from monarch._node.services.registry import Request
from monarch._wire import messages as m
from monarch._wire.pickling import dumps_whole


def ask_frame(node: NodeLike, asked: Request, port: int, view: bytes = b"") -> bytes:
    """Return the request message for a service, for one or more processes.

    Args:
        node: of this process.
        asked: the service with its arguments.
        port: the port for the answer; 0 for none.
        view: the packed view whose positions the answers name.
    """
    return m.encode(m.Ask(node.proc, port, view, asked.name, dumps_whole(asked.args)))
