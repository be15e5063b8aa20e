"""The connection to another host, and what stands for it while messages go by another one."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from threading import Event
from typing import TYPE_CHECKING, Any

from monarch._procs.session_folder import host_of
from monarch._wire.links import Link
from monarch._wire.messages import Cast, Down, Route, encode

if TYPE_CHECKING:
    from monarch._node.spreads.spreads import Spreads


class RelayedLink:
    """The way to a host that has no connection to this process: by another one, its parent, that has."""

    __slots__ = ("_host", "parent")

    def __init__(self, host: str, parent: Gateway) -> None:
        self._host = host
        self.parent = parent

    def send(self, frame: bytes, more: Sequence[Any] = ()) -> None:
        """Send a message; it is lost if the parent is."""
        self.parent.link.send(encode(Down(self._host, 1 + len(more))), [frame, *more])

    def close(self, linger_ms: int = 0) -> None:
        """Do nothing: the connection is the parent's."""


class Gateway:
    """The connection to another host: through its agent, or for a rank through its own agent."""

    def __init__(self, link: Link | RelayedLink, agent: str, direct: bool) -> None:
        self.link: Link | RelayedLink = link
        """Replaced under the lock of ``spreads``, by the leader."""
        self.host = host_of(agent)
        self._agent = agent
        self._direct = direct
        self.closed = Event()
        self.spreads: Spreads | None = None
        """Sends in the order of numbers, with messages that come by way of other hosts; None without numbers. Set
        once."""
        self.group = 0
        """Of the hosts by way of which it gets messages; written by the threads that attach hosts, one at a time."""
        # The next six: under the lock of ``spreads``; ``arrived`` is written by the leader alone.
        self.last = 0
        """Number of the last message."""
        self.arrived = 0
        """Number up to which the agent has all messages, as far as is known here."""
        self.due = 0
        """Number up to which it must have all messages before others go by way of it, or come to it by others."""
        self.settled = 0.0
        """When messages to it may go by way of other hosts."""
        self.relay = ""
        """The host by way of which it got the last message that did not come straight."""
        self.heard: list[int] = []
        """Numbers of answers that have arrived from there, and of which its agent does not know it."""
        self.keeps = False
        """Whether messages to it alone are kept until they have arrived: they may be lost on their way."""
        self.kept: deque[Any] = deque()
        """Those messages, in order."""
        self.spare: Link | None = None
        """Another connection, while large messages are on their way to a host that has none."""

    def route(self, proc: str, frames: Sequence[Any]) -> None:
        """Send to one proc, or to the agent itself."""
        if not (self._direct and proc == self._agent):
            frames = [encode(Route(proc, len(frames))), *frames]
        self._send(frames)

    def cast(self, src: str, procs: list[str], port: int, frames: Sequence[Any]) -> None:
        """Send one message to many procs of the host; their replies arrive as one batch."""
        frames = [encode(Cast(src, procs, port, len(frames))), *frames]
        self._send(frames if self._direct else [encode(Route(self._agent, len(frames))), *frames])

    def _send(self, frames: Sequence[Any]) -> None:
        if self.spreads is None:
            self.link.send(frames[0], frames[1:])
        else:
            self.spreads.send(self, frames)

    @property
    def parent(self) -> Gateway | None:
        """The host by which all messages go; None if there is a connection."""
        return self.link.parent if isinstance(self.link, RelayedLink) else None

    def close(self, linger_ms: int = 0) -> None:
        """Close the link to the host's agent."""
        self.link.close(linger_ms)
        spare = self.spare
        if spare is not None:
            spare.close(linger_ms)
        self.closed.set()
