"""The other hosts of a process: connections to reachable ones, and causes of lost ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from socket import gethostname
from threading import RLock
from typing import TYPE_CHECKING, Any

import zmq

from monarch._core.causes import Cause, NotAttached
from monarch._node.peers.gateway import Gateway
from monarch._node.spreads.hurrying import hurry
from monarch._procs.session_folder import ipc_address
from monarch._wire import messages as m
from monarch._wire.links import Link, make_context
from monarch._wire.tcp import LEASE_S
from monarch.config import TREE_HOSTS
from monarch.exceptions import SupervisionError

if TYPE_CHECKING:
    from monarch._node.spreads.spreads import Spreads
    from monarch._wire.keys import KeyPair

_TOGETHER = 128
"""Connections that share a thread of ZeroMQ, whose work for heartbeats grows with the square of their number."""


class HostConnections:
    """The connections from one process to other hosts.

    Args:
        host: id of the host of this process.
        folder: where the ipc sockets of that host are.
        hello: the first message on each connection.
        context: for the sockets.
    """

    def __init__(self, host: str, folder: str, hello: bytes, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.host = host
        self.folder = folder
        self.hello = hello
        self.context = context
        self._contexts: list[zmq.Context[zmq.Socket[bytes]]] = []
        """More of them, each with a thread of its own, for connections beyond the first. Written under ``_lock``."""
        self.in_rank = False
        """Whether this process is a rank, which sends to other hosts through its agent. Set before anything is sent."""
        self._agent = f"{host}/agent"
        self._lock = RLock()
        self.gateways: dict[str, Gateway] = {}
        """By host; written under ``_lock``."""
        self.known: dict[str, tuple[str, str]] = {}
        """Owner address and public key of the hosts that this process talks to directly."""
        self.seen_at: dict[str, str] = {}
        """Addresses at which other hosts reach a host that this process reaches by a forwarded port."""
        self.lost: dict[str, m.Dead] = {}
        """Causes of lost or ended hosts. Leader only writes; an entry is valid until the host is ``known``."""
        self._joined: dict[str, None] = {}
        """In order, hosts that pass messages on. Written by the threads that attach hosts, one at a time."""
        self.spreads: Spreads
        """Messages to many hosts. Set once, before anything is sent."""
        self._keys_of: dict[str, KeyPair] = {}
        """Key pairs for hosts that know another one than ``keys``. Single operations only."""
        self.names: dict[str, str] = {}
        """Names of other hosts for people, by id. Written before a host is attached."""
        self.keys: KeyPair | None = None
        self.secret = b""
        """Of the session: its holders may read and write the buffers of its processes. Set before anything is sent."""
        self.lease = LEASE_S
        """Seconds of silence after which a host counts as lost."""

    def name_of(self, host: str) -> str:
        """Return the name of a host for people: that of its machine, or its id where that is all that is known."""
        return gethostname() if host == self.host else self.names.get(host, host)

    def out_of_reach(self, host: str) -> m.Dead | None:
        """Return why a host is unreachable: lost or unknown; None if messages can be sent there.

        A rank sends through the agent of its own host, which answers for hosts that it cannot reach.
        """
        if host == self.host or host in self.known or self.in_rank:
            return None
        known = self.lost.get(host)
        return known or m.Dead(host, NotAttached(host), False, [])

    def gateway(self, host: str) -> Gateway:
        """Return the connection to a reachable host; only one, to keep messages in order."""
        gateway = self.gateways.get(host)
        if gateway is None:
            with self._lock:
                gateway = self.gateways.get(host)
                if gateway is None:
                    gateway = self._only_gateway(host, self._new_gateway(host))
        return gateway

    def _only_gateway(self, host: str, made: Gateway) -> Gateway:
        """Return the gateway to a host, with the lock held: a __del__ that ran meanwhile may have made another one."""
        gateway = self.gateways.setdefault(host, made)
        if gateway is not made:
            made.close()
        return gateway

    def _new_gateway(self, host: str) -> Gateway:
        agent = f"{host}/agent"
        if not self.in_rank and host != self.host:
            if self.keys is None or host not in self.known:
                why = self.out_of_reach(host)
                raise SupervisionError(f"cannot send to host {host}: it {why.reason if why else 'is unknown here'}")
            return Gateway(self.connect(host), agent, True)
        return Gateway(Link(self.context, ipc_address(self.folder, self._agent), self.hello), agent, False)

    def connect(self, host: str, hurries: bool = False) -> Link:
        """Return another connection to a known host; see ``Link``."""
        return self.connect_to(host, self.known[host], hurries)

    def connect_to(self, host: str, where: tuple[str, str], hurries: bool = True) -> Link:
        """Return a connection to a host with this owner address and public key."""
        address, public = where
        keys = self._keys_of.get(host, self.keys)
        return Link(
            self._context(), address, self.hello, keys, public.encode(), self.lease, heartbeats=True, hurries=hurries
        )

    def _context(self) -> zmq.Context[zmq.Socket[bytes]]:
        """Return the context for one more connection."""
        place = len(self.gateways) // _TOGETHER
        if not place:
            return self.context
        with self._lock:
            while len(self._contexts) < place:
                self._contexts.append(make_context())
            return self._contexts[place - 1]

    def join(self, hosts: Sequence[str]) -> None:
        """Add hosts that may forward messages to others, once there are enough of them."""
        self._joined.update(dict.fromkeys(hosts))
        joined = [host for host in self._joined if host in self.known]
        least = TREE_HOSTS()
        if least and len(joined) >= least:
            self.spreads.group([self.gateway(host) for host in joined])
            self.spreads.lease = self.lease
            self.spreads.connect = self.connect
            self.spreads.least = least

    def cast(self, src: str, far: Sequence[tuple[Gateway, list[str]]], port: int, frames: Sequence[Any]) -> None:
        """Send one message to procs of some hosts.

        Args:
            src: the sender.
            far: connections to the hosts, with the procs of each.
            port: whose replies the agents gather; 0 for none.
            frames: the frames of the message.
        """
        if len(far) > 1 and self.spreads.least:
            self.spreads.cast(far, port, frames)
        else:
            for gateway, procs in far:
                gateway.cast(src, procs, port, frames)

    def hurry(self, hosts: Iterable[str]) -> None:
        """Let what was sent to some hosts arrive soon, and their answers, even if a host on the way hangs."""
        if self.spreads.least:
            gateways = self.gateways
            hurry(self.spreads, [gateways[host] for host in dict.fromkeys(hosts) if host in gateways])

    def adopt(self, host: str, link: Link, keys: KeyPair) -> None:
        """Use an existing connection as the gateway to another host, which was made with a key pair."""
        self._keys_of[host] = keys
        self.gateways[host] = Gateway(link, f"{host}/agent", True)

    def has_met(self, host: str) -> bool:
        """Return whether this process has known a host in this session."""
        return host == self.host or host in self.known or host in self.gateways

    def address_of(self, host: str) -> str:
        """Return the address, without a port, of another host; empty if unknown here."""
        address = self.seen_at.get(host) or self.known.get(host, ("", ""))[0]
        return address.removeprefix("tcp://").rpartition(":")[0].strip("[]")

    def lose(self, host: str, cause: Cause, expected: bool) -> None:
        """Mark a host as lost or shut down. Later messages to it are dropped."""
        if host != self.host:
            # First: peers made from now on are dead at once.
            self.lost[host] = m.Dead(host, cause, expected, [])
        gateway = self.gateways.get(host)
        if gateway is not None:
            gateway.close()
            if gateway.spreads is not None:
                self.spreads.lost(host)

    def close(self, linger_ms: int) -> None:
        """Close the connections to all hosts."""
        for gateway in self.gateways.values():
            gateway.close(linger_ms)

    def term(self) -> None:
        """Wait until all sockets are closed, and end the threads of ZeroMQ."""
        for context in [*self._contexts, self.context]:
            context.term()
