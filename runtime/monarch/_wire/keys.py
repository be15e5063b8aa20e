"""CURVE keys: which processes may connect over tcp. Both ends know each other's key; strangers get no answer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import zmq

from monarch._wire.split import LARGEST
from monarch._wire.tcp import over_network

HANDSHAKE_MS = 10_000
"""Milliseconds for a tcp peer to prove that it holds a key."""
_BACKLOG = 4096
"""Connections that wait to be accepted: thousands of hosts may connect at once, and ZeroMQ's own limit is 100."""


class KeyPair(NamedTuple):
    """A CURVE key pair, in Z85 text as ZeroMQ takes it."""

    public: bytes
    secret: bytes

    @classmethod
    def new(cls) -> KeyPair:
        """Return a fresh pair."""
        return cls(*zmq.curve_keypair())


class CurveAuthenticator:
    """Authorizes peers of the tcp sockets of a context by public key, for each domain."""

    def __init__(self, context: zmq.Context[Any]) -> None:
        # Imports asyncio, which a process without tcp does not need.
        from zmq.auth.thread import ThreadAuthenticator

        self._allowed: dict[str, set[bytes]] = {}
        self._authenticator = ThreadAuthenticator(context)
        self._authenticator.start()
        self._authenticator.thread.name = "monarch-authenticator"

    def allow(self, domain: str, keys: Iterable[bytes]) -> None:
        """Let the holders of these keys connect to sockets of a domain."""
        if domain not in self._allowed:
            self._allowed[domain] = set()
            self._authenticator.configure_curve_callback(domain, credentials_provider=_Known(self._allowed[domain]))
        self._allowed[domain].update(keys)

    def bind(
        self,
        socket: zmq.Socket[bytes],
        address: str,
        keys: KeyPair,
        domain: str,
        lease: float,
        heartbeats: bool = True,
    ) -> str:
        """Bind a socket on a free port with CURVE; return the address with the port. ZMQError if that fails.

        Args:
            socket: the socket of the context.
            address: without a port, or with one that must be free.
            keys: the keys of this process.
            domain: whose keys may connect.
            lease: seconds of silence after which a peer counts as lost.
            heartbeats: as in ``over_network``.
        """
        socket.set(zmq.ZAP_DOMAIN, domain.encode())
        socket.set(zmq.CURVE_SERVER, 1)
        socket.set(zmq.CURVE_SECRETKEY, keys.secret)
        socket.set(zmq.CURVE_PUBLICKEY, keys.public)
        over_network(socket, lease, heartbeats)
        socket.set(zmq.BACKLOG, _BACKLOG)
        # For strangers too: at most one piece is held, and no longer than this.
        socket.set(zmq.MAXMSGSIZE, LARGEST)
        socket.set(zmq.HANDSHAKE_IVL, min(int(lease * 1000), HANDSHAKE_MS))
        has_port = address.rpartition(":")[2].isdigit()
        socket.bind(address if has_port else f"{address}:*")
        bound: Any = socket.get(zmq.LAST_ENDPOINT)
        return bound.decode().rstrip("\0")

    def close(self) -> None:
        """Stop its thread."""
        self._authenticator.stop()


class _Known:
    def __init__(self, keys: set[bytes]) -> None:
        self._keys = keys

    def callback(self, _domain: str, key: bytes) -> bool:
        return key in self._keys
