"""The program's side of a session: its node, the agent of this host, and the attached hosts."""

from __future__ import annotations

import atexit
import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import zmq

from monarch._actors.construction import construct
from monarch._actors.executors import ThreadExecutor
from monarch._actors.mailbox import NOTHING, Mailbox
from monarch._actors.table import actors_of
from monarch._core.causes import Cause, HostLost
from monarch._meshes.procs.agents import AgentsSlot
from monarch._meshes.procs.limits import check_session
from monarch._meshes.registry import meshes_of
from monarch._node.current import current_node, has_node
from monarch._node.future import Future, Promise, in_thread
from monarch._node.node import Node
from monarch._procs.session_folder import (
    TEND,
    host_id,
    host_of,
    make_folder,
    remove_folder,
)
from monarch._session.controllers import CONTROLLERS, ControllerDirectory
from monarch._session.greeting import AgentAddress, Greeting, Greetings, Refusal, answers_of
from monarch._session.host_watch import HostWatch
from monarch._session.local_agent import LocalAgent
from monarch._session.orderly_end import end_processes
from monarch._session.output import OutputView
from monarch._session.partition import Partitions
from monarch._session.routes.uplinks import Uplinks
from monarch._session.wiring import wire
from monarch._supervision.faults import Faults
from monarch._wire import messages as m
from monarch._wire.descriptors import raise_limit
from monarch._wire.keys import CurveAuthenticator, KeyPair
from monarch._wire.receiving.timers import until_next
from monarch.config import STOP_CLEANUP
from monarch.exceptions import MonarchError, SpawnError, StoppedError

_LISTENING_S = 60.0
"""Seconds for the agent of this host to start and to listen, on a busy machine."""
_ATTACHING_S = 120.0
"""Seconds to wait for another thread that attaches hosts; with the usual patience, it takes less."""


