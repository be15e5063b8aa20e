"""What a rank of a kept mesh does when another program becomes its controller: it is asked for by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from monarch._actors.table import actors_of
from monarch._node.current import current_node
from monarch._node.peers import Gateway
from monarch._node.services.registry import service
from monarch._procs.session_folder import host_of
from monarch._wire.pickling import THRESHOLD, dumps, loads
from monarch.exceptions import StoppedError

_MOST = 64 << 20
"""Bytes of an actor's arguments that are sent to another program."""


@service("reattach.adopt", "quick")
def adopt(root: str, former: list[str]) -> tuple[Any, list[str]]:
    """This process belongs to another program from now on.

    Args:
        root: proc id of the program.
        former: proc ids of those that it belonged to.

    Returns:
        The procs of its mesh, and the keys of the actors here that the program owns now.
    """
    node = current_node()
    config = node.config
    assert config is not None
    gone = {*former}
    with node.peers.lock:
        known = node.peers.known.get(root)
        if known is not None and known.dead is not None:
            # It had lost its connection, and is back.
            del node.peers.known[root]
    way = node.hosts.gateways.get(host_of(node.root))
    if node.root in gone and way is not None and host_of(root) not in node.hosts.gateways:
        # By the same way as before, so that what was printed last does not overtake what was printed before.
        node.hosts.gateways[host_of(root)] = Gateway(way._link, f"{host_of(root)}/agent", False)
    if node.root in gone:
        node.peers.root = root
    # What the program before has not taken, it never will.
    node.events.controller_changed.tell()
    if config.root in gone:
        config.root = root
    if config.owner in gone:
        config.owner = config.procs.owner = root
    mine: list[str] = []
    for cell in list(actors_of(node).here.values()):
        if cell.spec is not None:
            if cell.spec.owner in gone:
                cell.spec.owner = root
            if cell.spec.owner == root:
                mine.append(cell.key)
    return config.procs, mine


@service("reattach.spec_of", "threaded")
def spec_of(key: str) -> tuple[bool, list[bytes], list[list[bytes]]]:
    """What an actor here is made of: whether with its arguments, and in pieces its pickled spec and the buffers."""
    cell = actors_of(current_node()).here.get(key)
    if cell is None or cell.spec is None:
        raise StoppedError(f"actor {key} was stopped meanwhile")
    body, buffers = dumps(cell.spec, cell.spec.name)
    whole = len(body) + sum(buffer.nbytes for buffer in buffers) <= _MOST
    if not whole:
        body, buffers = dumps(replace(cell.spec, args=(), kwargs={}), cell.spec.name)
    return whole, _pieces(memoryview(body)), [_pieces(buffer) for buffer in buffers]


def make_spec(pieces: list[bytes], buffers: list[list[bytes]]) -> Any:
    """Return the spec, where it has arrived.

    Raises:
        SerializationError: it cannot be unpickled here.
    """
    return loads(b"".join(pieces), [memoryview(bytearray(b"".join(each))) for each in buffers])


def _pieces(data: memoryview) -> list[bytes]:
    # Small enough to stay in the body of an answer.
    size = THRESHOLD // 2
    return [bytes(data[at : at + size]) for at in range(0, data.nbytes, size)]
