"""The node of this process; a program gets one when it opens its session."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from typing import cast

from monarch._node import opener
from monarch._node.node import Node
from monarch.exceptions import MonarchError, SerializationError, StoppedError

_lock = threading.RLock()
"""Held while a session is opened, so that two threads do not open two."""
_node: Node | None = None
"""Written under ``_lock``; read without it, since the assignment is atomic."""
_parent = 0
"""Pid of the process with the session, in a fork of it."""


def current_node() -> Node:
    """Return the node of this process; never open a session.

    Raises:
        StoppedError: the session was shut down.
        MonarchError: this process has no session, or is a fork of one that has.
    """
    node = _node
    if node is None or _is_over(node):
        raise _no_session()
    return node


def open_node() -> Node:
    """Return the node of this process; open a session if a program has none. For public entry points only."""
    node = _node
    if node is not None and not _is_over(node):
        return node
    with _lock:
        opened = _node is None or _is_over(_node)
        if opened:
            assert opener.opener is not None
            set_node(cast("Node", opener.opener()))
        assert _node is not None
        node = _node
    for hear in list(opener.on_opened) if opened else ():
        hear(node)
    return node


def node_for(what: str, origin: str, hosts: Iterable[str]) -> Node:
    """Return the node of this process for a reference that is unpickled here.

    Args:
        what: the reference, for errors, such as ``the mesh 'trainers'``.
        origin: a description of the session that it comes from.
        hosts: ids of the hosts that it leads to.

    Raises:
        SerializationError: this process is not in the session that the reference belongs to.
    """
    node = _node
    if node is None or _is_over(node):
        raise refusal(what, origin, str(_no_session()))
    # A rank does not know all hosts of its session; its agent does, and refuses other addresses.
    if node.config is None and not any(node.hosts.has_met(host) for host in hosts):
        raise refusal(what, origin, f"it is the controller of {node.origin}")
    return node


def refusal(what: str, origin: str, why: str) -> SerializationError:
    """Return the error of a reference that is unpickled outside its session."""
    return SerializationError(
        f"{what} belongs to {origin}, and cannot be used in process {os.getpid()}: {why}. Pass plain data to other "
        f"processes, call the mesh in its own session, or spawn a mesh here with this_host().spawn_procs()"
    )


def _no_session() -> MonarchError:
    pid = os.getpid()
    if _node is not None:
        return StoppedError(f"the session of process {pid} was shut down; this_host() opens a new one")
    if _parent:
        return MonarchError(
            f"process {pid} is a fork of process {_parent} and cannot use its session; this_host() opens one of its own"
        )
    return MonarchError(f"process {pid} has no session; this_host() opens one")


def _is_over(node: Node) -> bool:
    """Return whether a program may open another session; a rank that is ending never does."""
    return node.closed and node.config is None


def has_node() -> bool:
    """Return whether this process has an open node."""
    return _node is not None and not _node.closed


def is_fork() -> bool:
    """Return whether this process is a fork of one with a session, and has none of its own."""
    return bool(_left_behind) and not has_node()


def is_left_behind(node: Node) -> bool:
    """Return whether a node belongs to the process that this one is a fork of."""
    return node in _left_behind


def set_node(node: Node | None) -> None:
    """Set the node of this process."""
    global _node
    _node = node


def _after_fork() -> None:
    """Detach a fork of this process from the session, whose sockets and threads it lacks."""
    global _node, _lock, _parent
    _lock = threading.RLock()
    if _node is not None:
        # Kept alive, since closing or freeing it would affect the parent's sockets.
        _left_behind.append(_node)
        _node.disown(f"this process is a fork of process {os.getppid()}, and a fork cannot use its session")
        _node, _parent = None, os.getppid()


_left_behind: list[Node] = []
os.register_at_fork(after_in_child=_after_fork)
