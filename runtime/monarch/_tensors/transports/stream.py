"""A TCP stream to memory of another process: always available, between any two hosts.

Both ends prove that they have the secret of the session before any byte of memory is read or written; like those of
NCCL and gloo, the bytes themselves are not encrypted. A thread of the owner answers a request; it needs the GIL once a
request, not for the bytes.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence

import numpy

from monarch._tensors.memory.registry import MemoryReference
from monarch._tensors.transports.base import Move, dropped, lost_meanwhile
from monarch._tensors.transports.stream_protocol import (
    ANSWER,
    BOUNDS,
    DROPPED,
    FINE,
    MOST,
    NONCE,
    READ,
    REQUEST,
    WRITE,
    proof,
    receive,
    send,
    take,
    tune,
)
from monarch.exceptions import TransferError


class StreamTransport:
    """The transport over TCP.

    Args:
        secret: that of the session.
        find: asks the owner of some memory for the address of its StreamServer.
    """

    name = "stream"

    def __init__(self, secret: bytes, find: Callable[[MemoryReference, float], tuple[str, int]]) -> None:
        self._secret = secret
        self._find = find
        self._lock = threading.Lock()
        self._idle: dict[str, list[socket.socket]] = {}
        """By process, the connections that no transfer uses. Lock: ``_lock``."""

    def reason_against(self, remote: MemoryReference, local_device: str) -> str:
        return ""

    def move(self, moves: Sequence[Move], writing: bool, timeout: float) -> None:
        remote = moves[0].remote
        connection, kept = self._connection(remote, timeout)
        # For the whole, not for each arriving piece.
        until = time.monotonic() + timeout
        moved = 0
        try:
            for each in moves:
                connection.settimeout(max(0.001, until - time.monotonic()))
                moved += self._write(connection, each) if writing else self._read(connection, each, until)
        except (OSError, EOFError) as error:
            connection.close()
            if kept and not moved:
                # It was closed while idle; the owner may still be alive.
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
        for start in range(0, len(spans), MOST):
            some = spans[start : start + MOST]
            self._request(connection, READ, remote, some)
            take(connection, local, some[:, 1:], until)
        return move.size

    def _write(self, connection: socket.socket, move: Move) -> int:
        remote, local, spans = move.remote, move.local, move.rows
        for start in range(0, len(spans), MOST):
            some = spans[start : start + MOST]
            self._request(connection, WRITE, remote, some)
            send(connection, local, some[:, 1:])
            if ANSWER.unpack(receive(connection, ANSWER.size))[0] != FINE:
                raise lost_meanwhile(remote, True, f"{remote.title} has dropped the buffer")
        return move.size

    def _request(self, connection: socket.socket, what: int, remote: MemoryReference, spans: numpy.ndarray) -> None:
        theirs = numpy.ascontiguousarray(spans[:, ::2] + [remote.offset, 0])
        connection.sendall(REQUEST.pack(what, remote.key, len(theirs)) + theirs.tobytes())
        status = ANSWER.unpack(receive(connection, ANSWER.size))[0]
        if status == DROPPED:
            raise dropped(remote)
        if status == BOUNDS:
            raise TransferError(f"{remote.title} refuses access to this range of the buffer", mesh=remote.proc)

    def _connection(self, remote: MemoryReference, timeout: float) -> tuple[socket.socket, bool]:
        proc = remote.proc
        with self._lock:
            idle = self._idle.get(proc)
            if idle:
                return idle.pop(), True
        try:
            connection = socket.create_connection(self._find(remote, timeout), timeout)
        except OSError as error:
            raise TransferError(
                f"cannot reach {remote.title} over TCP: {error.strerror or error}. Nothing was written", mesh=proc
            ) from error
        try:
            self._greet(connection)
        except (OSError, EOFError) as error:
            connection.close()
            raise TransferError(
                f"{remote.title} rejects this process, which is not in its session", mesh=proc
            ) from error
        return connection, False

    def _greet(self, connection: socket.socket) -> None:
        tune(connection)
        server_nonce = bytes(receive(connection, NONCE))
        client_nonce = secrets.token_bytes(NONCE)
        connection.sendall(client_nonce + proof(self._secret, b"client", server_nonce, client_nonce))
        shown = receive(connection, hashlib.sha256().digest_size)
        if not hmac.compare_digest(bytes(shown), proof(self._secret, b"server", client_nonce, server_nonce)):
            raise EOFError("the other end does not have the secret of this session")

    def forget(self, proc: str) -> None:
        """Close the idle connections to a process."""
        with self._lock:
            idle = self._idle.pop(proc, [])
        for each in idle:
            each.close()

    def close(self) -> None:
        """Close idle connections."""
        for proc in list(self._idle):
            self.forget(proc)
