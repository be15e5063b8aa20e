"""Peers: the path to each other process, its backlog, and its death."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from threading import Event
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from monarch._core.flow import WINDOW, Window
from monarch._core.shapes.region import Region
from monarch._procs.session_folder import host_of, ipc_address
from monarch._wire.links import Link
from monarch._wire.messages import Cast, Dead, Down, Route, encode, pack
from monarch._wire.pickling import SHARED

if TYPE_CHECKING:
    from threading import RLock

    import zmq

    from monarch._node.spreads import Spreads
    from monarch._wire.receiving.loop import ReceiveLoop, Turn

__all__ = ["WINDOW", "Gateway", "IpcPeer", "LocalPeer", "Peer", "RemotePeer", "Shape", "Targets", "cost_of"]


def cost_of(body: bytes, buffers: Sequence[memoryview]) -> int:
    """Return the cost of a message in its sender's window. Large buffers count less: their memory is bounded too."""
    cost = 1 + (len(body) >> 12)
    if not buffers:
        return cost
    total = sum(buffer.nbytes for buffer in buffers)
    return cost + (total >> (16 if total >= SHARED else 12))


class Table(Protocol):
    """The table of a peer."""

    proc: str
    folder: str
    hello: bytes
    context: zmq.Context[zmq.Socket[bytes]]
    receive_loop: ReceiveLoop
    lock: RLock
    deliver: Callable[[bytes, Sequence[Any]], None]


class Gateways(Protocol):
    """The connections to other hosts."""

    def gateway(self, host: str) -> Gateway: ...


class Peer:
    """Another process, or this one; ``send`` uses the only path to it."""

    __slots__ = ("dead", "hears", "host", "proc", "starting", "table", "thread", "window")

    def __init__(self, table: Table, proc: str) -> None:
        self.table = table
        self.proc = proc
        self.host = host_of(proc)
        # Set once, by the receiving thread; any thread reads it.
        self.dead: Dead | None = None
        # Has a lock of its own.
        self.window = Window()
        self.hears: Callable[[int], bool] = self.window.heard
        """Takes a report in a reply; in the receiving thread. Returns whether to notify this peer."""
        # For threads that wait for room; the receive loop's lock.
        self.thread: Turn | None = None
        self.starting = False
        """Whether it has not reported ready yet. Set before it is shared, cleared by the leader."""

    @property
    def sent(self) -> int:
        """The total cost sent to it."""
        return self.window.sent

    @property
    def credit(self) -> float:
        """The total cost that may be sent to it now: the limit of its window."""
        return self.window.limit

    @property
    def done(self) -> bool:
        """Whether it has room for one more message; the receive loop asks this of all that threads wait for."""
        return self.window.has_room

    def finished(self, total: int) -> None:
        """Note the total cost of messages that it has finished."""
        if self.window.finished(total):
            self.table.receive_loop.notify(self)

    def give_back(self, cost: int) -> None:
        """Give back room reserved for a message."""
        if self.window.give_back(cost):
            self.table.receive_loop.notify(self)

    def send(self, frame: bytes, more: Sequence[Any] = ()) -> None:
        """Send a message, whatever the window."""
        raise NotImplementedError

    def ready(self) -> None:
        """Note that it listens."""
        self.starting = False

    def end(self, dead: Dead) -> None:
        """Note its death: nothing more is sent."""
        self.dead = dead
        self.window.open()
        self.starting = False
        self.table.receive_loop.notify(self)


class LocalPeer(Peer):
    """This process itself."""

    __slots__ = ()

    def __init__(self, table: Table, proc: str) -> None:
        super().__init__(table, proc)
        # Its replies are handled in the threads that send them.
        self.hears = self.window.finished

    def send(self, frame: bytes, more: Sequence[Any] = ()) -> None:
        # Copy the buffers, since the actor may write to them while they are being sent to others.
        self.table.deliver(frame, [memoryview(bytearray(part)) for part in more])


class GonePeer(Peer):
    """A process that was gone or unreachable before anything was sent to it."""

    __slots__ = ()

    def __init__(self, table: Table, proc: str, dead: Dead | None = None) -> None:
        super().__init__(table, proc)
        self.dead = dead

    def send(self, frame: bytes, more: Sequence[Any] = ()) -> None:
        """Drop the message; ``dead`` tells callers why."""


