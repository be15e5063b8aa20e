"""The owner's end of a stream: threads that read and write its memory for other processes of the session."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import sys
import threading
import time
from contextlib import suppress

import numpy

from monarch._core.text.seldom import Seldom
from monarch._python.threads import spawn_thread
from monarch._tensors.memory.registry import Registry
from monarch._tensors.transports.stream_protocol import (
    ANSWER,
    BOUNDS,
    DROPPED,
    FINE,
    HANDSHAKE_SECONDS,
    MOST,
    NONCE,
    READ,
    REQUEST,
    SPAN,
    WRITE,
    proof,
    receive,
    send,
    take,
    tune,
)
from monarch._wire.descriptors import reserve

STRANGERS = 64
"""Maximum unauthenticated connections at a time; more are closed."""
_AGAIN = 0.05
"""Seconds until a failed accept is retried, for example when the process had no descriptor left."""


class StreamServer:
    """Serves the memory of a registry.

    Args:
        registry: the exported memory.
        secret: that of the session.
        address: to listen at, on a free port.
    """

    def __init__(self, registry: Registry, secret: bytes, address: str) -> None:
        self._memories = registry
        self._secret = secret
        self._listener = socket.create_server((address, 0))
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._lock = threading.Lock()
        # All three under the lock; the event is set under it, too.
        self._connections: set[socket.socket] = set()
        self._strangers = 0
        self._closed = threading.Event()
        self._problems = Seldom()
        spawn_thread("monarch-stream", self._accept)

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if self._closed.is_set():
                    return
                self._complain(f"cannot accept connections: {error.strerror}")
                reserve.give_up()
                self._closed.wait(_AGAIN)
                continue
            with self._lock:
                welcome = not self._closed.is_set() and self._strangers < STRANGERS
                if welcome:
                    self._connections.add(connection)
                    self._strangers += 1
            if not welcome:
                connection.close()
                continue
            spawn_thread("monarch-stream", self._serve, connection)

    def _serve(self, connection: socket.socket) -> None:
        try:
            if self._known(connection):
                while True:
                    request = receive(connection, REQUEST.size)
                    self._answer(connection, *REQUEST.unpack(request))
        except (OSError, EOFError):
            # The other end is gone, or this one is closing.
            pass
        except Exception as error:
            self._complain(f"closed a connection: {type(error).__name__}: {error}")
        finally:
            with self._lock:
                self._connections.discard(connection)
            connection.close()

    def _known(self, connection: socket.socket) -> bool:
        """Return whether the other end belongs to this session."""
        try:
            return self._greet(connection)
        finally:
            with self._lock:
                self._strangers -= 1

    def _complain(self, text: str) -> None:
        """Print a complaint: the first of its kind, the tenth and so on."""
        count = self._problems.count(text)
        if count:
            print(f"monarch: the buffer server {text} ({count} times so far)", file=sys.stderr, flush=True)

    def _greet(self, connection: socket.socket) -> bool:
        tune(connection)
        # For all of it, however slowly the bytes come.
        until = time.monotonic() + HANDSHAKE_SECONDS
        connection.settimeout(HANDSHAKE_SECONDS)
        server_nonce = secrets.token_bytes(NONCE)
        connection.sendall(server_nonce)
        client_nonce = receive(connection, NONCE, until)
        shown = receive(connection, hashlib.sha256().digest_size, until)
        if not hmac.compare_digest(bytes(shown), proof(self._secret, b"client", server_nonce, bytes(client_nonce))):
            return False
        connection.sendall(proof(self._secret, b"server", bytes(client_nonce), server_nonce))
        connection.settimeout(None)
        return True

    def _answer(self, connection: socket.socket, what: int, key: int, count: int) -> None:
        if not 0 < count <= MOST or what not in (READ, WRITE):
            raise EOFError("invalid request")
        spans = numpy.reshape(numpy.frombuffer(receive(connection, count * SPAN), numpy.int64), (-1, 2))
        memory = self._memories.get(key)
        status = FINE
        if memory is None:
            status = DROPPED
        elif (what == WRITE and memory.readonly) or not _within(spans, memory.size):
            status = BOUNDS
        connection.sendall(ANSWER.pack(status))
        if memory is None or status != FINE:
            return
        if what == READ:
            send(connection, memory, spans)
            return
        take(connection, memory, spans)
        connection.sendall(ANSWER.pack(FINE if self._memories.get(key) is memory else DROPPED))

    def close(self) -> None:
        """Stop serving."""
        with self._lock:
            self._closed.set()
            connections = list(self._connections)
        for each in [self._listener, *connections]:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def _within(spans: numpy.ndarray, size: int) -> bool:
    """Return whether all spans lie within a piece of so many bytes. Ends are not added up: the sums may overflow."""
    return int(spans.min()) >= 0 and bool((spans[:, 0] <= size - spans[:, 1]).all())
