"""Ports: one-way channels whose sending ends can travel in messages."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar
from weakref import ref

from monarch._actors.running import current
from monarch._node.current import node_for, open_node
from monarch._node.future import Future, Promise
from monarch._node.node import Node
from monarch._node.remote_errors import exception_of, pack_failure, unpack_failure
from monarch._procs.session_folder import host_of
from monarch._wire import messages as m
from monarch._wire.pickling import ATOMS, dumps
from monarch.exceptions import ActorError, MonarchError, StoppedError

T = TypeVar("T")

RANKED = -1
"""Stands for the rank of the sending actor."""


class Port(Generic[T]):
    """The sending end of a channel. It can be pickled and used in any process of the session."""

    __slots__ = ("_node", "_port", "_proc", "_rank", "return_undeliverable")

    def __init__(self, node: Node, proc: str, port: int, rank: int = 0) -> None:
        self._node = node
        self._proc = proc
        self._port = port
        self._rank = rank
        self.return_undeliverable: bool = True

    @property
    def number(self) -> int:
        """The number of the port, unique in the process that receives."""
        return self._port

    def send(self, value: T) -> None:
        """Send a value. Values of one sender arrive in order.

        Raises:
            SerializationError: the value cannot be pickled.
        """
        body, buffers = dumps(value, "", lambda: [self._proc])
        self._send(m.RESULT, body, buffers)

    def exception(self, error: Exception) -> None:
        """Send an exception, which ``recv`` raises."""
        self._send(m.ERROR, pack_failure(error))

    def _send(self, status: int, body: bytes, buffers: Sequence[memoryview] = (), rank: int | None = None) -> None:
        rank = self._rank if rank is None else rank
        if rank == RANKED:
            here = current.get()
            rank = here[0].rank if here is not None else 0
        node = self._node
        if node.closed:
            raise StoppedError(f"{self!r} can no longer be used: {node.ended}")
        node.replies.send(self._proc, self._port, rank, status, body, buffers)

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (self._node.origin, self._proc, self._port, self._rank)

    def __repr__(self) -> str:
        return f"<Port {self._port} of {self._proc}>"


ATOMS.add(Port)


def answer(port: Port[Any], status: int, body: bytes, buffers: Sequence[memoryview], rank: int) -> None:
    """Send an answer that is pickled already, in the name of a rank."""
    port._send(status, body, buffers, rank)  # pyright: ignore[reportPrivateUsage]


class ReplyPort(Port[Any]):
    """The response port of an endpoint with ``explicit_response_port``.

    Dropping it without an answer is an error, since the caller would wait forever.
    """

    __slots__ = ("_label", "_used")

    def __init__(self, node: Node, proc: str, port: int, rank: int, label: str) -> None:
        super().__init__(node, proc, port, rank)
        self._label = label
        # Nobody waits for the answer to a broadcast.
        self._used = not port

    def _send(self, status: int, body: bytes, buffers: Sequence[memoryview] = (), rank: int | None = None) -> None:
        self._used = True
        if self._port:
            super()._send(status, body, buffers, rank)

    def __reduce__(self) -> tuple[Any, ...]:
        # From now on others may answer.
        self._used = True
        return super().__reduce__()

    def __del__(self) -> None:
        if not self._used:
            # Garbage collection may run this under any lock, so it only notes what to send later.
            self._node.bulk.deferred.append(
                partial(_no_answer, self._node, self._label, self._proc, self._port, self._rank)
            )


def _no_answer(node: Node, label: str, proc: str, port: int, rank: int) -> None:
    error = MonarchError(f"{label} dropped its response port without a reply")
    node.replies.send(proc, port, rank, m.ERROR, pack_failure(error, True))


def _received(origin: str, proc: str, port: int, rank: int) -> Port[Any]:
    """Return a port that arrived in a message; raise SerializationError outside its session."""
    return Port(node_for("a port", origin, (host_of(proc),)), proc, port, rank)


class ChannelEntry:
    """The entry of a receiver in the table of ports, which does not keep it alive unless a ``recv`` waits."""

    __slots__ = ("_receiver", "waited_for")

    def __init__(self, receiver: PortReceiver[Any]) -> None:
        self._receiver = ref(receiver)
        self.waited_for: PortReceiver[Any] | None = None
        """The receiver while a ``recv`` waits. Lock: ``peers.lock``."""

    def reply(self, reply: m.Reply, frames: Sequence[bytes]) -> None:
        """Pass a value on; a dropped receiver has no reader left."""
        receiver = self._receiver()
        if receiver is not None:
            receiver.reply(reply, frames)

    def end_session(self) -> None:
        """Let waiting ``recv`` calls fail."""
        receiver = self._receiver()
        if receiver is not None:
            receiver.end_session()


class _Reception(Promise[Any]):
    """A future of a value that arrives. If it is dropped unread, as after a timeout, the next one gets the value."""

    __slots__ = ("_is_watched", "_unread")

    def __init__(self, node: Node) -> None:
        super().__init__(node, "recv()")
        self._unread: tuple[PortReceiver[Any], m.Reply, Sequence[bytes]] | None = None
        """The value and where it comes from: set by the thread that completes this, cleared by the reader."""
        self._is_watched = False
        """Whether a function of the user gets this future."""

    def take(self, receiver: PortReceiver[Any], reply: m.Reply, frames: Sequence[bytes]) -> None:
        """Take the value that has arrived."""
        self._unread = receiver, reply, frames
        self.complete(lambda: receiver.value_of(reply, frames))

    def add_done_callback(self, callback: Callable[[Future[Any]], None]) -> None:
        self._is_watched = True
        super().add_done_callback(callback)

    def _make(self) -> Any:
        try:
            value = super()._make()
        except KeyboardInterrupt:
            # The next reader reads it again.
            raise
        except BaseException:
            self._unread = None
            raise
        self._unread = None
        return value

    def __del__(self) -> None:
        if self._unread is not None and not self._is_watched:
            receiver, reply, frames = self._unread
            receiver.give_back(reply, frames)


_SESSION_OVER = "belongs to a session that was shut down"
"""Why a receiver is closed."""


class PortReceiver(Generic[T]):
    """The receiving end of a channel. Dropping it closes the channel, unless a ``recv`` waits."""

    def __init__(self, node: Node, once: bool, ranked: bool) -> None:
        self._node = node
        self._once = once
        self._ranked = ranked
        self._arrived: deque[tuple[m.Reply, Sequence[bytes]]] = deque()
        """Values that nobody waits for yet. Lock: ``peers.lock``."""
        self._returned: deque[tuple[m.Reply, Sequence[bytes]]] = deque()
        """Values whose futures were dropped unread. Added without the lock, also by garbage collection."""
        self._waiting: deque[_Reception] = deque()
        """Futures of values to come. Lock: ``peers.lock``."""
        self._closed = ""
        """Why nothing more arrives; empty while values may. Lock: ``peers.lock``."""
        self._entry = ChannelEntry(self)
        self.port: int = node.ports.open(self._entry)
        node.part(OpenReceivers)

    def __del__(self) -> None:
        if not self._closed and hasattr(self, "port"):
            # Garbage collection may run this under any lock, so the port is closed later.
            self._node.bulk.deferred.append(partial(self._node.ports.close, self.port))

    def reply(self, reply: m.Reply, frames: Sequence[bytes]) -> None:
        """Take an arriving value."""
        if self._once:
            # Outside the lock: listeners to the end of a port may write to a user's stream.
            self._node.ports.close(self.port)
        with self._node.peers.lock:
            waiting = self._waiting.popleft() if self._waiting else None
            if waiting is None:
                self._arrived.append((reply, frames))
            if not self._waiting:
                self._entry.waited_for = None
        if self._once:
            self._end("has received the only value of its channel")
        if waiting is not None:
            waiting.take(self, reply, frames)
            # If nobody has it any more, that returns the value.
            del waiting
            self._pass_on()

    def give_back(self, reply: m.Reply, frames: Sequence[bytes]) -> None:
        """Take back a value that was never read; garbage collection may call this under any lock."""
        self._returned.append((reply, frames))
        if self._waiting:
            self._node.receive_loop.post(self._pass_on)

    def _pass_on(self) -> None:
        """Give values that were not read to futures that wait, or else to those to come."""
        while self._returned:
            with self._node.peers.lock:
                if not self._waiting:
                    # Before those that have arrived since.
                    while self._returned:
                        self._arrived.appendleft(self._returned.pop())
                if not self._returned:
                    # Here, or by another thread meanwhile.
                    return
                waiting, value = self._waiting.popleft(), self._returned.popleft()
                if not self._waiting:
                    self._entry.waited_for = None
            waiting.take(self, *value)
            del waiting

    def recv(self) -> Future[T]:
        """Return a future of the next value, in order of arrival. It raises an exception that was sent.

        The future raises StoppedError if no values are left and the receiver is closed or had its only value. If it is
        dropped before it was read, as after a timeout, the value goes to the next one.
        """
        promise = _Reception(self._node)
        self._pass_on()
        with self._node.peers.lock:
            arrived = self._arrived.popleft() if self._arrived else None
            if arrived is None and not self._closed and self._node.closed:
                self._closed = _SESSION_OVER
            if arrived is None and not self._closed:
                self._waiting.append(promise)
                self._entry.waited_for = self
        if arrived is not None:
            promise.take(self, *arrived)
        elif self._closed:
            promise.complete(self._fail)
        else:
            # A value may have been given back before this one waited.
            self._pass_on()
        return promise

    def end_session(self) -> None:
        """Let waiting ``recv`` calls fail, as nothing more arrives."""
        self._end(_SESSION_OVER)

    def ranked(self) -> PortReceiver[tuple[int, T]]:
        """Return the same receiver, but with pairs of the sender's rank and the value."""
        self._ranked = True
        # The same object, with another type of values.
        return self  # pyright: ignore[reportReturnType]

    def close(self) -> None:
        """Take no more values; waiting ``recv`` calls raise StoppedError."""
        self._node.ports.close(self.port)
        self._end("was closed")

    def _end(self, why: str) -> None:
        with self._node.peers.lock:
            self._closed = self._closed or why
            waiting, self._waiting = self._waiting, deque()
            self._entry.waited_for = None
        for each in waiting:
            each.complete(self._fail)

    def _fail(self) -> Any:
        raise StoppedError(f"recv() cannot return: the receiver {self._closed}; open a new channel")

    def value_of(self, reply: m.Reply, frames: Sequence[bytes]) -> Any:
        if reply.status == m.ERROR:
            failure = unpack_failure(reply.body)
            reason = f"{failure.kind}: {failure.text}"
            raise exception_of(failure) or ActorError(f"{reason}\n{failure.trace}", reason=reason)
        value = self._node.bulk.load(reply, frames)
        return (reply.rank, value) if self._ranked else value


class OpenReceivers:
    """Ends the receivers of a process with its session."""

    def __init__(self, node: Node) -> None:
        self._node = node
        node.events.closing.subscribe(self._end)

    def _end(self) -> None:
        for entry in list(self._node.ports.sinks.values()):
            if isinstance(entry, ChannelEntry):
                entry.end_session()


class Channel(Generic[T]):
    """A factory of ports."""

    @classmethod
    def open(cls, once: bool = False) -> tuple[Port[T], PortReceiver[T]]:
        """Return a port and its receiver. With ``once``, the channel carries one value."""
        node = open_node()
        # Closes the ports of dropped receivers; a program that only opens channels has no other place for that.
        node.bulk.settle()
        receiver: PortReceiver[T] = PortReceiver(node, once, False)
        return Port(node, node.proc, receiver.port), receiver

    @classmethod
    def open_ranked(cls, once: bool = False) -> tuple[Port[T], PortReceiver[tuple[int, T]]]:
        """Return a port and a receiver of pairs of the sender's rank and the value."""
        node = open_node()
        node.bulk.settle()
        receiver: PortReceiver[tuple[int, T]] = PortReceiver(node, once, True)
        return Port(node, node.proc, receiver.port, RANKED), receiver
