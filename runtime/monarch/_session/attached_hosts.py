"""The other hosts of a program: attached, greeted, lost and released."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import zmq

from monarch._core.causes import Cause
from monarch._node.future import Promise
from monarch._node.node import Node
from monarch._procs.session_folder import host_of
from monarch._session.greeting import AgentAddress, Greeting, Greetings, Refusal, answers_of
from monarch._session.host_watch import HostWatch
from monarch._session.local_agent import LocalAgent
from monarch._session.orderly_end import end_processes
from monarch._session.routes.uplinks import Uplinks
from monarch._wire import messages as m
from monarch._wire.keys import CurveAuthenticator, KeyPair
from monarch.config import STOP_CLEANUP
from monarch.exceptions import MonarchError, SpawnError, StoppedError

_LISTENING_S = 60.0
"""Seconds for the agent of this host to start and to listen, on a busy machine."""
_ATTACHING_S = 120.0
"""Seconds to wait for another thread that attaches hosts; with the usual patience, it takes less."""


class AttachedHosts:
    """The other hosts of a session: their attachments, connections and introductions to each other.

    Args:
        node: the node of the program.
    """

    _local: LocalAgent
    _watch: HostWatch
    _uplinks: Uplinks

    def __init__(self, node: Node) -> None:
        self.node = node
        self._lock = threading.RLock()
        """Held briefly by threads that listen, attach and release; the receiving thread drops lost hosts without it, in
        single operations, which are atomic."""
        self._door: CurveAuthenticator | None = None
        """Lock: ``_lock``."""
        self._address = ""
        """Of this program, for other hosts. Lock for writing: ``_lock``."""
        self._released: set[str] = set()
        """Hosts whose agents were told to end. Single operations only."""
        self._users: Counter[str] = Counter()
        """The number of attachments of each host. Lock: ``_lock``."""
        self.detached: dict[str, Any] = {}
        """Attached detached meshes, by host id: they outlive this session. Single operations only."""
        self._interfaces: dict[str, str] = {}
        """Addresses, with ports, at which this program listens. Lock: ``_lock``."""
        self._opening = threading.Lock()
        """Held while the agent of this host begins to listen, which waits for it."""
        self._opened: set[str] = set()
        """Addresses at which this host's agent listens. Lock: ``_opening``; cleared without it when the agent dies."""
        self._listening: Promise[m.Listening] | None = None
        """Set under ``_opening``, completed by the receiving thread."""
        self._table: dict[str, tuple[str, str]] = {}
        """Address and public key by host, for all agents. Single operations only."""
        self._forwarded: dict[str, dict[str, str]] = {}
        """By host: addresses of this program and its agent as that host connects to them, through forwarded ports."""
        self._greetings = Greetings(node)
        self._attaching = threading.Lock()
        """Held by a thread that attaches hosts, which waits for them: another one would take or release the same ones.
        See ``one_attachment``."""

    def listen(self, keys: KeyPair, interface: str, allowed: Sequence[str]) -> None:
        """Listen for agents of other hosts with allowed keys.

        Args:
            keys: the keys of this program; ignored if it already listens, since it has one pair.
            interface: address of this machine.
            allowed: public keys.
        """
        node = self.node
        with self._lock:
            if node.hosts.keys is None:
                node.hosts.keys = keys
            if self._door is None:
                self._door = CurveAuthenticator(node.hosts.context)
            self._door.allow("controller", [public.encode() for public in allowed])
            if interface not in self._interfaces:
                with node.inbox.binding:
                    # Heartbeats go by the connections to the agents.
                    self._interfaces[interface] = self._door.bind(
                        node.inbox.socket, f"tcp://{interface}", node.hosts.keys, "controller", node.hosts.lease, False
                    )
            if not self._address or not interface.startswith("127."):
                # From this machine the others can be reached as well.
                self._address = self._interfaces[interface]
            self._table[node.proc] = (self._address, node.hosts.keys.public.decode())

    def open_here(self, keys: KeyPair, interface: str, allowed: Sequence[str]) -> list[str]:
        """Listen for agents of other hosts, and let the agent of this host do so; return the addresses of both.

        Args:
            keys: the keys of this program, unless it has a pair.
            interface: address of this machine.
            allowed: public keys of the other agents.
        """
        self.listen(keys, interface, allowed)
        self._open_own_agent(keys, interface)
        return [self._table[self.node.proc][0], self._table[self.node.host][0]]

    def attach_forwarded(self, listening: m.Listening, here: Sequence[str]) -> None:
        """Prepare to attach a host whose connections go through forwarded ports.

        Args:
            listening: where the agent of the host listens; other hosts connect to its ``peer_address``.
            here: addresses of this program and of its agent, as the host connects to them.
        """
        node, host = self.node, host_of(listening.src)
        node.hosts.seen_at[host] = listening.peer_address
        self._forwarded[host] = dict(zip((node.proc, node.host), here, strict=True))

    def attach(
        self, hosts: list[m.Listening], keys: KeyPair, interface: str, own: bool = True, joins: bool = True
    ) -> None:
        """Connect to agents that listen on TCP, and introduce all to each other.

        Args:
            hosts: their addresses.
            keys: the keys of this program, unless it has a pair.
            interface: address of this machine at which they reach it.
            own: whether to start the agent of this host for it.
            joins: whether they pass messages on to others.
        """
        node = self.node
        self.listen(keys, interface, [host.public for host in hosts])
        with self._lock:
            for listening in hosts:
                host = host_of(listening.src)
                self._users[host] += 1
                node.hosts.known[host] = (listening.owner_address, listening.public)
                self._table[host] = (listening.peer_address, listening.public)
        try:
            if own or self._local.runs:
                self._open_own_agent(keys, interface)
            for host in [*node.hosts.known]:
                self._watch.watch(host)
            if joins:
                node.hosts.join([host_of(listening.src) for listening in hosts])
            self._tell_all()
            self._uplinks.arrange()
        except BaseException:
            self.release([host_of(listening.src) for listening in hosts], orderly=False)
            raise

    def _tell_all(self) -> None:
        """Introduce all hosts to each other."""
        common = m.encode(m.Hosts(self._table))
        for host in [*self.node.hosts.known, *([self.node.host] if self._opened else [])]:
            ways = self._forwarded.get(host, {})
            table = {name: (ways.get(name, at), key) for name, (at, key) in [*self._table.items()]} if ways else {}
            self.node.peers.get(f"{host}/agent").send(m.encode(m.Hosts(table)) if table else common)

    @contextmanager
    def one_attachment(self) -> Generator[None]:
        """Let no other thread of this program attach hosts meanwhile.

        Raises:
            MonarchError: another thread still does, after a time in which attachments end.
            StoppedError: the session is shut down meanwhile.
            SpawnError: what happens inside lacks a resource, such as file descriptors.
        """
        if not self._attaching.acquire(timeout=_ATTACHING_S):
            raise MonarchError(
                f"another thread of this program has been attaching hosts for {_ATTACHING_S:g} s; try again later"
            )
        try:
            yield
        except MonarchError:
            raise
        except (OSError, zmq.ZMQError) as error:
            if self.node.closed:
                raise_closed()
            raise SpawnError(f"cannot attach hosts: {error}") from error
        finally:
            self._attaching.release()

    def greet(
        self, agents: Sequence[AgentAddress], keys: KeyPair, timeout: float, patient: bool = False
    ) -> list[m.Listening | Refusal]:
        """Connect to agents that have this key pair, and return the answer of each, or why there is none.

        Args:
            agents: the addresses of the agents.
            keys: the pair.
            timeout: seconds for all of them.
            patient: whether to wait for the others when one has refused.
        """
        node, own = self.node, self._table[self.node.proc]
        greetings: list[Greeting] = []
        answers: list[m.Listening | Refusal] = []
        try:
            for each in agents:
                greetings.append(Greeting(node, self._greetings, each, keys, own))
            if node.closed:
                raise_closed()
            answers = answers_of(greetings, timeout, lambda src: host_of(src) in self._released, patient)
            return [
                self._adopt(greeting, answer, keys) if isinstance(answer, m.Listening) else answer
                for greeting, answer in zip(greetings, answers, strict=True)
            ]
        finally:
            for greeting in greetings:
                greeting.close()

    def _adopt(self, greeting: Greeting, listening: m.Listening, keys: KeyPair) -> m.Listening:
        """Use the connection of an exchange for the host, unless it has one."""
        node, address = self.node, greeting.agent.address
        # It may listen on all addresses of its machine; this one reaches it.
        machine = address.rpartition(":")[0]
        peer = f"{machine}:{listening.peer_address.rpartition(':')[2]}"
        host = host_of(listening.src)
        if host in node.hosts.known and host not in self._released:
            # Already attached: keep that connection.
            peer = self._table.get(host, (peer, ""))[0]
            return m.Listening(listening.src, node.hosts.known[host][0], peer, listening.public)
        node.hosts.known[host] = (address, listening.public)
        greeting.adopted = True
        node.hosts.adopt(host, greeting.link, keys)
        self._watch.watch(host)
        return m.Listening(listening.src, address, peer, listening.public)

    def _open_own_agent(self, keys: KeyPair, interface: str) -> None:
        """Open this host's agent to other hosts, so that ranks on all hosts reach each other."""
        node = self.node
        # Another thread may start the agent or attach hosts at the same time.
        with self._opening:
            if interface in self._opened:
                return
            self._local.start()
            self._listening = Promise(node, "the host agent")
            node.peers.to_agent(node.host, m.Listen(node.proc, f"tcp://{interface}", [keys.public.decode()]))
            listening = self._listening.get(_LISTENING_S)
            self._opened.add(interface)
            if node.host not in self._table or not interface.startswith("127."):
                self._table[node.host] = (listening.peer_address, listening.public)

    def _on_listening(self, listening: m.Listening) -> None:
        if host_of(listening.src) != self.node.host:
            self._greetings.listens(listening)
        elif self._listening is not None:
            self._listening.complete(lambda: listening)

    def _on_refused(self, refused: m.Refused, more: Sequence[Any]) -> None:
        if not self._greetings.refused(refused):
            self.node.peers.refused(refused, more)

    def host_lost(self, host: str, cause: Cause) -> None:
        """Give up a host whose connection broke, since messages may be lost."""
        self._uplinks.lost(host)
        self.node.hosts.known.pop(host, None)
        self._table.pop(host, None)
        self._forwarded.pop(host, None)
        self._watch.forget(host)
        self._users.pop(host, None)
        mesh = self.detached.pop(host, None)
        if mesh is not None and mesh not in self.detached.values():
            mesh.lost()
        self.node.peers.lose_host(host, cause, host in self._released)
        self._uplinks.arrange()

    def forget(self, host: str) -> None:
        """Drop the connection to a host and the state of its processes, so that it can be attached again."""
        node = self.node
        self._uplinks.tree.forget(host)
        gateway = node.hosts.gateways.pop(host, None)
        if gateway is not None:
            gateway.close(500)
        node.hosts.known.pop(host, None)
        self._table.pop(host, None)
        self._watch.forget(host)
        self._users.pop(host, None)
        self._released.discard(host)
        self.detached.pop(host, None)
        self.forget_peers(host)

    def forget_peers(self, host: str) -> None:
        """Drop the state of a host's processes."""
        self.node.peers.forget(host)

    def release(self, hosts: Sequence[str], orderly: bool = True) -> None:
        """Release an attachment of hosts, and end the agents that nobody uses any more.

        Args:
            hosts: their ids.
            orderly: whether processes of meshes that are on these hosts alone clean up before that.
        """
        with self._lock:
            last = {host for host in hosts if self._users[host] <= 1 and host in self.node.hosts.known}
        if orderly and last:
            end_processes(self.node, STOP_CLEANUP() + 1, last, "its hosts were shut down")
        # Those that relay others pass their goodbyes on, and come last.
        parents = self._uplinks.tree.parents
        for host in sorted(hosts, key=lambda host: host not in parents):
            with self._lock:
                # Less than one was not attached yet.
                self._users[host] = max(0, self._users[host] - 1)
                is_last = self._users[host] <= 0 and host in self.node.hosts.known
                if is_last:
                    self._released.add(host)
            if is_last:
                self.node.peers.to_agent(host, m.Bye(self.node.proc))

    def own_address(self) -> str:
        """Return the address, without a port, at which other hosts reach this program; empty without other hosts."""
        return self._address.removeprefix("tcp://").rpartition(":")[0].strip("[]")


def raise_closed() -> NoReturn:
    raise StoppedError("the session of this program was shut down")
