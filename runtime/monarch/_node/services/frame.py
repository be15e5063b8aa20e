"""The message that asks for a service."""

from __future__ import annotations

from monarch._node.node_like import NodeLike
from monarch._node.services.registry import Request
from monarch._wire import messages as m
from monarch._wire.pickling import dumps


def ask_frame(node: NodeLike, asked: Request, port: int, view: bytes = b"") -> bytes:
    """Return the message that asks for a service, to be sent to one process or several.

    Args:
        node: of this process.
        asked: the service with its arguments.
        port: that waits for the answer; 0 if nobody does.
        view: packed, of the mesh whose positions the answers name.
    """
    return m.encode(m.Ask(node.proc, port, view, asked.name, dumps(asked.args)[0]))