class IpcPeer(Peer):
    """A process of the same host; one that is starting is connected when it listens."""

    __slots__ = ("_early", "_link", "send")

    def __init__(self, table: Table, proc: str, starting: bool = False) -> None:
        super().__init__(table, proc)
        # Both: written under table.lock, by the leader except for messages that are added. Connecting before it
        # listens would cost the pause of a retry.
        self._early: deque[tuple[bytes, Sequence[Any]]] | None = deque() if starting else None
        self._link: Link | None = None if starting else self._connect()
        # That of the link while there is one: a call less for each message. Written with ``_link``.
        self.send: Any = self._send if self._link is None else self._link.send

    def _connect(self) -> Link:
        table = self.table
        return Link(table.context, ipc_address(table.folder, self.proc), table.hello)

    def _send(self, frame: bytes, more: Sequence[Any] = ()) -> None:
        link = self._link
        if link is None:
            with self.table.lock:
                if self._early is not None:
                    self._early.append((frame, more))
                    return
            link = self._link
            if link is None:
                return
        link.send(frame, more)

    def ready(self) -> None:
        self.starting = False
        if self._early is None:
            return
        link = self._connect()
        with self.table.lock:
            # Sends of a __del__ in the middle of this join the early ones, which keeps the order.
            while self._early:
                link.send(*self._early.popleft())
            self._link, self._early = link, None
            self.send = link.send

    def close(self, linger_ms: int) -> None:
        """Close the connection after its unsent messages, within a time."""
        if self._link is not None:
            self._link.close(linger_ms)

    def end(self, dead: Dead) -> None:
        super().end(dead)
        with self.table.lock:
            self._early = None
        if self._link is not None:
            self._link.close()
            self._link, self.send = None, self._send


class RemotePeer(Peer):
    """A process of another host; messages go through a gateway."""

    __slots__ = ("gateway",)

    def __init__(self, table: Table, proc: str, gateway: Gateway) -> None:
        super().__init__(table, proc)
        self.gateway = gateway

    def send(self, frame: bytes, more: Sequence[Any] = ()) -> None:
        self.gateway.route(self.proc, [frame, *more])


def only_peer(peers: dict[str, Peer], made: Peer) -> Peer:
    """Return the peer of a process, with the lock held: a __del__ that ran meanwhile may have made another."""
    peer = peers.setdefault(made.proc, made)
    if peer is not made and isinstance(made, IpcPeer):
        made.close(0)
    return peer


class HungLink:
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

    def __init__(self, link: Link | HungLink, agent: str, direct: bool) -> None:
        self.link: Link | HungLink = link
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
        return self.link.parent if isinstance(self.link, HungLink) else None

    def close(self, linger_ms: int = 0) -> None:
        """Close the link to the host's agent."""
        self.link.close(linger_ms)
        spare = self.spare
        if spare is not None:
            spare.close(linger_ms)
        self.closed.set()


class Shape(NamedTuple):
    """The ranks of a view, as one object, so that readers see one state."""

    region: Region
    packed: bytes
    """The region for the wire."""

    @classmethod
    def of(cls, region: Region) -> Shape:
        """Return the shape of a region."""
        return cls(region, pack(region.pack()))


class Targets:
    """A snapshot of the members of a view: direct peers, and those of other hosts, by host.

    One snapshot determines everything about a call: its receivers, its view, the awaited answers. It is immutable.

    Args:
        shape: the shape of the view.
        version: the version of the roster that says which processes the members are.
    """

    __slots__ = ("extent", "far", "near", "peers", "shape", "version")

    def __init__(self, hosts: Gateways, peers: Iterable[Peer], shape: Shape, version: int) -> None:
        self.shape = shape
        self.extent = shape.region.extent
        self.version = version
        self.peers = list(peers)
        self.near: list[Peer] = []
        procs_of: dict[str, list[str]] = {}
        for peer in self.peers:
            if isinstance(peer, RemotePeer):
                procs_of.setdefault(peer.host, []).append(peer.proc)
            else:
                self.near.append(peer)
        self.far = [(hosts.gateway(host), procs) for host, procs in procs_of.items()]
