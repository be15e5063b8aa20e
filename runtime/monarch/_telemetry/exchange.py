"""The messages between programs of one user about their meshes: a request and an answer for each connection."""

from __future__ import annotations

import socket
import time
from collections import deque
from typing import Any

import msgspec

from monarch._core.telemetry.events import Entry
from monarch._core.telemetry.model import MeshModel

NAME = "views"
"""Of the socket in the session folder of a program; only its user can enter the folder."""
VERSION = 1
"""Raised by a change that an older program would misread."""
LARGEST_REQUEST, LARGEST_ANSWER = 1 << 20, 1 << 28
"""Bytes."""
_LENGTH = 4


class MeshesRequest(msgspec.Struct):
    """Asks for the meshes of a program."""

    version: int
    known: dict[str, int]
    """By uid of a mesh, the number of the newest entry that the asker has."""
    debug: bool = False
    """Whether to open a session of the debugger instead, which continues in lines of JSON."""


class News(msgspec.Struct):
    """The news of a mesh for an asker: its state, or the entries that the asker lacks."""

    uid: str
    model: MeshModel | None
    entries: list[Entry]


class MeshesAnswer(msgspec.Struct):
    """All meshes of a program that run."""

    version: int
    title: str
    """The name of the program for people, such as that of its notebook."""
    server: str
    """The Jupyter server that has started it; empty for none."""
    meshes: list[News]


def _plain(value: Any) -> Any:
    return list(value)


def _made(kind: Any, value: Any) -> Any:
    return deque(value)


_encode = msgspec.msgpack.Encoder(enc_hook=_plain).encode
request_of = msgspec.msgpack.Decoder(MeshesRequest).decode
_answer_of = msgspec.msgpack.Decoder(MeshesAnswer, dec_hook=_made).decode


def answer_of(body: bytes) -> MeshesAnswer:
    """Read an answer.

    Raises:
        msgspec.ValidationError: another version has written it.
    """
    answer = _answer_of(body)
    for news in answer.meshes:
        if news.model is not None:
            # Those that last are the same objects, so that later entries end them in both.
            news.model.open_spans = {span.rank: span for span in news.model.spans if not span.end}
    return answer


def send(connection: socket.socket, message: MeshesRequest | MeshesAnswer, until: float) -> None:
    """Send a message.

    Raises:
        OSError: the other end is gone, or has not read it by ``until`` on the monotonic clock.
    """
    body = _encode(message)
    rest = memoryview(len(body).to_bytes(_LENGTH, "little") + body)
    while rest:
        _limit(connection, until)
        rest = rest[connection.send(rest) :]


def receive(connection: socket.socket, largest: int, until: float) -> bytes:
    """Receive a message of at most ``largest`` bytes.

    Raises:
        OSError: the other end is gone, has not sent it by ``until`` on the monotonic clock, or sends a longer one.
    """
    length = int.from_bytes(_exactly(connection, _LENGTH, until), "little")
    if length > largest:
        raise OSError(f"expected at most {largest} bytes, got {length}")
    return _exactly(connection, length, until)


def _exactly(connection: socket.socket, size: int, until: float) -> bytes:
    parts: list[bytes] = []
    while size:
        _limit(connection, until)
        part = connection.recv(min(size, 1 << 20))
        if not part:
            raise ConnectionResetError("the other end has closed the connection")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _limit(connection: socket.socket, until: float) -> None:
    """Bound the next wait."""
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError("the other end does not answer")
    connection.settimeout(left)
