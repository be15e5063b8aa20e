"""A TCP stream to memory of another process: the way that is always there, between any two hosts.

Whoever connects proves that it has the secret of the session, and the server proves the same, before any byte of
memory is read or written; the bytes themselves are not encrypted, as those of NCCL and gloo are not. A request is
answered by a thread of the owner, which needs Python's lock once for each request and not for the bytes.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy

from monarch._tensors.memory import Memory
from monarch._tensors.registry import Registry, Remote
from monarch._tensors.staging import host_view, read_bytes, write_bytes
from monarch._tensors.transport import Move, dropped, lost_meanwhile
from monarch.exceptions import TransferError

_NONCE = 32
_HANDSHAKE_SECONDS = 5.0
_REQUEST = struct.Struct("<BQQ")
"""What is to be done, the key of a piece, and how many spans follow: of each the first byte and how many, as int64."""
_SPAN = 16
_MOST = 1 << 20
"""Spans in one request."""
_READ, _WRITE = 1, 2
_ANSWER = struct.Struct("<B")
_FINE, _DROPPED, _BOUNDS = 0, 1, 2
_BUFFER = 4 << 20
_VECTOR = 512
"""Pieces in one system call."""


def _proof(secret: bytes, who: bytes, first: bytes, second: bytes) -> bytes:
    return hmac.digest(secret, who + first + second, hashlib.sha256)


class StreamServer:
    """Serves the memory of a registry.

    Args:
        registry: what may be read and written.
        secret: of the session.
        address: where to listen, at a free port.
    """

    def __init__(self, registry: Registry, secret: bytes, address: str) -> None:
        self._registry = registry
        self._secret = secret
        self._listener = socket.create_server((address, 0))
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._connections: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._closed = False
        threading.Thread(target=self._accept, name="monarch-stream", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                if self._closed:
                    connection.close()
                    return
                self._connections.add(connection)
            threading.Thread(target=self._serve, args=(connection,), name="monarch-stream", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            if self._greet(connection):
                while True:
                    request = _receive(connection, _REQUEST.size)
                    self._answer(connection, *_REQUEST.unpack(request))
        except (OSError, EOFError):
            # The other end is gone, or this one is closing.
            pass
        finally:
            with self._lock:
                self._connections.discard(connection)
            connection.close()

    def _greet(self, connection: socket.socket) -> bool:
        _tune(connection)
        connection.settimeout(_HANDSHAKE_SECONDS)
        mine = secrets.token_bytes(_NONCE)
        connection.sendall(mine)
        theirs = _receive(connection, _NONCE)
        proof = _receive(connection, hashlib.sha256().digest_size)
        if not hmac.compare_digest(bytes(proof), _proof(self._secret, b"client", mine, bytes(theirs))):
            return False
        connection.sendall(_proof(self._secret, b"server", bytes(theirs), mine))
        connection.settimeout(None)
        return True

    def _answer(self, connection: socket.socket, what: int, key: int, count: int) -> None:
        if count > _MOST:
            raise EOFError("this is no request")
        spans = numpy.frombuffer(_receive(connection, count * _SPAN), numpy.int64).reshape(-1, 2)
        memory = self._registry.get(key)
        status = _FINE
        if memory is None:
            status = _DROPPED
        elif (what == _WRITE and memory.readonly) or int(spans.min()) < 0 or int(spans.sum(1).max()) > memory.size:
            status = _BOUNDS
        connection.sendall(_ANSWER.pack(status))
        if memory is None or status != _FINE:
            return
        if what == _READ:
            _send(connection, memory, spans)
            return
        _take(connection, memory, spans)
        connection.sendall(_ANSWER.pack(_FINE if self._registry.get(key) is memory else _DROPPED))

    def close(self) -> None:
        """Serves nobody any more."""
        with self._lock:
            self._closed = True
            connections = list(self._connections)
        for each in [self._listener, *connections]:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self._listener.close()


class Stream:
    """The transport over TCP.

    Args:
        secret: of the session.
        find: asks the owner of some memory for the address of its StreamServer.
    """

    name = "stream"

    def __init__(self, secret: bytes, find: Callable[[Remote, float], tuple[str, int]]) -> None:
        self._secret = secret
        self._find = find
        self._idle: dict[str, list[socket.socket]] = {}
        self._lock = threading.Lock()

    def reason_against(self, remote: Remote, local_device: str) -> str:
        return ""

    def move(self, moves: Sequence[Move], writing: bool, timeout: float) -> None:
        remote = moves[0].remote
        connection, kept = self._connection(remote, timeout)
        # Of the whole, not of each piece of it that arrives.
        until = time.monotonic() + timeout
        moved = 0
        try:
            for each in moves:
                connection.settimeout(max(0.001, until - time.monotonic()))
                moved += self._write(connection, each) if writing else self._read(connection, each, until)
        except (OSError, EOFError) as error:
            connection.close()
            if kept and not moved:
                # It was closed while nobody used it; the owner may live all the same.
                self.forget(remote.proc)
                self.move(moves, writing, max(0.001, until - time.monotonic()))
                return
            why = (
                f"did not answer for {timeout:g} s" if isinstance(error, TimeoutError) else "has closed the connection"
            )
            raise lost_meanwhile(remote, writing, f"{remote.title} {why}") from None
        except BaseException:
            connection.close()
            raise
        with self._lock:
            self._idle.setdefault(remote.proc, []).append(connection)

    def _read(self, connection: socket.socket, move: Move, until: float) -> int:
        remote, local, spans = move.remote, move.local, move.rows
        for start in range(0, len(spans), _MOST):
            some = spans[start : start + _MOST]
            self._request(connection, _READ, remote, some)
            _take(connection, local, some[:, 1:], until)
        return move.size

    def _write(self, connection: socket.socket, move: Move) -> int:
        remote, local, spans = move.remote, move.local, move.rows
        for start in range(0, len(spans), _MOST):
            some = spans[start : start + _MOST]
            self._request(connection, _WRITE, remote, some)
            _send(connection, local, some[:, 1:])
            if _ANSWER.unpack(_receive(connection, _ANSWER.size))[0] != _FINE:
                raise lost_meanwhile(remote, True, f"{remote.title} has dropped the buffer")
        return move.size

    def _request(self, connection: socket.socket, what: int, remote: Remote, spans: numpy.ndarray) -> None:
        theirs = numpy.ascontiguousarray(spans[:, ::2] + [remote.offset, 0])
        connection.sendall(_REQUEST.pack(what, remote.key, len(theirs)) + theirs.tobytes())
        status = _ANSWER.unpack(_receive(connection, _ANSWER.size))[0]
        if status == _DROPPED:
            raise dropped(remote)
        if status == _BOUNDS:
            raise TransferError(f"{remote.title} does not let this range of the buffer be used", mesh=remote.proc)

    def _connection(self, remote: Remote, timeout: float) -> tuple[socket.socket, bool]:
        proc = remote.proc
        with self._lock:
            idle = self._idle.get(proc)
            if idle:
                return idle.pop(), True
        try:
            connection = socket.create_connection(self._find(remote, timeout), timeout)
        except OSError as error:
            raise TransferError(
                f"{remote.title} cannot be reached by TCP: {error.strerror or error}. Nothing was written", mesh=proc
            ) from error
        try:
            self._greet(connection)
        except (OSError, EOFError) as error:
            connection.close()
            raise TransferError(
                f"{remote.title} does not take this process for one of its session", mesh=proc
            ) from error
        return connection, False

    def _greet(self, connection: socket.socket) -> None:
        _tune(connection)
        theirs = bytes(_receive(connection, _NONCE))
        mine = secrets.token_bytes(_NONCE)
        connection.sendall(mine + _proof(self._secret, b"client", theirs, mine))
        proof = _receive(connection, hashlib.sha256().digest_size)
        if not hmac.compare_digest(bytes(proof), _proof(self._secret, b"server", mine, theirs)):
            raise EOFError("the other end does not have the secret of this session")

    def forget(self, proc: str) -> None:
        """Closes the connections to a process that nobody uses at the moment."""
        with self._lock:
            idle = self._idle.pop(proc, [])
        for each in idle:
            each.close()

    def close(self) -> None:
        """Closes what is not in use."""
        for proc in list(self._idle):
            self.forget(proc)


def _tune(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for which in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        with suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, which, _BUFFER)


def _send(connection: socket.socket, memory: Memory, spans: numpy.ndarray) -> None:
    """Sends parts of some memory, each a row of its first byte and how many."""
    if memory.device != "cpu":
        for offset, size in spans.tolist():
            for piece in read_bytes(memory, offset, size):
                connection.sendall(piece)
        return
    whole = host_view(memory.address, memory.size)
    for start in range(0, len(spans), _VECTOR):
        pieces = [whole[offset : offset + size] for offset, size in spans[start : start + _VECTOR].tolist()]
        if len(pieces) == 1:
            connection.sendall(pieces[0])
            continue
        while pieces:
            sent = connection.sendmsg(pieces)
            while pieces and sent >= len(pieces[0]):
                sent -= len(pieces.pop(0))
            if sent:
                pieces[0] = pieces[0][sent:]


def _take(connection: socket.socket, memory: Memory, spans: numpy.ndarray, until: float | None = None) -> None:
    """Receives parts of some memory."""
    for offset, size in spans.tolist():
        write_bytes(memory, offset, size, lambda view: _receive_into(connection, view, until))


def _receive(connection: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    _receive_into(connection, memoryview(data))
    return data


def _receive_into(connection: socket.socket, view: memoryview, until: float | None = None) -> None:
    while view:
        if until is not None:
            connection.settimeout(max(0.001, until - time.monotonic()))
        # The system waits for all of it, so that Python is needed once.
        count = connection.recv_into(view, 0, socket.MSG_WAITALL)
        if not count:
            raise EOFError("the connection was closed")
        view = view[count:]
