"""The protocol between both ends of a stream to memory."""

from __future__ import annotations

import hashlib
import hmac
import socket
import struct
import time
from contextlib import suppress

import numpy

from monarch._tensors.memory.staging import host_view, read_bytes, write_bytes
from monarch._tensors.memory.views import Memory

NONCE = 32
HANDSHAKE_SECONDS = 5.0
REQUEST = struct.Struct("<BQQ")
"""Operation, key of a piece, and number of spans that follow: each its first byte and size, as int64."""
SPAN = 16
MOST = 1 << 20
"""Spans in one request."""
READ, WRITE = 1, 2
ANSWER = struct.Struct("<B")
FINE, DROPPED, BOUNDS = 0, 1, 2
BUFFER = 4 << 20
VECTOR = 512
"""Pieces in one system call."""


def proof(secret: bytes, who: bytes, first: bytes, second: bytes) -> bytes:
    """Return the proof of the secret for two nonces."""
    return hmac.digest(secret, who + first + second, hashlib.sha256)


def tune(connection: socket.socket) -> None:
    """Configure a connection for large pieces."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for which in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        with suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, which, BUFFER)


def send(connection: socket.socket, memory: Memory, spans: numpy.ndarray) -> None:
    """Send ranges of some memory, as rows of first byte and size."""
    if memory.device != "cpu":
        for offset, size in spans.tolist():
            for piece in read_bytes(memory, offset, size):
                connection.sendall(piece)
        return
    whole = host_view(memory.address, memory.size)
    for start in range(0, len(spans), VECTOR):
        pieces = [whole[offset : offset + size] for offset, size in spans[start : start + VECTOR].tolist()]
        if len(pieces) == 1:
            connection.sendall(pieces[0])
            continue
        while pieces:
            sent = connection.sendmsg(pieces)
            while pieces and sent >= len(pieces[0]):
                sent -= len(pieces.pop(0))
            if sent:
                pieces[0] = pieces[0][sent:]


def take(connection: socket.socket, memory: Memory, spans: numpy.ndarray, until: float | None = None) -> None:
    """Receive ranges of some memory."""
    for offset, size in spans.tolist():
        write_bytes(memory, offset, size, lambda view: receive_into(connection, view, until))


def receive(connection: socket.socket, size: int, until: float | None = None) -> bytearray:
    """Receive so many bytes; EOFError if the other end has closed, TimeoutError after a time of the monotonic clock."""
    data = bytearray(size)
    receive_into(connection, memoryview(data), until)
    return data


def receive_into(connection: socket.socket, view: memoryview, until: float | None = None) -> None:
    """Receive into memory; TimeoutError after a time of the monotonic clock."""
    size = len(view)
    while view:
        if until is not None:
            left = until - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"timed out with {size - len(view):,} of {size:,} bytes received")
            connection.settimeout(left)
        # The system waits for all of it, so Python runs only once.
        count = connection.recv_into(view, 0, socket.MSG_WAITALL)
        if not count:
            raise EOFError(f"the peer closed the connection after {size - len(view):,} of {size:,} bytes")
        view = view[count:]
