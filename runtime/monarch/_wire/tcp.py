"""Options of sockets between hosts: heartbeats and keepalive."""

from __future__ import annotations

import zmq

HEARTBEAT_MS = 1000
LEASE_S = 5.0
"""Seconds of silence after which a host counts as lost."""


def over_network(socket: zmq.Socket[bytes], lease: float) -> None:
    """Keepalive for tcp: ZeroMQ's own heartbeats, which continue while Python is busy."""
    socket.set(zmq.HEARTBEAT_IVL, min(HEARTBEAT_MS, int(lease * 250)))
    socket.set(zmq.HEARTBEAT_TIMEOUT, int(lease * 1000))
    socket.set(zmq.HEARTBEAT_TTL, int(lease * 1000))
    socket.set(zmq.TCP_KEEPALIVE, 1)
    socket.set(zmq.HANDSHAKE_IVL, int(lease * 1000))
