"""Room at receivers: a sender that is far ahead of one slows down here, for a bounded time."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from monarch._actors.running import ActorLike, current
from monarch._core.shapes.ranks import describe_ranks
from monarch._meshes.mesh_like import ActorMeshLike
from monarch._node import liveness
from monarch._node.liveness import Liveness
from monarch._node.node import Node
from monarch._node.services.frame import ask_frame
from monarch._node.services.registry import request
from monarch._wire.pickling import dumps
from monarch.exceptions import ArgumentError, SendTimeoutError

if TYPE_CHECKING:
    from monarch._node.peers import Peer

VARIABLE = "MONARCH_ROOM_TIMEOUT"
"""Environment variable for ROOM_S, in seconds."""
_ASK_EVERY_S = 1.0
"""Seconds between questions to a receiver without room for how far it is."""
_NOBODY = -1
"""A port that leads nowhere: of an answer to it, only the count of what was finished is wanted."""
_NOTHING = dumps(())[0]


def room_timeout(value: str | None) -> float:
    """Return the seconds that a text says; 60 for None. ArgumentError for what is no number above 0."""
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
"""Seconds for which a sender waits for a receiver that has no room and finishes nothing, before it gives up."""


def take_room(node: Node, peers: Sequence[Peer], cost: int, mesh: ActorMeshLike, method: str) -> None:
    """Reserve room for one message at each of its receivers, or at none.

    Raises:
        SendTimeoutError: a receiver had no room and finished nothing for ROOM_S.
    """
    while True:
        full = -1
        for position, peer in enumerate(peers):
            if not peer.window.take(cost):
                full = position
                break
        if full < 0:
            return
        # Nobody keeps room while waiting for room elsewhere: two such senders could wait for each other.
        for other in peers[:full]:
            other.give_back(cost)
        _wait(node, peers[full], full, len(peers), mesh, method)


def _wait(node: Node, peer: Peer, position: int, count: int, mesh: ActorMeshLike, method: str) -> None:
    """Wait until one receiver has room, or until an actor may do without."""
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
            raise _error(peer, position, count, mesh, method)
        if now - asked >= _ASK_EVERY_S:
            # Its answer says how far it is, also where it handles what needs no answer.
            asked = now
            peer.send(ask_frame(node, request(liveness.here), _NOBODY))


def _may_wait_for_us(mailbox: ActorLike, peer: Peer) -> bool:
    """Return whether the receiver may itself wait for room at this actor, so that a standstill has to end.

    A sender goes beyond the window so seldom that it is not far beyond if the receiver is only slow.
    """
    return bool(mailbox.queue) or peer.proc == peer.table.proc


def _error(peer: Peer, position: int, count: int, mesh: ActorMeshLike, method: str) -> SendTimeoutError:
    behind = peer.window.behind
    whom = f"{describe_ranks([position], count)} of {mesh._called}" if count > 1 else mesh._called
    silence = mesh._node.find_part(Liveness)
    why = silence.text(peer.proc) if silence is not None else ""
    return SendTimeoutError(
        f"{mesh._called}.{method}() was not sent to any rank: {whom} is {behind:,} messages behind and has finished "
        f"none for {ROOM_S:g} s{f' (it {why})' if why else ''}; wait for answers before you send more, or set "
        f"{VARIABLE} to more seconds",
        mesh=mesh._name,
        rank=position,
        behind=behind,
    )
