"""The answers of the ranks of a call, with a stand-in for those of dead ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, final

from monarch._core.roster import split_proc
from monarch._node.remote_errors import pack_failure, unpack_failure
from monarch._wire.messages import ERROR, STOPPED, Dead, Reply
from monarch.exceptions import ProtocolError

if TYPE_CHECKING:
    from monarch._node.peers.peer import Peer


_LINE = 200
"""Characters of the first line of an error in the events of a mesh."""


@final
class Lost:
    """Stands for the reply of a dead proc."""

    __slots__ = ("dead",)

    def __init__(self, dead: Dead) -> None:
        self.dead = dead


Answer = Reply | tuple[Reply, Sequence[bytes]] | Lost
"""The reply of an actor, with its buffers if it has any."""


def ranks_of_peers(peers: Iterable[Peer]) -> list[int]:
    """Return the rank of each process in its mesh."""
    return [split_proc(peer.proc)[1] for peer in peers]


def replaced(reply: Reply, targets: Sequence[Peer], label: str) -> Reply:
    """Turn a reply from a position outside the view into an error of its sender.

    Raises:
        ProtocolError: its sender is not a member.
    """
    places = [place for place, peer in enumerate(targets) if peer.proc == reply.src]
    what = f"{reply.src} answered {label} from position {reply.rank}; the call was sent to {len(targets)} ranks"
    if not places:
        raise ProtocolError(f"{what}, and {reply.src} is not one of them")
    status, body = reply.status, reply.body
    if status != ERROR:
        status, body = ERROR, pack_failure(ProtocolError(what), True)
    return Reply(reply.src, reply.port, places[0], status, reply.done, body)


_INTERRUPTS = ("KeyboardInterrupt", "asyncio.exceptions.CancelledError")


def failure_line(reply: Reply) -> tuple[str, bool]:
    """Return the first line of an error, and whether the call was only ended from outside."""
    if reply.status != ERROR:
        # It is the value of a cell, which only its reader unpickles.
        return ("stopped", True) if reply.status == STOPPED else ("see its output", False)
    failure = unpack_failure(reply.body)
    line = f"{failure.kind}: {failure.text}".partition("\n")[0][:_LINE]
    return line, failure.freed or failure.kind in _INTERRUPTS
