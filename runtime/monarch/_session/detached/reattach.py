"""Services of a rank of a detached mesh for the next program that becomes its controller."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from monarch._actors.table import actors_of
from monarch._node.current import current_node
from monarch._node.peers.gateway import Gateway
from monarch._node.services.registry import service
from monarch._procs.session_folder import host_of
from monarch._wire.pickle_sink import THRESHOLD
from monarch._wire.pickling import dumps, loads
from monarch.exceptions import StoppedError

_MOST = 64 << 20
"""The most bytes of an actor's arguments that are sent to another program."""
OF_PROGRAM = "monarch_of_program"
"""Method of actors that are of no use without the program that has made them; it counts what is lost with it."""


@service("reattach.adopt", "quick")
def adopt(root: str, former: list[str]) -> tuple[Any, list[str], int]:
    """Make another program the controller of this process.

    Args:
        root: proc id of the program.
        former: proc ids of its former controllers.

    Returns:
        The procs of its mesh, the keys of the actors here that the program now owns, and the number of tensors here
        that only a former one could name: see ``end_orphans``.
    """
    node = current_node()
    config = node.config
    assert config is not None
    gone = {*former}
    with node.peers.lock:
        known = node.peers.known.get(root)
        if known is not None and known.dead is not None:
            # It had lost its connection and is back.
            del node.peers.known[root]
    gateway = node.hosts.gateways.get(host_of(node.root))
    if node.root in gone and gateway is not None and host_of(root) not in node.hosts.gateways:
        # On the same path as before, so that later output does not overtake earlier output.
        node.hosts.gateways[host_of(root)] = Gateway(gateway.link, f"{host_of(root)}/agent", False)
    if node.root in gone:
        node.peers.root = root
    # The previous program takes no more output.
    node.events.controller_changed.tell()
    if config.root in gone:
        config.root = root
    if config.owner in gone:
        config.owner = config.procs.owner = root
    keys: list[str] = []
    lost = 0
    for actor in list(actors_of(node).here.values()):
        if actor.spec is None:
            continue
        if _is_orphan(actor, gone):
            lost += getattr(actor.instance, OF_PROGRAM, int)()
            continue
        if actor.spec.owner in gone:
            actor.spec.owner = root
        if actor.spec.owner == root:
            keys.append(actor.key)
    return config.procs, keys, lost


@service("reattach.end_orphans", "quick")
def end_orphans(former: list[str]) -> None:
    """End the actors here that are of no use without a former program, once another one is the controller.

    Args:
        former: proc ids of the former controllers.
    """
    for actor in list(actors_of(current_node()).here.values()):
        if _is_orphan(actor, {*former}):
            actor.halt("its program has ended, and no other one knows its tensors", lambda _: None)


def _is_orphan(actor: Any, gone: set[str]) -> bool:
    return actor.spec is not None and actor.spec.owner in gone and hasattr(actor.spec.cls, OF_PROGRAM)


@service("reattach.spec_of", "threaded")
def spec_of(key: str) -> tuple[bool, list[bytes], list[list[bytes]]]:
    """Return an actor's pickled spec and buffers in pieces, and whether its arguments are included."""
    cell = actors_of(current_node()).here.get(key)
    if cell is None or cell.spec is None:
        raise StoppedError(f"actor {key} was stopped in the meantime")
    body, buffers = dumps(cell.spec, cell.spec.name)
    whole = len(body) + sum(buffer.nbytes for buffer in buffers) <= _MOST
    if not whole:
        body, buffers = dumps(replace(cell.spec, args=(), kwargs={}), cell.spec.name)
    return whole, _pieces(memoryview(body)), [_pieces(buffer) for buffer in buffers]


def make_spec(pieces: list[bytes], buffers: list[list[bytes]]) -> Any:
    """Unpickle a spec.

    Raises:
        SerializationError: it cannot be unpickled here.
    """
    return loads(b"".join(pieces), [memoryview(bytearray(b"".join(each))) for each in buffers])


def _pieces(data: memoryview) -> list[bytes]:
    # Pieces small enough for the body of an answer.
    size = THRESHOLD // 2
    return [bytes(data[at : at + size]) for at in range(0, data.nbytes, size)]
