"""The state of an address that does not answer: no connection, no handshake, or a handshake without an answer."""

from __future__ import annotations

import socket as sockets
import time
from contextlib import suppress
from enum import Enum

import zmq

from monarch._wire.keys import HANDSHAKE_MS, KeyPair
from monarch._wire.links import RECONNECT_MS
from monarch._wire.tcp import begin, over_network

_EVENTS = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_DISCONNECTED
)
_SIGNATURE = 10
"""Bytes with which a process of ZeroMQ greets whoever connects: 0xff first, and 0x7f last."""


class Handshake(Enum):
    """The state of a connection with CURVE."""

    CONNECTING = "connecting"
    """The machine has not answered yet."""
    NOWHERE = "no connection"
    """The machine has not accepted a connection."""
    CLOSED = "closed"
    """Connections are closed as soon as they are made: forwarded ports do so to which nobody listens."""
    SILENT = "no handshake"
    """The machine has accepted a connection, and the process says nothing: it may be stopped."""
    REJECTED = "rejected key"
    """The process has ended the connection when it saw the key."""
    FOREIGN = "another protocol"
    """The process speaks something else."""
    DONE = "done"
    """Both have the key."""


class HandshakeProbe:
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
        self._state = Handshake.CONNECTING
        """By the events of ZeroMQ."""
        self._quick = min(lease, HANDSHAKE_MS / 1000) / 2
        """Seconds after a connection in which its end comes from the other side."""
        self._connected = 0.0
        """When a connection was made, in monotonic seconds."""
        self._plain: list[sockets.socket] = []
        """Connections that only listen, since ZeroMQ does not tell a rejected key from a closed connection."""
        self._address = address
        self._greets: bool | None = None
        """Whether the other end greets as ZeroMQ does; None while it says nothing."""
        self._closes = False
        """Whether it has closed the last of those connections without a greeting."""
        socket = self._socket = context.socket(zmq.PUSH)
        try:
            socket.set(zmq.LINGER, 0)
            socket.set(zmq.RECONNECT_IVL, RECONNECT_MS)
            socket.set(zmq.CURVE_SERVERKEY, server)
            socket.set(zmq.CURVE_PUBLICKEY, keys.public)
            socket.set(zmq.CURVE_SECRETKEY, keys.secret)
            over_network(socket, lease)
            socket.set(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
            self._monitor = socket.get_monitor_socket(_EVENTS)
            socket.connect(address)
        except BaseException:
            socket.close(0)
            raise
        self._begin()

    def look(self) -> Handshake:
        """Return what has happened so far, without waiting."""
        # It imports asyncio, which most programs do not need.
        from zmq.utils.monitor import recv_monitor_message

        while self._monitor.poll(0):
            self._note(recv_monitor_message(self._monitor)["event"])
        self._listen()
        if self._state is Handshake.DONE or self._state is Handshake.NOWHERE:
            return self._state
        if self._greets is False:
            return Handshake.FOREIGN
        if self._closes:
            return Handshake.CLOSED
        # Not rejected for the key before the process there is known to speak ZeroMQ.
        return Handshake.SILENT if self._state is Handshake.REJECTED and not self._greets else self._state

    def _note(self, event: int) -> None:
        """Take an event of the connection."""
        is_quick = time.monotonic() < self._connected + self._quick
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._state = Handshake.DONE
        elif event in (zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, zmq.EVENT_HANDSHAKE_FAILED_AUTH):
            # Otherwise this end gave up. A process that ends rejects as well; it is gone at the next try.
            self._state = Handshake.REJECTED if is_quick else Handshake.SILENT
        elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            self._state = Handshake.FOREIGN
        elif event == zmq.EVENT_CLOSED:
            self._state = Handshake.NOWHERE
        elif event == zmq.EVENT_CONNECTED:
            self._connected = time.monotonic()
            self._state = Handshake.SILENT if self._state is not Handshake.REJECTED else self._state
        elif self._state is Handshake.SILENT:
            # Ended before ZeroMQ could read a greeting: it does not try again.
            self._state = Handshake.FOREIGN if is_quick else self._state
        elif self._state is Handshake.DONE:
            self._state = Handshake.NOWHERE

    def _begin(self) -> None:
        """Connect to the same address without saying anything."""
        with suppress(OSError):
            self._plain = begin(self._address)

    def _listen(self) -> None:
        """Read how the other end greets."""
        for connection in [*self._plain]:
            try:
                data = connection.recv(_SIGNATURE, sockets.MSG_PEEK)
            except BlockingIOError:
                continue
            except ConnectionResetError:
                data = b""
            except OSError:
                data = None
            if data:
                self._greets = data[0] == 0xFF and (len(data) < _SIGNATURE or data[-1] == 0x7F)
                self._closes = False
                continue
            self._closes = data is not None
            self._plain.remove(connection)
            connection.close()
        if self._closes and not self._plain:
            # Somebody may listen there meanwhile.
            self._begin()

    def close(self) -> None:
        """Close the connections."""
        for connection in self._plain:
            connection.close()
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(0)
