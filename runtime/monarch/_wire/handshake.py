"""The state of an address that does not answer: no connection, no handshake, or a handshake without an answer."""

from __future__ import annotations

import time
from enum import Enum

import zmq

from monarch._wire.keys import HANDSHAKE_MS, KeyPair
from monarch._wire.links import RECONNECT_MS
from monarch._wire.tcp import over_network

_EVENTS = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_DISCONNECTED
)
_QUICK_S = HANDSHAKE_MS / 2000
"""Seconds after a connection in which its end comes from the other side."""


class Handshake(Enum):
    """The state of a connection with CURVE."""

    NOWHERE = "no connection"
    """The machine has not accepted a connection."""
    SILENT = "no handshake"
    """The machine has accepted a connection, and the process says nothing: it may be stopped."""
    REJECTED = "rejected key"
    """The process has ended the connection when it saw the key."""
    FOREIGN = "another protocol"
    """The process speaks something else."""
    DONE = "done"
    """Both have the key."""


class Probe:
    """A connection of its own to an address, only to see its handshake. One thread at a time.

    Args:
        context: for the socket.
        address: such as ``tcp://node1:22222``.
        keys: of this process.
        server: the public key that the process there should have.
        lease: seconds of silence after which the other end counts as lost.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], address: str, keys: KeyPair, server: bytes, lease: float
    ) -> None:
        self.state = Handshake.NOWHERE
        socket = self._socket = context.socket(zmq.PUSH)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.RECONNECT_IVL, RECONNECT_MS)
        socket.set(zmq.CURVE_SERVERKEY, server)
        socket.set(zmq.CURVE_PUBLICKEY, keys.public)
        socket.set(zmq.CURVE_SECRETKEY, keys.secret)
        over_network(socket, lease)
        socket.set(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        self._connected = 0.0
        """When a connection was made, in monotonic seconds."""
        self._monitor = socket.get_monitor_socket(_EVENTS)
        socket.connect(address)

    def look(self) -> Handshake:
        """Return what has happened so far, without waiting."""
        # It imports asyncio, which most programs do not need.
        from zmq.utils.monitor import recv_monitor_message

        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.state = Handshake.DONE
            elif event in (zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, zmq.EVENT_HANDSHAKE_FAILED_AUTH):
                # Otherwise this end gave up. A process that ends rejects as well; it is gone at the next try.
                quick = time.monotonic() < self._connected + _QUICK_S
                self.state = Handshake.REJECTED if quick else Handshake.SILENT
            elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                self.state = Handshake.FOREIGN
            elif event == zmq.EVENT_CLOSED:
                self.state = Handshake.NOWHERE
            elif event == zmq.EVENT_CONNECTED:
                self._connected = time.monotonic()
                self.state = Handshake.SILENT if self.state is not Handshake.REJECTED else self.state
            elif self.state is Handshake.SILENT:
                # Ended before ZeroMQ could read a greeting: it does not try again.
                self.state = Handshake.FOREIGN
            elif self.state is Handshake.DONE:
                self.state = Handshake.NOWHERE
        return self.state

    def close(self) -> None:
        """Close the connection."""
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(0)
