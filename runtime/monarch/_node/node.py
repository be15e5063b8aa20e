"""A node: one process in a session, the program or a rank."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from socket import gethostname
from threading import RLock
from typing import TypeVar, cast

from monarch._core.causes import Stopped
from monarch._node.bulk import BulkData, ExportSlot
from monarch._node.call_watch import CallWatch, NoWatch
from monarch._node.dispatch import Dispatch
from monarch._node.events import NodeEvents
from monarch._node.mishaps import Mishaps
from monarch._node.peers.hosts import HostConnections
from monarch._node.peers.peer_table import PeerTable
from monarch._node.peers.port_table import PortTable
from monarch._node.rank_config import RankConfig
from monarch._node.replies.folded import take_folded
from monarch._node.replies.replies import Replies
from monarch._node.services.answering import on_ask
from monarch._node.services.lanes import Lanes
from monarch._node.spreads.spreads import Spreads
from monarch._node.waits import ProcessWaits
from monarch._procs.session_folder import Residence, host_of, ipc_address, restore_folder
from monarch._wire import messages as m
from monarch._wire import pickler, plain
from monarch._wire.descriptors import reserve
from monarch._wire.links import Inbox, make_context
from monarch._wire.receiving.aside import tell
from monarch._wire.receiving.loop import ReceiveLoop

P = TypeVar("P")


class OutputHooks:
    """Sender of the output of a process; a session replaces these."""

    def __init__(self) -> None:
        self.idle: Callable[[], None] = lambda: None
        """Called where a thread has time: sends what was printed."""
        self.send_printed: Callable[[], None] = lambda: None
        """Sends what was printed, without waiting for room."""
        self.taking: AbstractContextManager[object] = nullcontext()
        """Held while output is taken, so that who holds it can print something and send it alone."""
        self.watch: Callable[[], None] = lambda: None
        """Called where long code begins: what it prints is then sent while it runs, soon from its start."""


class Node:
    """One process in a session. It receives once its receive loop is started, after the handlers are registered.

    It knows nothing of actors and meshes: the rooms above register handlers of messages, subscribe to events, and keep
    their own state as parts.

    Args:
        proc: its id, ``<host id>/<name>``.
        folder: the folder of its host's ipc sockets.
        root: proc id of the program that controls the session; its own for the program.
    """

    def __init__(self, proc: str, folder: str, root: str) -> None:
        self.proc = proc
        self.rank = 0
        """Base rank of this process in its mesh."""
        self.config: RankConfig | None = None
        """The configuration of a rank; None for the program."""
        self.names: dict[str, str] = {}
        """Names of the process meshes spawned from here, by uid. Any thread adds."""
        self.ended = ""
        """Why this process cannot use its session any more; empty while it can. Set once."""
        self.output = OutputHooks()
        """Set before anything is received."""
        self.watch: CallWatch = NoWatch()
        """Watches the ranks of failed calls; set once, before anything is sent."""
        self._parts: dict[object, object] = {}
        # Guards ``_parts``; held while a part is made, which may need another.
        self._lock = RLock()
        pickler.exporter = ExportSlot()
        # A cleaner of /tmp may have removed it since the session began.
        restore_folder(folder)
        context = make_context()
        inbox = Inbox(context, ipc_address(folder, proc))
        self.residence = Residence(folder, inbox, hold=proc == root)
        self.events = NodeEvents()
        self.lanes = Lanes()
        """Threads for work that the receiving thread must not do."""
        self.dispatch = Dispatch(inbox, Mishaps(self))
        self.receive_loop = ReceiveLoop(inbox, self.dispatch.on_frame)
        plain.receives_here = self.receive_loop.receives_here
        self.waits = ProcessWaits(self.receive_loop)
        self.ports = PortTable()
        hello = m.encode(m.Hello(m.VERSION, proc, os.getpid()))
        self.hosts = HostConnections(host_of(proc), folder, hello, context)
        self.hosts.spreads = Spreads(proc, self.hosts.gateways)
        self.hosts.spreads.later = self.receive_loop.call_later
        self.peers = PeerTable(
            proc, root, self.hosts, self.receive_loop, self.ports, self.events, self.dispatch.deliver
        )
        self.bulk = BulkData(proc, self.receive_loop, lambda to, frame: self.peers.get(to).send(frame))
        self.bulk.wait = lambda waiter, timeout: self.waits.wait(waiter, timeout)
        self.replies = Replies(self.peers, self.bulk, self._place)
        self._register()

    def _register(self) -> None:
        handle = self.dispatch.handle
        handle(m.Reply, self._on_reply)
        handle(m.Folded, self._on_folded)
        handle(m.Received, self.hosts.spreads.received)
        handle(m.Credit, self.replies.credited)
        handle(m.Ready, self._on_ready)
        handle(m.Dead, lambda dead, _: self.peers.end(dead))
        handle(m.Hello, self.peers.greeted)
        handle(m.Refused, self.peers.refused)
        handle(m.Release, self.bulk.released)
        handle(m.Fault, self._on_fault)
        handle(m.Ask, lambda ask, _: on_ask(self, ask))
        self.events.proc_died.subscribe(self.bulk.forget_holder)

    @property
    def host(self) -> str:
        """Id of its host."""
        return self.hosts.host

    @property
    def root(self) -> str:
        """Proc id of the program that everything belongs to."""
        return self.peers.root

    @property
    def closed(self) -> bool:
        """Whether this process cannot use its session any more."""
        return bool(self.ended)

    @property
    def inbox(self) -> Inbox:
        """The socket that it receives from."""
        return self.residence.inbox

    @property
    def mishaps(self) -> Mishaps:
        """Counts what goes wrong where nobody waits for an answer."""
        return self.dispatch.mishaps

    @property
    def folder(self) -> str:
        """The folder of its host's ipc sockets."""
        return self.hosts.folder

    @property
    def agent(self) -> str:
        """Proc id of the agent of its host."""
        return f"{self.host}/agent"

    @property
    def origin(self) -> str:
        """Session and host, for errors of references that arrive outside the session."""
        pid = os.path.basename(self.folder).split("-")[1:2]
        return f"session {self.host} of process {pid[0] if pid else os.getpid()} on {gethostname()}"

    # Parts

    def part(self, kind: Callable[[Node], P]) -> P:
        """Return the state that a room above keeps here; made on first use."""
        part = self._parts.get(kind)
        if part is None:
            with self._lock:
                part = self._parts.get(kind)
                if part is None:
                    part = self._parts[kind] = kind(self)
        return cast("P", part)

    def add_part(self, part: object) -> None:
        """Add an object as the part of its class."""
        with self._lock:
            self._parts[type(part)] = part

    def find_part(self, kind: type[P]) -> P | None:
        """Return a part if there is one."""
        return cast("P | None", self._parts.get(kind))

    # Receiving

    def _on_reply(self, reply: m.Reply, more: object) -> None:
        peer = self.peers.known.get(reply.src)
        if peer is not None and reply.done and peer.hears(reply.done):
            self.receive_loop.notify(peer)
        if reply.bulk is not None:
            # Also without a reader: the sender waits for the release.
            more = self.bulk.arrived(reply.bulk)
        sink = self.ports.sinks.get(reply.port)
        if sink is not None:
            # Its buffers, which the dispatch passes on untyped.
            sink.reply(reply, more)  # pyright: ignore[reportArgumentType]

    def _on_folded(self, folded: m.Folded, more: Sequence[object]) -> None:
        self.hosts.spreads.heard(folded.hosts)
        take_folded(self, folded)
        if folded.parts:
            self.dispatch.handlers[m.Batch](m.Batch(folded.src, folded.parts, folded.frames), more)

    def _on_ready(self, ready: m.Ready, more: Sequence[object]) -> None:
        self.peers.ready(ready, more)
        self.events.ready.tell(ready)

    def _on_fault(self, fault: m.Fault, _: object) -> None:
        if fault.actor == m.INTERNAL:
            self.mishaps.show(fault)
        else:
            self.events.faulted.tell(fault)

    def _place(self) -> tuple[int, str]:
        return self.rank, self.config.procs.name if self.config is not None else self.proc

    def tend(self) -> None:
        """Maintain the socket files that others connect to; in the receiving thread."""
        if problem := self.residence.tend():
            tell(f"monarch: {self.proc}: {problem}")

    # Ending

    def disown(self, why: str) -> None:
        """Refuse all use from now on, without touching a socket: this process is a fork."""
        self.ended = why
        self.receive_loop.disown(why)

    def close(self, linger_ms: int = 0) -> None:
        """Close all sockets; waiting calls get no answer."""
        if self.closed:
            return
        self.ended = "its session was shut down"
        self.events.closing.tell()
        self.receive_loop.close()
        self.ports.lose_all(m.Dead(self.proc, Stopped(), True, []))
        self.peers.close(linger_ms)
        self.hosts.close(linger_ms)
        self.inbox.close()
        self.residence.close()
        reserve.give_up()
        self.bulk.segments.close()
        self.hosts.term()
