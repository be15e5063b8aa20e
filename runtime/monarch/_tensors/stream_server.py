"""The owner's end of a stream: threads that read and write its memory for others of the session."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import threading
from contextlib import suppress

import numpy

from monarch._tensors.registry import Registry
from monarch._tensors.stream_protocol import (
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
                    request = receive(connection, REQUEST.size)
                    self._answer(connection, *REQUEST.unpack(request))
        except (OSError, EOFError):
            # The other end is gone, or this one is closing.
            pass
        finally:
            with self._lock:
                self._connections.discard(connection)
            connection.close()

    def _greet(self, connection: socket.socket) -> bool:
        tune(connection)
        connection.settimeout(HANDSHAKE_SECONDS)
        mine = secrets.token_bytes(NONCE)
        connection.sendall(mine)
        theirs = receive(connection, NONCE)
        shown = receive(connection, hashlib.sha256().digest_size)
        if not hmac.compare_digest(bytes(shown), proof(self._secret, b"client", mine, bytes(theirs))):
            return False
        connection.sendall(proof(self._secret, b"server", bytes(theirs), mine))
        connection.settimeout(None)
        return True

    def _answer(self, connection: socket.socket, what: int, key: int, count: int) -> None:
        if count > MOST:
            raise EOFError("this is no request")
        spans = numpy.frombuffer(receive(connection, count * SPAN), numpy.int64).reshape(-1, 2)
        memory = self._registry.get(key)
        status = FINE
        if memory is None:
            status = DROPPED
        elif (what == WRITE and memory.readonly) or int(spans.min()) < 0 or int(spans.sum(1).max()) > memory.size:
            status = BOUNDS
        connection.sendall(ANSWER.pack(status))
        if memory is None or status != FINE:
            return
        if what == READ:
            send(connection, memory, spans)
            return
        take(connection, memory, spans)
        connection.sendall(ANSWER.pack(FINE if self._registry.get(key) is memory else DROPPED))

    def close(self) -> None:
        """Serves nobody any more."""
        with self._lock:
            self._closed = True
            connections = list(self._connections)
        for each in [self._listener, *connections]:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self._listener.close()