class Session:
    """The session of a program: its node, host agents and hosts."""

    def __init__(self) -> None:
        raise_limit()
        check_session()
        self.folder = make_folder()
        host = host_id(self.folder)
        proc = f"{host}/c{secrets.token_hex(3)}"
        try:
            self.node = node = Node(proc, self.folder, proc)
            wire(node)
            node.hosts.secret = secrets.token_bytes(32)
        except BaseException:
            remove_folder(self.folder)
            raise
        self.pid = os.getpid()
        self._local = LocalAgent(node, self.folder, self._local_agent_lost)
        self._watch = HostWatch(node, lambda host: self.host_lost(host, HostLost(node.hosts.name_of(host))))
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
        self._greetings = Greetings(self.node)
        self._attaching = threading.Lock()
        """Held by a thread that attaches hosts, which waits for them: another one would take or release the same ones.
        See ``one_attachment``."""
        self.output = OutputView(node)
        # Before the faults: the last output of a rank is shown before its death is reported.
        node.events.dying.subscribe(self.output.ended)
        node.events.died.subscribe(self._on_dead)
        meshes_of(node).stopping.subscribe(self.output.stops)
        self._faults = Faults(node)
        actors_of(node).on_create = self._create
        actors_of(node).on_halt = self._halt
        node.part(AgentsSlot).agents = self
        self.output_options = self.output.configure
        self._uplinks = Uplinks(node, self.output, self._watch.watch, self._watch.forget)
        self._partitions = Partitions(node, self.host_lost, self._uplinks.tree.parted)
        node.dispatch.handle(m.Listening, lambda listening, _: self._on_listening(listening))
        node.dispatch.handle(m.Refused, self._on_refused)
        node.add_part(self)
        actors_of(node).others[CONTROLLERS] = ControllerDirectory(node)
        node.receive_loop.start()
        self._tend()

    def _tend(self) -> None:
        if not self.node.closed:
            try:
                self.node.tend()
            finally:
                self.node.receive_loop.call_later(until_next(TEND, time.monotonic()), self._tend)

    # The agent of this host

    def need_agent(self) -> None:
        """Start the agent of this host, unless it runs, and connect it to the other hosts."""
        if self._local.start() and self._interfaces and self.node.hosts.known:
            assert self.node.hosts.keys is not None
            for interface in list(self._interfaces):
                self._open_own_agent(self.node.hosts.keys, interface)
            self._tell_all()

    @property
    def agent_pid(self) -> int:
        """The pid of this host's agent; 0 if none runs."""
        return self._local.pid

    def _local_agent_lost(self) -> None:
        self._opened.clear()
        self._table.pop(self.node.host, None)

    def base_env(self, host: str) -> dict[str, str | None]:
        """Return changes of this program's environment since the agent of a host was started."""
        return self._local.changed_env() if host == self.node.host else {}

    # Actors in this process

    def _create(self, create: m.Create, more: Sequence[Any]) -> None:
        mailbox = Mailbox(
            self.node, create.actor, ThreadExecutor(self.node, f"monarch-{create.actor}"), actors_of(self.node)
        )
        actors_of(self.node).here[create.actor] = mailbox
        mailbox.executor.post(lambda: construct(mailbox, create, more))

    def _halt(self, halt: m.Halt) -> None:
        mailbox = actors_of(self.node).here.get(halt.actor)

        def answer(failure: bytes | None) -> None:
            status, body = (m.RESULT, NOTHING) if failure is None else (m.ERROR, failure)
            self.node.replies.send(halt.src, halt.port, 0, status, body)

        if mailbox is None:
            answer(None)
        else:
            mailbox.halt(halt.reason, answer)

    def _on_dead(self, dead: m.Dead, calls: list[str]) -> None:
        host, _, name = dead.proc.partition("/")
        if name == "agent" and host in self.node.hosts.known:
            # It has reported that it takes nothing from here.
            self.host_lost(host, dead.cause)

    # Other hosts

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
                _closed()
            raise SpawnError(f"hosts cannot be attached: {error}") from error
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
                _closed()
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
        peers = self.node.peers.known
        with self.node.peers.lock:
            for proc in [proc for proc, peer in peers.items() if peer.host == host]:
                del peers[proc]

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
        # Those that others hang on pass their goodbyes on, and come last.
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

    # The end

    def close(self, timeout: float) -> None:
        """End everything: ranks, which clean up first, agents, sockets, folder.

        Args:
            timeout: seconds for the ranks, and for the agent of this host.
        """
        node = self.node
        if os.getpid() != self.pid or node.closed:
            # A fork of the program has a copy of the session's memory, but not the session.
            return
        self._faults.ends = True
        own = {node.host, *node.hosts.known} - set(self.detached)
        try:
            end_processes(node, timeout, own, "the session was shut down")
        finally:
            # A Ctrl-C ends the wait, not the rest.
            self._close(timeout)

    def _close(self, timeout: float) -> None:
        node = self.node
        self._faults.flush()
        self.output.flush()
        if self._listening is not None:
            # Another thread may wait for it.
            self._listening.complete(_closed)
        self._users.clear()
        self.release([host for host in node.hosts.known if host not in self.detached], orderly=False)
        self._local.dismiss()
        if self._door is not None:
            self._door.close()
        node.close(linger_ms=500)
        self.output.close()
        self._local.close(timeout)
        remove_folder(self.folder)


def _closed() -> NoReturn:
    raise StoppedError("the session of this program was shut down")


def session_of(node: Node) -> Session | None:
    """Return the session of a program; None in a rank."""
    return node.find_part(Session)


def need_session(node: Node) -> Session:
    """Return the session of a program.

    Raises:
        MonarchError: this process is a rank.
    """
    session = session_of(node)
    if session is None:
        raise MonarchError(f"this process is a rank ({node.proc}); only the program has the session")
    return session


def start() -> Node:
    """Open the session of this program and return its node."""
    return Session().node


def shutdown_context(host_timeout: float | None = None) -> Future[None]:
    """End this program's session with its processes, hosts and sockets. The next use starts a new one.

    Args:
        host_timeout: seconds to wait for the processes to end; default: 10.

    Raises:
        ValueError: the timeout is negative.
    """
    if host_timeout is not None and not host_timeout >= 0:
        raise ValueError(f"host_timeout: expected seconds, at least 0, got {host_timeout!r}")
    if not has_node():
        return _Nothing()
    node = current_node()
    session = session_of(node)
    if session is None:
        return _Nothing()
    return in_thread(node, "shutdown_context()", lambda: session.close(10.0 if host_timeout is None else host_timeout))


class _Nothing(Future[None]):
    """A future that is already done."""

    __slots__ = ()

    def __init__(self) -> None:
        self.done = True
        self._value = None
        self._error = None
        self._callbacks = None
        self._lock = threading.Lock()
        self.thread = None
        self._label = "shutdown_context()"


@atexit.register
def _at_exit() -> None:
    if has_node():
        session = session_of(current_node())
        if session is not None and session.pid == os.getpid():
            session.close(STOP_CLEANUP() + 1)
