"""Backpressure: a sender far ahead of a receiver waits here, for a bounded time."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from monarch._actors.running import ActorLike, current
from monarch._core.roster import split_proc
from monarch._core.shapes.ranks import describe_ranks
from monarch._meshes.inside import called_of, node_of, state_of, title_of
from monarch._meshes.mesh_like import ActorMeshLike
from monarch._node import liveness
from monarch._node.liveness import Liveness
from monarch._node.node import Node
from monarch._node.services.frame import ask_frame
from monarch._node.services.registry import request
from monarch._wire.pickling import dumps_whole
from monarch.exceptions import ArgumentError, SendTimeoutError

if TYPE_CHECKING:
    from monarch._node.peers.peer import Peer

VARIABLE = "MONARCH_ROOM_TIMEOUT"
"""Environment variable for ROOM_S, in seconds."""
_ASK_EVERY_S = 1.0
"""Seconds between requests for progress to a receiver without room."""
_NOBODY = -1
"""A port that leads nowhere: only the count of finished messages in its answers matters."""
_NOTHING = dumps_whole(())


def room_timeout(value: str | None) -> float:
    """Parse seconds; 60 for None. Raise ArgumentError unless the value is a number above 0."""
    if value is None:
        return 60.0
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not seconds > 0:
        raise ArgumentError(f"{VARIABLE}: expected a number of seconds above 0, got {value!r}")
    return seconds


ROOM_S = room_timeout(os.environ.get(VARIABLE))
"""Seconds that a sender waits for a receiver that has no room and finishes nothing."""


def wait_for_room(node: Node, peers: Sequence[Peer], full: int, mesh: ActorMeshLike, method: str) -> None:
    """Wait until a receiver has room, or until an actor may continue without.

    None is reserved: two senders that hold some would wait for each other.

    Args:
        node: the node of this process.
        peers: all receivers.
        full: the place of the one without room.
        mesh: the addressed mesh, for errors.
        method: the endpoint, for errors.

    Raises:
        SendTimeoutError: it had no room and finished nothing for ROOM_S.
    """
    peer = peers[full]
    here = current.get()
    window = peer.window
    finished, begun = window.statistics().finished, time.monotonic()
    since = asked = begun
    while True:
        pause = min(_ASK_EVERY_S, ROOM_S, window.patience if here is not None else math.inf)
        if node.receive_loop.wait(peer, pause):
            return
        now = time.monotonic()
        if here is not None:
            node.output.idle()
            if now - begun >= window.patience and _may_wait_for_us(here[0], peer):
                window.go_beyond()
                return
        if window.statistics().finished != finished:
            finished, since = window.statistics().finished, now
        elif now - since >= ROOM_S:
            raise _error(peer, full, len(peers), mesh, method)
        if now - asked >= _ASK_EVERY_S:
            # The answer tells the receiver's progress even if its messages need no answers.
            asked = now
            peer.send(ask_frame(node, request(liveness.here), _NOBODY))


def _may_wait_for_us(mailbox: ActorLike, peer: Peer) -> bool:
    """Return whether the receiver may itself be waiting for room at this actor, which would be a deadlock.

    A sender exceeds the window so seldom that a receiver that is only slow is not overrun.
    """
    return bool(mailbox.queue) or peer.proc == peer.table.proc


def _error(peer: Peer, position: int, count: int, mesh: ActorMeshLike, method: str) -> SendTimeoutError:
    behind = peer.window.behind
    rank = split_proc(peer.proc)[1]
    receiver = f"{describe_ranks([rank])} of {state_of(mesh).name}" if count > 1 else called_of(mesh)
    silence = node_of(mesh).find_part(Liveness)
    why = silence.text(peer.proc) if silence is not None else ""
    return SendTimeoutError(
        f"{title_of(mesh, method)} was not sent to any rank: {receiver} is {behind:,} messages behind "
        f"(large ones count several times) and has finished none for {ROOM_S:g} s{f' (it {why})' if why else ''}; "
        f"wait for answers before you send more, or raise {VARIABLE} (seconds)",
        mesh=state_of(mesh).name,
        rank=position,
        behind=behind,
    )
