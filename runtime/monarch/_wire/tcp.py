"""Options of sockets between hosts: heartbeats and keepalive; and whether somebody listens at an address."""

from __future__ import annotations

import errno
import os
import selectors
import socket as sockets
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import zmq

HEARTBEATS = 5
"""How many are sent in the seconds after which a host counts as lost."""
_PROBES = 3
"""Probes of the kernel without an answer after which a connection is lost."""
LEASE_S = 5.0
"""Seconds of silence after which a host counts as lost."""
_REACH_S = 2.0
"""Seconds for a host to accept a connection."""


def over_network(socket: zmq.Socket[bytes], lease: float, heartbeats: bool = True) -> None:
    """Set heartbeats and keepalive, so that the loss of the other end is noticed.

    Args:
        socket: its options are set before it connects or binds.
        lease: seconds of silence after which the other end counts as lost.
        heartbeats: whether this end sends ZeroMQ's own heartbeats, which continue while Python is busy. Their cost in a
            thread of ZeroMQ grows with the square of its connections, as each message walks a list of timers; so of
            two connections between the same processes, one has them. The kernel's keepalive is enough for the other.
    """
    if heartbeats:
        socket.set(zmq.HEARTBEAT_IVL, int(lease * 1000) // HEARTBEATS)
        socket.set(zmq.HEARTBEAT_TIMEOUT, int(lease * 1000))
        socket.set(zmq.HEARTBEAT_TTL, int(lease * 1000))
    socket.set(zmq.TCP_KEEPALIVE, 1)
    socket.set(zmq.TCP_KEEPALIVE_IDLE, max(1, int(lease)))
    socket.set(zmq.TCP_KEEPALIVE_INTVL, max(1, int(lease) // _PROBES))
    socket.set(zmq.TCP_KEEPALIVE_CNT, _PROBES)
    socket.set(zmq.HANDSHAKE_IVL, int(lease * 1000))


@dataclass(frozen=True)
class Unreachable:
    """Why no connection to an address can be made.

    Attributes:
        reason: for people.
        refused: whether its machine has refused: nobody listens there. Otherwise it may only be out of reach.
    """

    reason: str
    refused: bool = False


def unreachable(addresses: Sequence[str]) -> dict[str, Unreachable]:
    """Return the addresses such as ``tcp://node1:22222`` to which no connection can be made, and why.

    All are tried at the same time.
    """
    problems = dict.fromkeys(addresses, Unreachable("timed out"))
    with selectors.DefaultSelector() as selector, ExitStack() as opened:
        for address in problems:
            try:
                for connection in begin(address):
                    opened.enter_context(connection)
                    selector.register(connection, selectors.EVENT_WRITE, (address, connection))
            except OSError as error:
                problems[address] = Unreachable(error.strerror or str(error), error.errno == errno.ECONNREFUSED)
        deadline = time.monotonic() + _REACH_S
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                address, connection = key.data
                selector.unregister(connection)
                code = connection.getsockopt(sockets.SOL_SOCKET, sockets.SO_ERROR)
                if not code:
                    problems.pop(address, None)
                elif address in problems:
                    problems[address] = Unreachable(os.strerror(code), code == errno.ECONNREFUSED)
    return problems


def begin(address: str) -> list[sockets.socket]:
    """Begin a connection to each address of a machine, without waiting, and return them.

    Raises:
        OSError: the name of the machine is unknown, or all fail at once.
    """
    machine, _, port = address.removeprefix("tcp://").rpartition(":")
    begun: list[sockets.socket] = []
    code = 0
    for family, kind, _, _, where in sockets.getaddrinfo(machine.strip("[]"), int(port), type=sockets.SOCK_STREAM):
        try:
            connection = sockets.socket(family, kind)
        except OSError as error:
            # Such as IPv6, if this machine has none.
            code = error.errno or 0
            continue
        connection.setblocking(False)
        failed = connection.connect_ex(where)
        if failed in (0, errno.EINPROGRESS):
            begun.append(connection)
        else:
            connection.close()
            code = failed
    if not begun:
        raise OSError(code, os.strerror(code))
    return begun
