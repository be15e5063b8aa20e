"""Peers: the path to each other process, its backlog, and its death."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from monarch._core.flow import Window
from monarch._node.peers.gateway import Gateway
from monarch._procs.session_folder import host_of, ipc_address
from monarch._wire.links import Link
from monarch._wire.messages import Dead
from monarch._wire.pickling import SHARED

if TYPE_CHECKING:
    from threading import RLock

    import zmq

    from monarch._wire.receiving.loop import ReceiveLoop, Turn


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


class Peer:
    """Another process, or this one; ``send`` uses the only path to it."""

    __slots__ = ("dead", "hears", "host", "proc", "starting", "table", "thread", "window")

    def __init__(self, table: Table, proc: str) -> None:
        self.table = table
        self.proc = proc
        self.host = host_of(proc)
        # Set once, by the receiving thread or a thread that makes or forgets this peer; any thread reads it.
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
