"""How an agent sends: to procs of its host by ipc, to all others through the agent of their host by tcp."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from monarch._procs.session_folder import host_of, ipc_address
from monarch._wire.keys import CurveAuthenticator, KeyPair
from monarch._wire.links import Inbox, Link
from monarch._wire.messages import VERSION, Hello, Hosts, Listening, Route, encode

Frames = Sequence[bytes | memoryview]


class Router:
    """The sockets of an agent.

    Args:
        context: that of this process.
        proc: id of the agent, ``<host id>/agent``.
        folder: the folder of the ipc sockets of this host.
        keys: its key pair, for tcp.
        lease: seconds of silence after which another host counts as lost.
    """

    def __init__(self, context: zmq.Context[Any], proc: str, folder: str, keys: KeyPair, lease: float) -> None:
        self.context = context
        self.proc = proc
        self.host = host_of(proc)
        self.folder = folder
        self.inbox = Inbox(context, ipc_address(folder, proc))
        self.keys = keys
        self.lease = lease
        self.watched_by = ""
        """The controller whose own connection to this agent has heartbeats, by which both notice a loss."""
        self.overtaking: Callable[[str], None] = lambda dst: None
        """Called with the receiver before a message goes to a controller or another host, past those on their way by
        other agents. Set once."""
        self.carrying: Callable[[str, Frames], bool] = lambda dst, frames: False
        """Called with such a message first; returns whether it has been sent by another agent. Set once."""
        self.hurries = ""
        """The controller, while a connection to it must be made within a lease or never."""
        self.authenticator: CurveAuthenticator | None = None
        self.owner_socket: zmq.Socket[bytes] | None = None
        self.peer_socket: zmq.Socket[bytes] | None = None
        self.owner_monitor: zmq.Socket[bytes] | None = None
        self.source = -1
        """Descriptor of the connection of the message at hand, if it is one to the owner's socket; -1 otherwise."""
        self._hosts: dict[str, tuple[str, str]] = {}
        self._links: dict[str, Link] = {}
        self._lost: dict[zmq.Socket[bytes], tuple[str, Link]] = {}
        # Descriptors of connections to the owner's socket: all of them, and the candidates for the owner's.
        self._accepted: set[int] = set()
        self._owned: set[int] | None = None
        self._earlier: list[zmq.Socket[bytes]] = []
        self._idle: list[zmq.Socket[bytes]] = []
        self._broken: set[str] = set()
        """Hosts to which a connection broke: another one must be made within a lease."""

    def listen(self, address: str, owner: bytes, allowed: list[bytes], one_port: bool = False) -> Listening:
        """Bind the tcp sockets; ZMQError if the address is not one of this host.

        Sockets bound before, at another address of this host, stay. With ``one_port``, the owner and other hosts share
        one, and the loss of the owner is that of the connection to it.
        """
        if self.authenticator is None:
            self.authenticator = CurveAuthenticator(self.context)
        self.authenticator.allow("owner", [owner])
        self.authenticator.allow("peers", [owner, *allowed])
        if one_port:
            return self._listen_once(address)
        owners, peers = (self._tcp_socket() for _ in range(2))
        monitor = owners.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        # A given port is the owner's; the other one may be any free port.
        bare = address if not address.rpartition(":")[2].isdigit() else address.rpartition(":")[0]
        try:
            listening = Listening(
                self.proc,
                self.authenticator.bind(owners, address, self.keys, "owner", self.lease),
                self.authenticator.bind(peers, bare, self.keys, "peers", self.lease),
                self.keys.public.decode(),
            )
        except zmq.ZMQError:
            _close(owners, peers)
            monitor.close(0)
            raise
        self._earlier += [socket for socket in (self.owner_socket, self.peer_socket) if socket is not None]
        self.owner_socket, self.peer_socket, self.owner_monitor = owners, peers, monitor
        return listening

    def _listen_once(self, address: str) -> Listening:
        assert self.authenticator is not None
        socket = self._tcp_socket()
        try:
            bound = self.authenticator.bind(socket, address, self.keys, "peers", self.lease)
        except zmq.ZMQError:
            _close(socket)
            raise
        self.owner_socket = self.peer_socket = socket
        return Listening(self.proc, bound, bound, self.keys.public.decode())

    def receive(self, socket: zmq.Socket[bytes]) -> list[Any]:
        """Return the next message at a socket, and note its source; zmq.Again if there is none."""
        self.source = -1
        if socket is not self.owner_socket:
            return socket.recv_multipart(zmq.NOBLOCK)
        first = socket.recv(zmq.NOBLOCK, copy=False)
        self.source = int(first.get(zmq.SRCFD))
        return [first.bytes, *(socket.recv_multipart(zmq.NOBLOCK) if first.more else [])]

    def _tcp_socket(self) -> zmq.Socket[bytes]:
        socket = self.context.socket(zmq.PULL)
        socket.set_hwm(0)
        socket.set(zmq.LINGER, 0)
        return socket

    def learn(self, hosts: Hosts) -> None:
        """Note where other hosts listen, and authorize them."""
        self._hosts.update(hosts.hosts)
        if self.authenticator is not None:
            self.authenticator.allow("peers", [public.encode() for _, public in hosts.hosts.values()])

    def note(self, name: str, address: str, public: str) -> None:
        """Note where a program listens that is not authorized: it only gets messages."""
        self._hosts[name] = (address, public)

    def address_of(self, name: str) -> Hosts:
        """Return the address of a host or a controller."""
        return Hosts({name: self._hosts[name]} if name in self._hosts else {})

    def forget(self, stay: Sequence[str]) -> None:
        """The controller is gone, and with it all that it announced of other hosts, but those that stay.

        Another program may have said where it listens, and be about to become the controller.
        """
        self._hosts = {name: where for name, where in self._hosts.items() if name in stay or "/" in name}
        self._broken &= self._hosts.keys()

    def forget_address(self, name: str) -> None:
        """Drop the links to a host or a controller."""
        self._hosts.pop(name, None)
        self._broken.discard(name)
        self.drop(name)

    def is_here(self, proc: str) -> bool:
        """Return whether a proc belongs to this host and has a socket in its folder."""
        return host_of(proc) == self.host

    def knows(self, proc: str) -> bool:
        """Return whether a proc is reachable."""
        return self.is_here(proc) or proc in self._hosts or host_of(proc) in self._hosts

    def listens(self, proc: str) -> bool:
        """Return whether a proc is reachable now: one of this host has made its socket."""
        if self.is_here(proc):
            return os.path.exists(ipc_address(self.folder, proc).removeprefix("ipc://"))
        return self.knows(proc)

    def send(self, dst: str, frames: Frames) -> bool:
        """Send a message to any proc of the session.

        Returns:
            False if it is unreachable: its host was lost, or is not in this session. Nothing was sent then.
        """
        if not self.is_here(dst):
            if self.carrying(dst, frames):
                return True
            self.overtaking(dst)
        return self.post(dst, frames)

    def post(self, dst: str, frames: Frames) -> bool:
        """Send a message as ``send`` does, whatever is on its way by other agents."""
        if self.is_here(dst):
            self._local(dst).send(bytes(frames[0]), frames[1:])
        elif dst in self._hosts:
            self._remote(dst).send(bytes(frames[0]), frames[1:])
        elif host_of(dst) in self._hosts:
            self._remote(host_of(dst)).send(encode(Route(dst, len(frames))), frames)
        else:
            return False
        return True

    def connect(self, name: str) -> None:
        """Connect to a host or a controller now; its loss is reported as that of any other."""
        self._remote(name)

    def _hello(self) -> bytes:
        return encode(Hello(VERSION, self.proc, os.getpid()))

    def _local(self, proc: str) -> Link:
        link = self._links.get(proc)
        if link is None:
            link = self._links[proc] = Link(self.context, ipc_address(self.folder, proc), self._hello())
        return link

    def _remote(self, name: str) -> Link:
        link = self._links.get(name)
        if link is None:
            address, public = self._hosts[name]
            keys, lease = self.keys, self.lease
            beats, hurries = name != self.watched_by, name == self.hurries or name in self._broken
            link = Link(self.context, address, self._hello(), keys, public.encode(), lease, beats, hurries)
            self._links[name] = link
            self._lost[link.monitor()] = (name, link)
        return link

    def drop(self, name: str) -> None:
        """Drop the link to a dead proc, a host or a controller, with what was not sent."""
        self._leave(name, 0)

    def rest(self, name: str) -> None:
        """Close the connection to a host or a controller, after what was sent; the next message opens it again."""
        self._leave(name, int(self.lease * 1000))

    def _leave(self, name: str, linger_ms: int) -> None:
        link = self._links.pop(name, None)
        if link is None:
            return
        # A closed link reports nothing, so nobody would take its monitor out of the loop.
        idle = [monitor for monitor, (_, watched) in self._lost.items() if watched is link]
        for monitor in idle:
            del self._lost[monitor]
        self._idle += idle
        link.close(linger_ms)

    def idle(self) -> list[zmq.Socket[bytes]]:
        """Return the sockets of ``monitors`` that nobody needs any more, once; the caller closes them."""
        idle, self._idle = self._idle, []
        return idle

    def monitors(self) -> list[zmq.Socket[bytes]]:
        """Sockets that become readable when the connection to another host is lost."""
        return list(self._lost)

    def lost(self, monitor: zmq.Socket[bytes]) -> str:
        """Drop a connection that such a socket reports as lost; return the host id, or proc id of the controller.

        Empty if it was dropped before, in favor of another connection or none.
        """
        name, link = self._lost.pop(monitor)
        # The link first: ZeroMQ blocks where it cannot deliver an event.
        link.close()
        monitor.close(0)
        if self._links.get(name) is not link:
            return ""
        del self._links[name]
        self._broken.add(name)
        return name

    def owner_lost(self) -> bool:
        """Handle events of the owner's socket; return whether its connection is lost. A stranger may connect and
        leave."""
        from zmq.utils.monitor import recv_monitor_message

        lost = False
        while self.owner_monitor is not None and self.owner_monitor.poll(0):
            news = recv_monitor_message(self.owner_monitor)
            event, fd = news["event"], news["value"]
            if event == zmq.EVENT_ACCEPTED:
                self._accepted.add(fd)
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                # The event does not say whose; connections without the key are closed soon.
                if self._owned is None:
                    self._owned = set(self._accepted)
            elif event == zmq.EVENT_DISCONNECTED:
                self._accepted.discard(fd)
                if self._owned is not None and fd in self._owned:
                    self._owned.discard(fd)
                    lost = lost or not self._owned
        if lost:
            self._owned = None
        return lost

    def own(self) -> bool:
        """Note the connection of the message at hand, by which the owner has identified itself.

        The source is unknown if the message came by another agent; then all that there are may be the owner's.

        Returns:
            Whether the connection lasts.
        """
        self._owned = set(self._accepted) if self.source < 0 else self._accepted & {self.source}
        return bool(self._owned)

    def own_too(self) -> bool:
        """Note one more connection of the owner, by which the message at hand has come.

        Returns:
            Whether it or an earlier one lasts.
        """
        if self.owner_monitor is None or self.source < 0:
            return True
        lost = self.owner_lost()
        if self.source not in self._accepted:
            return not lost
        self._owned = {*(self._owned or ()), self.source}
        return True

    def close(self) -> None:
        """Close everything; wait a moment for the last messages."""
        for link in self._links.values():
            link.close(200)
        for monitor in [*self._lost, *self._idle]:
            monitor.close(0)
        self.inbox.close()
        _close(*self._earlier, self.owner_socket, self.peer_socket)
        if self.authenticator is not None:
            self.authenticator.close()


def _close(*sockets: zmq.Socket[bytes] | None) -> None:
    for socket in dict.fromkeys(sockets):
        if socket is not None:
            socket.disable_monitor()
            socket.close(0)
