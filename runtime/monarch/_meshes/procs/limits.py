"""A check for enough file descriptors, before processes are started."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from monarch._meshes.procs.agents import agents_of
from monarch._procs.os.memory_limit import check_memory
from monarch._wire.descriptors import AGENT_NEED, RESERVE, limit_of, remedy, reserve, used_by
from monarch.exceptions import LimitError

if TYPE_CHECKING:
    from monarch._node.node import Node

OWNER_NEED = 3
"""Descriptors that a rank on the same host takes in its owner: a socket, its wake-up, a connection."""
_SESSION = 64
"""The least limit with which a session can start at all."""
_AGENT = 45
"""Descriptors of a host agent without ranks, its reserve included."""


def check_session() -> None:
    """Raise LimitError if this process has too few descriptors, or too little memory, for a session."""
    check_memory()
    limit, free = limit_of(), reserve.free()
    if limit < _SESSION or free < _SESSION // 2:
        raise LimitError(
            f"cannot start a session: it takes a limit of at least {_SESSION} file descriptors, and {_SESSION // 2} "
            f"that are free; this process has a limit of {limit}, and {max(0, free)} free. Raise the limit: "
            f"{remedy(limit - free + _SESSION)}",
            limit=limit,
            need=_SESSION // 2,
            free=free,
        )


def check_room(node: Node, counts: Mapping[str, int]) -> None:
    """Raise LimitError if this process, or the agent of its host, has no room for more ranks.

    Agents of other hosts check for themselves.

    Args:
        node: the node of this process.
        counts: the number of ranks to start, by host id.
    """
    count = counts.get(node.host, 0)
    if not count:
        return
    coming = sum(1 for peer in list(node.peers.known.values()) if peer.starting and peer.host == node.host)
    rooms = [_Room("this program", OWNER_NEED, limit_of(), reserve.free() - RESERVE - coming * OWNER_NEED)]
    pid = _agent_of(node)
    # The agent may have just died or hide its descriptors; it also checks for itself.
    with suppress(OSError):
        limit = limit_of(pid or None)
        used = used_by(pid) if pid else 0
        rooms.append(_Room("the agent of this host", AGENT_NEED, limit, limit - max(used, _AGENT)))
    full = [room for room in rooms if count * room.each > room.free]
    if full:
        most = max(0, min(room.free // room.each for room in rooms))
        total = max(room.limit - room.free + count * room.each for room in rooms)
        who, each, limit, free = full[0]
        raise LimitError(
            f"cannot start {count} processes on this host: {who} needs {count * each} more file descriptors for them, "
            f"but only {max(0, free)} of its {limit} are free. Start at most {most}, or raise the limit before "
            f"the program starts: {remedy(total)}",
            limit=limit,
            need=count * each,
            free=max(0, free),
        )


class _Room(NamedTuple):
    who: str
    each: int
    """Descriptors that one rank takes."""
    limit: int
    free: int


def _agent_of(node: Node) -> int:
    """Return the pid of the agent of this host; 0 if none runs."""
    if node.config is not None:
        return os.getppid()
    return agents_of(node).agent_pid
