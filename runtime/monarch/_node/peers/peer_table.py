"""The peers of a process: lookup, connections to new ones, deaths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import RLock
from typing import Any

import zmq

from monarch._core.causes import Cause, Refused, Stopped
from monarch._node.events import NodeEvents
from monarch._node.peers.hosts import HostConnections
from monarch._node.peers.peer import GonePeer, IpcPeer, LocalPeer, Peer, RemotePeer, only_peer
from monarch._node.peers.port_table import PortTable
from monarch._procs.rank.output import brief
from monarch._procs.session_folder import host_of
from monarch._wire import messages as m
from monarch._wire.receiving.loop import ReceiveLoop


class PeerTable:
    """All processes that this one sends messages to.

    Args:
        proc: id of this process.
        root: proc id of the program that controls the session.
        hosts: the connections to other hosts.
        receive_loop: the receive loop of this process.
        ports: the open ports, whose calls fail when a peer dies.
        events: told of deaths.
        deliver: handles a message to this process itself.
    """

    def __init__(
        self,
        proc: str,
        root: str,
        hosts: HostConnections,
        receive_loop: ReceiveLoop,
        ports: PortTable,
        events: NodeEvents,
        deliver: Callable[[bytes, Sequence[Any]], None],
    ) -> None:
        self.proc = proc
        self.deliver = deliver
        self.receive_loop = receive_loop
        self.context: zmq.Context[zmq.Socket[bytes]] = hosts.context
        self.folder = hosts.folder
        self.hello = hosts.hello
        self.lock = RLock()
        self.known: dict[str, Peer] = {}
        """By proc id; written under ``lock``, read without it."""
        self.deaths = 0
        """How many peers have died. Written under ``lock``, after the peer is marked as dead."""
        self.pids: dict[str, int] = {}
        """Of processes of this host that were started from here. Leader only writes."""
        self.root = root
        """Proc id of the controlling program; changes when another one takes over."""
        self._hosts = hosts
        self._ports = ports
        self._events = events

    def get(self, proc: str, starting: bool = False) -> Peer:
        """Return a peer by its proc id, and watch it unless it was started from here."""
        peer = self.known.get(proc)
        return peer if peer is not None else self._new(proc, starting)

    def _new(self, proc: str, starting: bool) -> Peer:
        hosts, host, gateway = self._hosts, host_of(proc), None
        if host != hosts.host:
            why = hosts.out_of_reach(host)
            if why is not None:
                return self.gone(proc, why)
            # Before the lock, which must not be held while waiting for another one.
            gateway = hosts.gateway(host)
        with self.lock:
            # Only one connection, to keep messages in order.
            peer = self.known.get(proc)
            if peer is not None:
                return peer
            if gateway is not None:
                peer = RemotePeer(self, proc, gateway)
            else:
                peer = LocalPeer(self, proc) if proc == self.proc else IpcPeer(self, proc, starting)
            peer.starting = starting
            peer = only_peer(self.known, peer)
        if peer.dead is None and host in hosts.lost and (why := hosts.out_of_reach(host)):
            self._end_now(peer, why)
        # The loss of a host covers its agent, and this process ends with the root.
        if not starting and proc not in (self.proc, self.root) and not proc.endswith("/agent"):
            # A rank asks the agent of its own host, which also hears of lost hosts.
            self.to_agent(hosts.host if hosts.in_rank else host, m.Watch(self.proc, proc))
            agent = self.known.get(f"{hosts.host}/agent") if host == hosts.host else None
            if agent is not None and agent.dead is not None and peer.dead is None:
                self._end_now(peer, agent.dead)
        return peer

    def _end_now(self, peer: Peer, why: m.Dead) -> None:
        """End a new peer whose host was lost meanwhile: the loss was reported without it."""
        dead = m.Dead(peer.proc, why.cause, why.expected, [])
        peer.end(dead)
        with self.lock:
            self.deaths += 1
        # Another thread may have found it alive, and wait for it.
        self._post_loss([(peer, dead)])

    def _post_loss(self, ended: Sequence[tuple[Peer, m.Dead]]) -> None:
        """Fail the calls that wait for peers, soon, in the receiving thread."""

        def lose() -> None:
            for peer, dead in ended:
                self._ports.lose(peer, dead)

        self.receive_loop.post(lose)

    def gone(self, proc: str, why: m.Dead | None = None) -> Peer:
        """Return a peer that is unreachable, or died before anything was sent to it."""
        dead = m.Dead(proc, why.cause, why.expected, []) if why is not None else None
        with self.lock:
            self.deaths += dead is not None
            return self.known.setdefault(proc, GonePeer(self, proc, dead))

    def forget(self, host: str) -> None:
        """Forget the processes of a host that this process has left; calls that wait for them fail."""
        with self.lock:
            gone = [self.known.pop(proc) for proc, peer in list(self.known.items()) if peer.host == host]
        ended = [(peer, m.Dead(peer.proc, Stopped(), True, [])) for peer in gone if peer.dead is None]
        # References to them keep the peers.
        for peer, dead in ended:
            peer.end(dead)
        with self.lock:
            self.deaths += len(ended)
        self._post_loss(ended)

    def to_agent(self, host: str, message: m.AnyMessage) -> None:
        """Send to the agent of a host."""
        self.get(f"{host}/agent").send(m.encode(message))

    def end(self, dead: m.Dead) -> None:
        """Fail calls that wait for a dead process; in the receiving thread."""
        peer = self.get(dead.proc) if dead.proc in self.known else self.gone(dead.proc)
        if peer.dead is not None:
            return
        events = self._events
        # First, so that whoever sees the death also sees its open verdict.
        events.dying.tell(dead)
        peer.end(dead)
        with self.lock:
            self.deaths += 1
        calls = self._ports.lose(peer, dead)
        if not dead.expected:
            events.lost.tell(dead)
        self.pids.pop(dead.proc, None)
        events.proc_died.tell(dead.proc)
        events.died.tell(dead, calls)
        # It stays known while this process lives; of its output, only the lines that errors quote.
        dead.tails = [] if dead.expected else brief(dead.tails)

    def lose_host(self, host: str, cause: Cause, expected: bool = False) -> None:
        """Mark a host, with all of its processes, as lost or shut down."""
        self._hosts.lose(host, cause, expected)
        # Again, for those that another thread adds before it can see the death of the agent.
        while procs := self._alive_on(host):
            for proc in procs:
                self.end(m.Dead(proc, cause, expected, []))

    def _alive_on(self, host: str) -> list[str]:
        known = list(self.known.items())
        return [proc for proc, peer in known if peer.host == host and peer.dead is None and proc != self.proc]

    def ready(self, ready: m.Ready, _: Sequence[Any]) -> None:
        """Note that a process started from here listens."""
        peer = self.known.get(ready.src)
        if peer is not None:
            if peer.host == self._hosts.host:
                self.pids[ready.src] = ready.pid
            peer.ready()

    def greeted(self, hello: m.Hello, _: Sequence[Any]) -> None:
        """Refuse a process that speaks another version of the protocol."""
        if hello.version != m.VERSION:
            reason = f"{self.proc} speaks protocol version {m.VERSION}, {hello.proc} speaks {hello.version}"
            self.get(hello.proc).send(m.encode(m.Refused(m.VERSION, self.proc, reason)))

    def refused(self, refused: m.Refused, _: Sequence[Any]) -> None:
        """Count a process that speaks another version of the protocol as dead."""
        self.end(m.Dead(refused.proc, Refused(refused.reason), False, []))

    def close(self, linger_ms: int) -> None:
        """Close the connections; queued messages have that many milliseconds to leave."""
        for peer in self.known.values():
            if isinstance(peer, IpcPeer):
                peer.close(linger_ms)
