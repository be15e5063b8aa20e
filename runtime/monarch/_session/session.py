"""The program's side of a session: its node, the agent of this host, and the attached hosts."""

from __future__ import annotations

import atexit
import os
import secrets
import threading
import time
from collections.abc import Sequence
from typing import Any

from monarch._actors.construction import construct
from monarch._actors.executors import ThreadExecutor
from monarch._actors.mailbox import NOTHING, Mailbox
from monarch._actors.table import actors_of
from monarch._core.causes import HostLost
from monarch._meshes.procs.agents import AgentsSlot
from monarch._meshes.procs.limits import check_session
from monarch._meshes.registry import meshes_of
from monarch._node.current import current_node, has_node
from monarch._node.future import Future, in_thread
from monarch._node.node import Node
from monarch._procs.session_folder import host_id, make_folder, remove_folder
from monarch._session.attached_hosts import AttachedHosts, raise_closed
from monarch._session.controllers import CONTROLLERS, ControllerDirectory
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
from monarch._wire.receiving.aside import tell
from monarch._wire.receiving.timers import until_next
from monarch.config import STOP_CLEANUP
from monarch.exceptions import MonarchError


class Session(AttachedHosts):
    """The session of a program: its node, host agents and hosts."""

    def __init__(self) -> None:
        raise_limit()
        check_session()
        self.folder = make_folder()
        host = host_id(self.folder)
        proc = f"{host}/c{secrets.token_hex(3)}"
        try:
            node = Node(proc, self.folder, proc)
            wire(node)
            node.hosts.secret = secrets.token_bytes(32)
        except BaseException:
            remove_folder(self.folder)
            raise
        super().__init__(node)
        self.pid = os.getpid()
        self._local = LocalAgent(node, self.folder, self._local_agent_lost)
        self._watch = HostWatch(node, lambda host: self.host_lost(host, HostLost(node.hosts.name_of(host))))
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
                pause = self.node.residence.pause
                early = pause / 2
                self.node.receive_loop.call_later(until_next(pause, time.monotonic(), early), self._tend, early)

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
        # Before meshes are stopped, whose errors no longer matter.
        self._faults.flush()
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
            self._listening.complete(raise_closed)
        self._users.clear()
        self.release([host for host in node.hosts.known if host not in self.detached], orderly=False)
        self._local.dismiss()
        if self._door is not None:
            self._door.close()
        node.close(linger_ms=500)
        self.output.close()
        self._local.close(timeout)
        remove_folder(self.folder)


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
            try:
                session.close(STOP_CLEANUP() + 1)
            except KeyboardInterrupt:
                # The program is over, so there is nothing to raise it in; Python would show where it waited.
                tell("monarch: interrupted: killed the ranks that had not ended by themselves")
