"""Messages between a program and the process that holds the hosts of a detached mesh: one packet each."""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec

from monarch._procs.agent.request import AgentConfig
from monarch._procs.launch.interface import Environment, Failed, Installing, Joined, News, Queued, Starting
from monarch.exceptions import ArgumentError, DetachedMeshInUseError, MonarchError, SpawnError

PACKET = 1 << 17
"""The most bytes of a message."""
LAST = -1
"""In place of the number of a request: a Problem after which the process ends the connection."""
_KINDS: dict[str, type[Any]] = {
    each.__name__: each for each in (Queued, Starting, Installing, Environment, Joined, Failed)
}
_ERRORS: dict[str, type[MonarchError]] = {
    each.__name__: each for each in (ArgumentError, DetachedMeshInUseError, SpawnError)
}


class HoldOrder(msgspec.Struct):
    """The request of a program, on the standard input of the process."""

    name: str
    """Of the mesh."""
    seconds: float
    """Its lease while no program is attached."""
    where: str
    count: int
    options: dict[str, Any]
    """The arguments of ``make_launcher``."""
    agent: AgentConfig
    """The configuration of each host agent; it has the keys of the mesh."""
    pid: int
    """Of the program: nobody else may use the hosts before it does."""


class Held(msgspec.Struct, tag=True):
    """The first answer to a program that connects."""

    expected: int
    forwarded: bool
    joined: list[list[Any]]
    """The hosts that have joined, as packed news."""
    where: str
    count: int
    options: dict[str, Any]
    """The arguments of ``make_launcher``, for a mesh that replaces this one."""


class Watch(msgspec.Struct, tag=True):
    """See ``Launch.watch``; answered by packed news."""

    timeout: float


class Connect(msgspec.Struct, tag=True):
    """See ``Launch.connect``; answered by address and addresses here."""

    index: int
    here: list[str]


class Stay(msgspec.Struct, tag=True):
    """The program is the controller of the hosts, which outlive it from now on; answered by None."""


class Left(msgspec.Struct, tag=True):
    """See ``Launch.left``."""


class End(msgspec.Struct, tag=True):
    """End the hosts; the connection closes once they have ended."""


Request: TypeAlias = Watch | Connect | Stay | Left | End


class Answer(msgspec.Struct, tag=True):
    """The answer to a request."""

    value: Any


class Problem(msgspec.Struct, tag=True):
    """An error, by the name of its class."""

    kind: str
    text: str


Reply: TypeAlias = Held | Answer | Problem


def pack_news(news: Sequence[News]) -> list[list[Any]]:
    """Return news as plain values."""
    return [[type(each).__name__, msgspec.to_builtins(each)] for each in news]


def unpack_news(packed: Sequence[Sequence[Any]]) -> list[News]:
    """Return the news in plain values."""
    return [msgspec.convert(fields, _KINDS[kind]) for kind, fields in packed]


def problem_of(error: MonarchError) -> Problem:
    """Return an error as a message."""
    return Problem(type(error).__name__, str(error))


def error_of(problem: Problem) -> MonarchError:
    """Return the error of a message."""
    return _ERRORS.get(problem.kind, MonarchError)(problem.text)


def connect(path: str, timeout: float) -> socket.socket:
    """Return a connection to a holding process; OSError if it is gone.

    Args:
        path: its socket.
        timeout: seconds for it, and for each message.
    """
    connection = _socket()
    try:
        connection.settimeout(timeout)
        connection.connect(path)
    except BaseException:
        connection.close()
        raise
    return connection


def peer_pid(connection: socket.socket) -> int:
    """Return the pid of the process at the other end, as of the time when it connected or began to listen."""
    return struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]


def listen(path: str) -> socket.socket:
    """Return the socket of a holding process, in its folder."""
    listener = _socket()
    listener.bind(path)
    listener.listen(16)
    listener.setblocking(False)
    return listener


def _socket() -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * PACKET)
    return made
