"""Options of sockets between hosts: heartbeats and keepalive; and whether somebody listens at an address."""

from __future__ import annotations

import socket as sockets

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
    """Notice that the other end is lost.

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


def why_unreachable(address: str) -> str:
    """Return why no connection can be made to an address such as ``tcp://node1:22222``; empty if one can."""
    machine, _, port = address.removeprefix("tcp://").rpartition(":")
    try:
        sockets.create_connection((machine.strip("[]"), int(port)), _REACH_S).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""
