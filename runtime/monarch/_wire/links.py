"""Sockets: one PULL for each process to receive on, one PUSH to each process that it sends to.

There is one fixed path from one process to another, and ZeroMQ keeps the order on it, so messages arrive in the order
sent. No socket has a high-water mark: nothing is dropped silently, and flow control above bounds memory.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections import deque
from collections.abc import Sequence
from threading import RLock, get_ident, main_thread

import zmq

from monarch._python.locks import is_owned
from monarch._wire.accepting import tolerate_full_table
from monarch._wire.deferred_signals import DeferredSignals
from monarch._wire.descriptors import limit_of, reserve
from monarch._wire.keys import KeyPair
from monarch._wire.options import TimeLimit, pending_in
from monarch._wire.split import PIECE, split
from monarch._wire.tcp import LEASE_S, over_network

RECONNECT_MS = 10
IPC_PATH_LIMIT = 107
_MAIN = main_thread().ident
_held = DeferredSignals(lambda: None)
"""Defers handlers of the main thread while it sends a message of several frames."""
_MORE = int(zmq.SNDMORE)


def make_context() -> zmq.Context[zmq.Socket[bytes]]:
    """Return a context for as many sockets as the process may have files."""
    tolerate_full_table()
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, min(65535, context.get(zmq.SOCKET_LIMIT)))
    return context


def _plain(socket: zmq.Socket[bytes]) -> None:
    socket.set_hwm(0)
    socket.set(zmq.LINGER, 0)


def _push(context: zmq.Context[zmq.Socket[bytes]], address: str) -> zmq.Socket[bytes]:
    """Create a PUSH socket, releasing the reserve if there is no other room."""
    for last in (False, True):
        try:
            return context.socket(zmq.PUSH)
        except zmq.ZMQError as error:
            if error.errno != errno.EMFILE:
                raise
            if last:
                raise OSError(
                    errno.EMFILE,
                    f"cannot connect to {address}: this process has all of its {limit_of()} file descriptors open; "
                    f"close unneeded files, or raise the limit with `ulimit -n`",
                ) from error
        reserve.give_up()
    raise AssertionError


def lasting(buffers: Sequence[bytes | memoryview]) -> list[zmq.Frame]:
    """Return copies of some memory that can be sent to many receivers without one more copy each."""
    return [zmq.Frame(buffer, copy=True) for buffer in buffers]


def shut_path(path: str) -> str:
    """Return the path of a socket file while its process accepts no new connections."""
    return f"{path}.full"


class Inbox:
    """The PULL socket of a process: bound to its own file, and to an inproc name to wake it by."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self.socket = context.socket(zmq.PULL)
        _plain(self.socket)
        # Leader only.
        self._limit = TimeLimit(self.socket)
        self.limit = self._limit.set
        """Make the next receive end with zmq.Again after some milliseconds; -1 for never. For the receiving thread."""
        self.pending = pending_in(self.socket)
        """Return something true if there is something to receive now; for the receiving thread."""
        self.address = address
        self._path = address.removeprefix("ipc://")
        # Leader only.
        self._shut = False
        self.binding = RLock()
        """Held while options are set for an address and it is bound."""
        try:
            self.socket.bind(address)
            inner = f"inproc://{address}"
            self.socket.bind(inner)
        except zmq.ZMQError:
            self.socket.close(0)
            raise
        self._waker = context.socket(zmq.PUSH)
        _plain(self._waker)
        self._waker.connect(inner)
        # Guards the two above and below; a __del__ that runs in the middle of a wake may wake as well.
        self._lock = RLock()
        self._closed = False

    def wake(self) -> None:
        """Make the receiving thread return with an empty frame. From any thread, but not from a signal handler."""
        with self._lock:
            if not self._closed:
                self._waker.send(b"")

    def tend(self) -> bool:
        """Maintain the file that others connect to; in the receiving thread.

        libzmq aborts a process that cannot accept a connection, so the file is hidden while descriptors are short. If
        somebody has removed it, such as a cleaner of /tmp, it is created again.

        Returns:
            Whether there are descriptors for new connections beyond the reserve, which is released otherwise.

        Raises:
            OSError: the file is missing and cannot be created.
        """
        room = reserve.keep()
        shut = not (room or tolerate_full_table())
        try:
            if self._shut != shut:
                source, target = (self._path, shut_path(self._path)) if shut else (shut_path(self._path), self._path)
                os.rename(source, target)
                self._shut = shut
            else:
                os.stat(shut_path(self._path) if self._shut else self._path)
        except FileNotFoundError:
            if not shut:
                self._shut = False
                self._bind_again()
        return room

    def _bind_again(self) -> None:
        """Listen at another file of the same name; existing connections stay."""
        with self.binding:
            # A tcp address of this socket may have been bound since: its options are not for ipc.
            self.socket.set(zmq.CURVE_SERVER, 0)
            self.socket.set(zmq.MAXMSGSIZE, -1)
            try:
                self.socket.bind(self.address)
            except zmq.ZMQError as error:
                raise OSError(error.errno, f"cannot listen at {self._path}: {error.strerror}") from error

    def touch(self) -> None:
        """Mark its file as in use, for cleaners of old files."""
        with contextlib.suppress(OSError):
            os.utime(self._path)

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when a message comes after ``pending`` or a receive has found
        none."""
        return int(self.socket.get(zmq.FD))

    def close(self) -> None:
        """Close it; only when no thread receives any more."""
        with self._lock:
            self._closed = True
            self._waker.close(0)
        self.socket.close(0)


class Link:
    """The PUSH socket to one process; any thread may send, also a __del__ or a handler in the middle of a send."""

    __slots__ = ("_added", "_closed", "_lock", "_pieces", "_send", "_socket", "address")

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        hello: bytes,
        keys: KeyPair | None = None,
        server: bytes | None = None,
        lease: float = LEASE_S,
        heartbeats: bool = True,
        hurries: bool = False,
    ) -> None:
        """Connect.

        Args:
            context: for the socket.
            address: the address of the process.
            hello: the first message.
            keys: the keys of this process, for tcp.
            server: public key of the other one, for tcp.
            lease: seconds of silence after which the other end counts as lost.
            heartbeats: as in ``over_network``.
            hurries: whether the connection is lost if it is not made within a lease, however long the kernel tries.
        """
        self.address = address
        # Guards everything below; one message is sent at a time.
        self._lock = RLock()
        self._added: deque[tuple[bytes, Sequence[bytes | memoryview]]] = deque()
        """Messages from code that ran in the middle of a send, in the same thread: sent next."""
        self._closed = False
        self._pieces = keys is not None
        socket = self._socket = _push(context, address)
        _plain(socket)
        socket.set(zmq.RECONNECT_IVL, RECONNECT_MS)
        if keys is not None and server is not None:
            socket.set(zmq.CURVE_SERVERKEY, server)
            socket.set(zmq.CURVE_PUBLICKEY, keys.public)
            socket.set(zmq.CURVE_SECRETKEY, keys.secret)
            over_network(socket, lease, heartbeats)
            if hurries:
                socket.set(zmq.CONNECT_TIMEOUT, max(1, int(lease * 1000)))
        # The core of zmq.Socket.send, without routing id and group.
        self._send = super(zmq.Socket, socket).send
        socket.connect(address)
        # ZeroMQ gives a connection to another protocol up, perhaps before this: a send would wait without end then.
        with contextlib.suppress(zmq.Again):
            socket.send(hello, zmq.DONTWAIT)

    def send(self, frame: bytes, more: Sequence[bytes | memoryview] = ()) -> None:
        """Send a message; a closed link drops it, since its process is known to have ended."""
        if self._pieces and (more or len(frame) > PIECE) and (pieces := split([frame, *more])) is not None:
            frame, more = pieces[0], pieces[1:]
        lock = self._lock
        if not more and not is_owned(lock):
            # The common case, one frame: same as below without the calls.
            try:
                with lock:
                    if self._added:
                        self._send_added()
                    if not self._closed:
                        self._send(frame)
            finally:
                while self._added:
                    with lock:
                        self._send_added()
            return
        if not more or get_ident() != _MAIN:
            self._send_or_add(frame, more)
            return
        # An exception from a signal handler would leave half a message, which the next one would complete.
        held = _held.begin()
        try:
            self._send_or_add(frame, more)
        finally:
            _held.end_and_run(held)

    def offer(self, frame: bytes) -> None:
        """Send a message of one frame, unless ZeroMQ has given the connection up, as to what speaks another protocol.

        There, a send would wait without a bound.
        """
        with self._lock, contextlib.suppress(zmq.Again):
            if not self._closed:
                self._socket.send(frame, zmq.NOBLOCK)

    def _send_or_add(self, frame: bytes, more: Sequence[bytes | memoryview]) -> None:
        lock = self._lock
        if is_owned(lock):
            # Called by a __del__ or signal handler in the middle of a message of this thread: send it after that.
            self._added.append((frame, more))
            return
        try:
            with lock:
                if self._added:
                    self._send_added()
                self._send_now(frame, more)
        finally:
            while self._added:
                with lock:
                    self._send_added()

    def _send_added(self) -> None:
        while self._added:
            self._send_now(*self._added.popleft())

    def _send_now(self, frame: bytes, more: Sequence[bytes | memoryview]) -> None:
        """Hand a message to ZeroMQ, with the lock held."""
        if self._closed:
            return
        if not more:
            self._send(frame)
            return
        self._send(frame, _MORE)
        for part in more[:-1]:
            self._send(part, _MORE, len(part) < 65536)
        self._send(more[-1], 0, len(more[-1]) < 65536)

    def monitor(self) -> zmq.Socket[bytes]:
        """Return a socket that reports when the connection is lost; call this once."""
        return self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED)

    @property
    def closed(self) -> bool:
        """Whether it has been closed, to the end."""
        with self._lock:
            return self._closed

    def close(self, linger_ms: int = 0) -> None:
        """Close it, dropping messages not sent within the linger time."""
        with self._lock:
            if not self._closed:
                self._closed = True
                with contextlib.suppress(zmq.ZMQError):
                    self._socket.disable_monitor()
                self._socket.close(linger_ms)
