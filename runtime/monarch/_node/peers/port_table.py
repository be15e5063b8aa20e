"""Ports: the numbers that replies are sent to, and their sinks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count, islice
from typing import TYPE_CHECKING, Any, Protocol

from monarch._core.events import Event
from monarch._core.kinds import is_dict
from monarch._wire import messages as m
from monarch._wire.receiving.aside import tell_error

if TYPE_CHECKING:
    from monarch._node.peers.peer import Peer

_OLDEST = 256
"""The most calls searched for unresponsive ranks, to stay cheap with many pending calls."""


class ReplySink(Protocol):
    """Receives the replies of a port."""

    def reply(self, reply: m.Reply, frames: Sequence[Any], /) -> None: ...


class PortTable:
    """The open ports of a process.

    The dicts and the set change by single operations, which are atomic, so that they need no lock; readers copy them
    first.
    """

    def __init__(self) -> None:
        self.sinks: dict[int, ReplySink] = {}
        self.gathers: dict[int, Any] = {}
        """Those of the sinks that wait for peers."""
        self.last = 0
        """The port that was opened last."""
        self.opened: Event[[int]] = Event(tell_error)
        """A call has its port, and is not sent yet."""
        self.closed: Event[[int]] = Event(tell_error)
        """A port that is followed was closed."""
        self._followed: set[int] = set()
        self._next = count(1).__next__

    def open(self, sink: Any) -> int:
        """Return a new port whose replies go to a sink."""
        if hasattr(sink, "lost"):
            return self.open_call(sink)
        port = self.last = self._next()
        self.sinks[port] = sink
        return port

    def open_call(self, call: Any) -> int:
        """Return a new port for a call that waits for peers, and give it to the call."""
        # First the attribute: other threads find the call in the dicts.
        call.port = port = self.last = self._next()
        self.gathers[port] = call
        self.sinks[port] = call
        if self.opened.subscribers:
            self.opened.tell(port)
        return port

    def close(self, port: int) -> None:
        """Drop all replies to a port from now on."""
        self.sinks.pop(port, None)
        self.gathers.pop(port, None)
        if port in self._followed:
            self._followed.discard(port)
            self.closed.tell(port)

    def pass_on(self, port: int, call: Any) -> None:
        """Give a port to the rest of its call, in its place among the calls, and tell the followers that it ends."""
        self.gathers[port] = call
        self.sinks[port] = call
        if port in self._followed:
            self._followed.discard(port)
            self.closed.tell(port)

    def follow(self, port: int) -> bool:
        """Tell the subscribers of ``closed`` when a port is closed; return False if it is closed already."""
        self._followed.add(port)
        if port in self.sinks:
            return True
        self._followed.discard(port)
        return False

    def lose(self, peer: Peer, dead: m.Dead) -> list[str]:
        """Fail the calls that wait for a peer; return their labels."""
        return [gather.label for gather in list(self.gathers.values()) if gather.lost(peer, dead)]

    def lose_all(self, reason: m.Dead) -> None:
        """Fail every pending call."""
        for gather in list(self.gathers.values()):
            for peer in {*(gather.targets.values() if is_dict(gather.targets) else gather.targets)}:
                gather.lost(peer, reason)

    def fail_calls(self, uid: str, key: str, why: str, latest: int) -> int:
        """Fail pending calls to a mesh, or to its actors with a key; return how many.

        Args:
            uid: the uid of the mesh.
            key: the key of the actors; empty for all.
            why: for their errors.
            latest: the last affected port. Calls made after the failure was caught continue.
        """
        affected = [gather for port, gather in list(self.gathers.items()) if port <= latest and hasattr(gather, "fail")]
        return sum(gather.fail(uid, key, why) for gather in affected)

    def oldest_call_of(self, proc: str) -> int:
        """Return the port of the oldest call that waits for a proc, the one that runs there; 0 if none does."""
        for port, gather in list(self.gathers.items()):
            if hasattr(gather, "waits_for") and any(peer.proc == proc for peer in gather.waits_for()):
                return port
        return 0

    def waited_for(self, latest: int) -> set[str]:
        """Return the proc ids that the oldest calls wait for; an unresponsive one delays one of these.

        Args:
            latest: the port of the last call that counts.
        """
        oldest = islice(list(self.gathers.items()), _OLDEST)
        waiting = [gather for port, gather in oldest if port <= latest and hasattr(gather, "waits_for")]
        return {peer.proc for gather in waiting for peer in gather.waits_for() if peer.dead is None}
