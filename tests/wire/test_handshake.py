"""The state of an address that does not answer: each kind of process that may be there, by its real socket."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest
import zmq

from leaks import wait_until
from monarch._wire import handshake
from monarch._wire.handshake import Handshake, HandshakeProbe
from monarch._wire.keys import CurveAuthenticator, KeyPair
from monarch._wire.links import Link
from monarch._wire.tcp import LEASE_S, unreachable

KEYS = KeyPair.new()
Look = Callable[[], Handshake]


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    with zmq.Context() as made:
        yield made


@contextmanager
def probe(context: zmq.Context[zmq.Socket[bytes]], address: str, server: bytes = KEYS.public) -> Iterator[Look]:
    made = HandshakeProbe(context, address, KEYS, server, LEASE_S)
    try:
        yield made.look
    finally:
        made.close()


@contextmanager
def listener(serve: Callable[[socket.socket], object]) -> Iterator[str]:
    """Give each connection of a free port to a function, and yield the address."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def run() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                serve(connection)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield f"tcp://127.0.0.1:{server.getsockname()[1]}"
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


def seen(look: Look, seconds: float) -> set[Handshake]:
    """Return the states of some time, after the first that is not CONNECTING."""
    assert wait_until(lambda: look() is not Handshake.CONNECTING)
    states: set[Handshake] = set()
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        states.add(look())
    return states


def test_closed_port_is_nowhere(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    with probe(context, address) as look:
        assert wait_until(lambda: look() is Handshake.NOWHERE)


def test_port_that_closes_connections_is_not_another_key(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    """A forwarded port or a proxy does so, if nobody listens at its other end."""
    with listener(lambda connection: connection.close()) as address, probe(context, address) as look:
        assert wait_until(lambda: look() is Handshake.CLOSED)
        assert seen(look, 1.0) <= {Handshake.CLOSED, Handshake.NOWHERE}


def test_silent_process_is_silent_after_a_handshake_timeout(
    context: zmq.Context[zmq.Socket[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "HANDSHAKE_MS", 200)
    kept: list[socket.socket] = []
    with listener(kept.append) as address, probe(context, address) as look:
        assert wait_until(lambda: len(kept) >= 2)
        states: set[Handshake] = set()
        # The first two are those of the probe; each more is a try of ZeroMQ.
        assert wait_until(lambda: states.add(look()) or len(kept) >= 6)
        assert states <= {Handshake.CONNECTING, Handshake.SILENT, Handshake.NOWHERE}
    for connection in kept:
        connection.close()


@pytest.mark.parametrize("words", [b"SSH-2.0-OpenSSH_9.2p1\r\n", b"220 mail\r\n"])
def test_process_that_greets_otherwise_is_foreign(context: zmq.Context[zmq.Socket[bytes]], words: bytes) -> None:
    kept: list[socket.socket] = []

    def serve(connection: socket.socket) -> None:
        connection.sendall(words)
        kept.append(connection)

    with listener(serve) as address, probe(context, address) as look:
        assert wait_until(lambda: look() is Handshake.FOREIGN)
    for connection in kept:
        connection.close()


def test_connection_that_was_given_up_takes_no_first_message(
    context: zmq.Context[zmq.Socket[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A send there would wait without end."""
    given_up = threading.Event()

    def serve(connection: socket.socket) -> None:
        connection.sendall(b"SSH-2.0-OpenSSH_9.2p1\r\n")
        with suppress(ConnectionResetError):
            while connection.recv(1024):
                pass
        connection.close()
        given_up.set()

    usual = zmq.Socket.connect

    def connect(self: zmq.Socket[bytes], address: str) -> None:
        usual(self, address)
        assert given_up.wait(20)

    with listener(serve) as address:
        monkeypatch.setattr(zmq.Socket, "connect", connect)
        link = Link(context, address, b"hello", KEYS, KEYS.public)
        monkeypatch.undo()
        link.close()


def test_keys_decide(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    """The same process accepts one program and rejects another."""
    own, other = KeyPair.new(), KeyPair.new()
    door = CurveAuthenticator(context)
    door.allow("test", [KEYS.public])
    with context.socket(zmq.PULL) as server:
        address = door.bind(server, "tcp://127.0.0.1", own, "test", LEASE_S)
        with probe(context, address, own.public) as look:
            assert wait_until(lambda: look() is Handshake.DONE)
        with probe(context, address, other.public) as look:
            assert wait_until(lambda: look() is Handshake.REJECTED)
    door.close()


def test_only_a_refusal_says_that_nobody_listens() -> None:
    """A machine that is out of reach may be back."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    unknown = "tcp://nohost.invalid:22222"
    found = unreachable([address, unknown])
    assert found[address].refused and not found[unknown].refused
    assert "refused" in found[address].reason and found[unknown].reason
