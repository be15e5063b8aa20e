"""The runtime of actors in one process, be it the program's or a rank: its ports, its actors, its peers."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from itertools import count, islice
from socket import gethostname
from threading import RLock
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import zmq

from monarch._actors.deadlocks import Circles
from monarch._core.events import Event
from monarch._core.flow import Finished
from monarch._core.later import asyncio
from monarch._core.roster import split_proc
from monarch._core.shapes.region import Region
from monarch._node.answering import on_ask
from monarch._node.bulk import Bulk, Lending
from monarch._node.gateways import Reach
from monarch._node.lanes import Lanes
from monarch._node.mishaps import Mishaps
from monarch._node.peers import GonePeer, IpcPeer, LocalPeer, Peer, RemotePeer, only_peer
from monarch._node.remote_errors import pack_failure
from monarch._procs.rank.output import brief
from monarch._procs.session_folder import Residence, host_of, ipc_address, restore_folder
from monarch._supervision.state import Oversight
from monarch._supervision.watch import Watch
from monarch._wire import messages as m
from monarch._wire import pickling, plain
from monarch._wire.descriptors import reserve
from monarch._wire.links import Inbox, lasting, make_context
from monarch._wire.receiving.aside import tell, tell_error
from monarch._wire.receiving.loop import Pump, Waiter
from monarch._wire.split import join
from monarch.exceptions import PointError, ProtocolError, StoppedError

if TYPE_CHECKING:
    from monarch._actors.mailbox import Cell
    from monarch._meshes.actor_mesh import ActorMesh
    from monarch._meshes.proc_mesh import _Shared
    from monarch._node.future import Future
    from monarch._node.gather import Gather
    from monarch._node.liveness import Silence
    from monarch._node.rank_config import RankConfig

_EARLY = 5.0
"""Seconds that a message waits for the actor that it is for to be made."""
_VIEWS = 4096
_OLDEST = 256
"""Calls that are looked at for ranks that do not answer, so that it costs little also where many are under way."""
_FRAMED = frozenset({m.Call, m.Create, m.Reply, m.Batch, m.Split})

current: ContextVar[tuple[Cell, m.Call] | None] = ContextVar("monarch_call", default=None)
"""The actor whose code runs here, and the message that it handles."""
_H = TypeVar("_H", bound=Callable[..., object])


class Sink(Protocol):
    """What a port leads to."""

    def reply(self, reply: m.Reply, frames: Sequence[bytes]) -> None: ...


class Supervising(Protocol):
    """What becomes of deaths in the meshes of a process: it is told of who joins and leaves them."""

    def joined(self, uid: str, rank: int, proc: str) -> None: ...
    def left(self, uid: str, rank: int) -> None: ...


class Node(Bulk, Reach):
    """What a process of a session has. It receives once its pump is started, when all that messages need is there.

    Args:
        proc: its id, ``<host id>/<name>``.
        folder: where the ipc sockets of its host are.
        root: proc id of the program that everything belongs to; its own, if it is that.
    """

    def __init__(self, proc: str, folder: str, root: str) -> None:
        self.proc = proc
        self.host = host_of(proc)
        self.folder = folder
        self.root = root
        self.agent = f"{self.host}/agent"
        self.context = make_context()
        self.hello = m.encode(m.Hello(m.VERSION, proc, os.getpid()))
        self.peer_lock = RLock()
        self.future_lock = RLock()
        """Of all futures: held for a few steps, and again by a __del__ that runs in the middle of them."""
        self.lanes = Lanes()
        """Threads for what the receiving thread must not do."""
        self.peers: dict[str, Peer] = {}
        self.actors: dict[str, Cell] = {}
        self.gone: dict[str, str] = {}
        self.ports: dict[int, Sink] = {}
        self._port = count(1).__next__
        self.last_port = 0  # the number that was given last
        self._gathers: dict[int, Gather[Any]] = {}
        # By sender; grows by setdefault only, and each has a lock of its own.
        self._finished: dict[str, Finished] = {}
        # A cache without a lock: two threads that miss the same view make two equal regions.
        self._views: dict[bytes, Region] = {}
        self.secret = b""
        """Of the session: who has it may read and write the buffers of its processes."""
        self.begin_bulk()
        self.begin_reach()
        self._early: dict[str, list[tuple[m.Call, Sequence[Any]]]] = {}
        self.deferred: deque[Callable[[], None]] = deque()
        """What a garbage collection found to do, for when there is time."""
        self.circles = Circles(self)
        self.mishaps = Mishaps(self)
        self.closed = False
        self.ended = ""
        """Why this process cannot use its session any more; set once, before ``closed``."""
        pid = os.path.basename(folder).split("-")[1:2]
        self.origin = f"session {self.host} of process {pid[0] if pid else os.getpid()} on {gethostname()}"
        """Session and host, for errors of references that arrive outside the session."""
        self.at_close: list[Callable[[], object]] = []
        """What others have left to do when this ends."""
        self.at_death: list[Callable[[str], object]] = []
        """Told the proc id of each process that has died."""
        self.deaths = 0
        """How many peers have died."""
        self.interrupts = 0
        """How often a call that runs here was interrupted: only whether it has changed counts, so no lock."""
        self.rank = 0
        """Base rank of this process in its mesh."""
        self.idle: Callable[[], None] = _nothing
        """Called where a thread has time: sends what was printed."""
        self.send_printed: Callable[[], None] = _nothing  # without waiting for room
        self.output_lost: Callable[[], None] = _nothing
        """What was sent of the output was taken by nobody, as another program has taken over."""
        self.on_output: Callable[[m.Output], None] | None = None
        self.dying: Event[m.Dead] = Event(tell_error)
        """Told of a death before anybody else can see it."""
        self.died: Event[m.Dead, list[str]] = Event(tell_error)
        """Told of a death, and of the calls that waited for the one that died, after these were."""
        self.faulted: Event[m.Fault] = Event(tell_error)
        """Told of actors that have failed where nobody waited."""
        self.supervising: Supervising
        """Set before this process starts any other."""
        self.oversight, self.watch = Oversight(self), Watch(self)
        self.on_sibling_died: Callable[[m.Dead], None] = lambda dead: None
        """Told of the death of ranks of this rank's own mesh."""
        self.on_create: Callable[[m.Create, Sequence[Any]], None] | None = None
        self.on_halt: Callable[[m.Halt], None] | None = None
        self.on_listening: Callable[[m.Listening], None] | None = None
        self.on_level: Callable[[m.Level], None] | None = None
        self.session: Any = None
        """What belongs to it, if this process is the program."""
        self.config: RankConfig | None = None
        """What this process was started with, if it is a rank."""
        self.on_open: Callable[[int], None] | None = None
        self.meshes: dict[str, ActorMesh] = {}
        """Actor meshes that were spawned from here and not stopped, by key: they are healed whoever holds them."""
        self.owners: dict[str, str] = {}
        """Of each of those, the key of the actor that spawned it, empty for the program."""
        self.proc_meshes: dict[str, tuple[str, str]] = {}
        """Meshes of procs that were spawned from here: of each uid its name, and its owner as above."""
        self.own_procs: dict[str, _Shared] = {}
        """What the views of those share, by uid."""
        self.pids: dict[str, int] = {}
        """Of processes of this host that were started from here."""
        self.silence: Silence | None = None
        """Notices which ranks do not answer; there once a mesh was spawned from here."""
        self.need_agent: Callable[[], None] = _nothing
        """Starts the agent of this host, unless it runs."""
        self.base_env: Callable[[str], dict[str, str | None]] = lambda host: {}
        """How the environment of this program has changed since the agent of a host was started."""
        self.output_options: Callable[[str, bool, float | None], None] = lambda *options: None
        self.on_done: Callable[[int], None] | None = None
        self.unshown: dict[int, threading.Event] = {}
        """Of ports that are done and whose output is not shown yet: set once it is."""
        self.await_shown: Callable[[], None] = _nothing
        """Waits for that, at most a moment."""
        self._handlers = _Handlers(
            {
                m.Call: self._on_call,
                m.Reply: self._on_reply,
                m.Credit: self._on_credit,
                m.Create: self._on_create_message,
                m.Halt: self._on_halt_message,
                m.Ready: self._on_ready,
                m.Dead: lambda dead, _: self.peer_died(dead),
                m.Release: self._on_released,
                m.Output: lambda output, _: _wanted(self.on_output)(output),
                m.Fault: self._on_fault_message,
                m.Probe: lambda probe, _: self.circles.on_probe(probe),
                m.Level: lambda level, _: _wanted(self.on_level)(level),
                m.Ask: lambda ask, _: on_ask(self, ask),
                m.Batch: self._on_batch,
                m.Split: self._on_split,
                m.Hello: self._on_hello,
                m.Refused: self._on_refused,
                m.Listening: lambda listening, _: _wanted(self.on_listening)(listening),
            }
        )
        pickling.lender = Lending()
        # A cleaner of /tmp may have taken it since the session began.
        restore_folder(folder)
        self.inbox = Inbox(self.context, ipc_address(folder, proc))
        self.residence = Residence(folder, self.inbox, hold=proc == root)
        self._recv = self.inbox.socket.recv
        self.pump = Pump(self.inbox, self._on_frame)
        plain.receives_here = self.pump.receives_here

    # Receiving

    def handle(self, kind: type, handler: Callable[[Any, Sequence[Any]], None]) -> None:
        """Has messages of a kind handled by a function, in the receiving thread: it does not wait."""
        self._handlers[kind] = handler

    def _on_frame(self, frame: bytes) -> None:
        try:
            message = m.decode(frame)
            kind = type(message)
            more: Sequence[Any] = ()
            if kind in _FRAMED and message.frames:  # pyright: ignore[reportAttributeAccessIssue]
                more = self._rest(message.frames)  # pyright: ignore[reportAttributeAccessIssue]
        except ProtocolError as error:
            self._drop_rest()
            self.mishaps.undecodable(error)
            return
        try:
            self._handlers[kind](message, more)
        except Exception as error:
            self._drop_rest()
            self.mishaps.failed(message, error)

    def on_message(self, frame: bytes, more: Sequence[Any] = ()) -> None:
        """Handles a message from within this process."""
        message = m.decode(frame)
        try:
            self._handlers[type(message)](message, more)
        except Exception as error:
            self.mishaps.failed(message, error)

    def _rest(self, number: int) -> list[Any]:
        """The frames that follow the first one of a message."""
        socket, more = self.inbox.socket, []
        left = socket.get(zmq.RCVMORE)
        while left:
            part = socket.recv(copy=False)
            more.append(part.buffer)
            left = part.more
        if len(more) != number:
            raise ProtocolError(f"a message of {number + 1} frames has come as {len(more) + 1}")
        return more

    def _drop_rest(self) -> None:
        """Of a message that is not understood; its other frames are not messages of their own."""
        while self.inbox.socket.get(zmq.RCVMORE):
            self.inbox.socket.recv(copy=False)

    def _on_call(self, call: m.Call, more: Sequence[Any]) -> None:
        cell = self.actors.get(call.actor)
        if cell is not None:
            cell.deliver(call, more)
        else:
            self._unknown(call, more)

    def _unknown(self, call: m.Call, more: Sequence[Any]) -> None:
        """A message to an actor that is gone; or that is to come, if a reference to it was faster than its making."""
        with self.peer_lock:
            cell = self.actors.get(call.actor)
            if cell is None and call.actor not in self.gone:
                waiting = self._early.setdefault(call.actor, [])
                waiting.append((call, more))
                if len(waiting) == 1:
                    self.pump.call_later(_EARLY, lambda: self._never_came(call.actor))
                return
        if cell is not None:
            cell.deliver(call, more)
        else:
            self._refuse(call)

    def _refuse(self, call: m.Call) -> None:
        from monarch._actors.mailbox import refuse

        refuse(self, call, self.gone.get(call.actor))

    def _never_came(self, actor: str) -> None:
        with self.peer_lock:
            waiting = self._early.pop(actor, [])
        for call, _ in waiting:
            self._refuse(call)

    def _on_create_message(self, create: m.Create, more: Sequence[Any]) -> None:
        _wanted(self.on_create)(create, more)
        if self._early:
            with self.peer_lock:
                waiting = self._early.pop(create.actor, [])
            for call, frames in waiting:
                self._on_call(call, frames)

    def _on_halt_message(self, halt: m.Halt, _: Sequence[Any]) -> None:
        _wanted(self.on_halt)(halt)

    def _on_fault_message(self, fault: m.Fault, _: Sequence[Any]) -> None:
        if fault.actor == m.INTERNAL:
            self.mishaps.show(fault)
        else:
            self.faulted.tell(fault)

    def _on_reply(self, reply: m.Reply, more: Sequence[Any]) -> None:
        peer = self.peers.get(reply.src)
        if peer is not None and reply.done:
            peer.finished(reply.done)
        sink = self.ports.get(reply.port)
        if sink is not None:
            sink.reply(reply, more)

    def _on_credit(self, credit: m.Credit, _: Sequence[Any]) -> None:
        self.peer(credit.src).finished(credit.done)

    def _on_batch(self, batch: m.Batch, more: Sequence[Any]) -> None:
        if sum(batch.parts) != len(more):
            raise ProtocolError(f"a batch of {sum(batch.parts)} frames has come with {len(more)}")
        at = 0
        for size in batch.parts:
            try:
                self.on_message(more[at], more[at + 1 : at + size])
            except ProtocolError as error:
                # Those that came with it are good.
                self.mishaps.undecodable(error)
            at += size

    def _on_split(self, message: m.Split, pieces: Sequence[Any]) -> None:
        frames = join(message, pieces)
        self.on_message(bytes(frames[0]), frames[1:])

    def _on_ready(self, ready: m.Ready, _: Sequence[Any]) -> None:
        peer = self.peers.get(ready.src)
        if peer is not None:
            if peer.host == self.host:
                self.pids[ready.src] = ready.pid
            peer.ready()

    def _on_hello(self, hello: m.Hello, _: Sequence[Any]) -> None:
        if hello.version != m.VERSION:
            reason = f"{self.proc} speaks version {m.VERSION} of the protocol, {hello.proc} {hello.version}"
            self.peer(hello.proc).send(m.encode(m.Refused(m.VERSION, self.proc, reason)))

    def _on_refused(self, refused: m.Refused, _: Sequence[Any]) -> None:
        self.peer_died(m.Dead(refused.proc, f"refuses messages: {refused.reason}", False, []))

    # Peers

    def peer(self, proc: str, starting: bool = False) -> Peer:
        """Another process by its id. One that was not started from here is watched from now on."""
        peer = self.peers.get(proc)
        if peer is not None:
            return peer
        gateway = None
        if host_of(proc) != self.host:
            why = self.out_of_reach(host_of(proc))
            if why is not None:
                return self._gone_peer(proc, why)
            # Before the lock, which is not to be held while another is waited for.
            gateway = self.gateway(host_of(proc))
        with self.peer_lock:
            # One only, since two connections would not keep the order.
            peer = self.peers.get(proc)
            if peer is not None:
                return peer
            if gateway is not None:
                peer = RemotePeer(self, proc, gateway)
            else:
                peer = LocalPeer(self, proc) if proc == self.proc else IpcPeer(self, proc, starting)
            peer.starting = starting
            peer = only_peer(self.peers, peer)
        if peer.dead is None and peer.host in self.lost_hosts and (why := self.out_of_reach(peer.host)):
            # It was lost while this was made, and those who were told of that did not see this one.
            peer.end(m.Dead(proc, why.reason, why.expected, []))
        # An agent is missed by the loss of its host, and what this process belongs to takes it along.
        if not starting and proc not in (self.proc, self.root) and not proc.endswith("/agent"):
            # A rank asks the agent of its own host, which hears of the loss of others as well.
            self.to_agent(self.host if self.config is not None else host_of(proc), m.Watch(self.proc, proc))
        return peer

    def peer_died(self, dead: m.Dead) -> None:
        """Fails what waits for a process that has died."""
        peer = self.peer(dead.proc) if dead.proc in self.peers else self._gone_peer(dead.proc)
        if peer.dead is not None:
            return
        # First, so that whoever sees the death sees as well that it is being decided about.
        self.dying.tell(dead)
        peer.end(dead)
        self.deaths += 1
        self.forget_holder(dead.proc)
        calls = [gather.label for gather in list(self._gathers.values()) if gather.lost(peer, dead)]
        if not dead.expected:
            self._tell_siblings(dead)
        self.pids.pop(dead.proc, None)
        for action in self.at_death:
            action(dead.proc)
        self.died.tell(dead, calls)
        # It stays known for as long as this process lives: of what it wrote, only what errors quote.
        dead.tails = [] if dead.expected else brief(dead.tails)

    def _tell_siblings(self, dead: m.Dead) -> None:
        """Others of its mesh may wait for it in a collective, of which nobody else frees them."""
        uid = split_proc(dead.proc)[0]
        if self.config is not None and uid == self.config.procs.uid:
            self.on_sibling_died(dead)
        shared = self.own_procs.get(uid)
        if shared is not None:
            procs, frame = shared.procs, m.encode(dead)
            for rank in range(procs.region().nelements):
                sibling = self.peers.get(procs.proc(rank))
                if sibling is not None and sibling.dead is None:
                    sibling.send(frame)

    def fail_calls(self, uid: str, key: str, why: str, latest: int) -> int:
        """Fails calls under way to a mesh of processes, or to those actors there that have a key; how many.

        Args:
            uid: of the mesh.
            key: of the actors; empty for all.
            why: for their errors.
            latest: the last port of those that are meant. Who has caught the failure goes on with those that live.
        """
        meant = [gather for port, gather in list(self._gathers.items()) if port <= latest and hasattr(gather, "fail")]
        return sum(gather.fail(uid, key, why) for gather in meant)

    def waited_for(self) -> set[str]:
        """The processes that the oldest calls wait for: if one does not answer, it keeps one of these waiting."""
        oldest = islice(list(self._gathers.values()), _OLDEST)
        waiting = [gather for gather in oldest if hasattr(gather, "waits_for")]
        return {peer.proc for gather in waiting for peer in gather.waits_for() if peer.dead is None}

    def shared_of(self, uid: str, name: str, wish: str) -> _Shared:
        """What belongs to a mesh that was spawned from here. StoppedError if it was not, or was stopped."""
        shared = self.own_procs.get(uid)
        if shared is None or shared.stopped is not None:
            why = "was stopped" if shared is not None else "was spawned elsewhere"
            raise StoppedError(f"{name} {why}, so it cannot be {wish} here", mesh=name)
        return shared

    def _gone_peer(self, proc: str, why: m.Dead | None = None) -> Peer:
        dead = m.Dead(proc, why.reason, why.expected, []) if why is not None else None
        with self.peer_lock:
            return self.peers.setdefault(proc, GonePeer(self, proc, dead))

    def host_died(self, host: str, reason: str, expected: bool = False) -> None:
        """A host is lost with all of its processes, or was shut down."""
        if host != self.host:
            # First of all: a peer that is made from now on is dead at once.
            self.lost_hosts[host] = m.Dead(host, reason, expected, [])
        # It stays, closed: what is still sent to a lost host leads nowhere.
        gateway = self._gateways.get(host)
        if gateway is not None:
            gateway.close()
        for proc, peer in list(self.peers.items()):
            if peer.host == host and peer.dead is None and proc != self.proc:
                self.peer_died(m.Dead(proc, reason, expected, []))

    def tend(self) -> None:
        """Looks after what others find this process by; in the thread that receives."""
        if said := self.residence.tend():
            tell(f"monarch: {self.proc}: {said}")

    # Ports

    def open_port(self, sink: Any) -> int:
        """A number that replies can be sent to."""
        port = self.last_port = self._port()
        self.ports[port] = sink
        if hasattr(sink, "lost"):
            self._gathers[port] = sink
        if self.on_open is not None:
            self.on_open(port)
        return port

    def close_port(self, port: int) -> None:
        """Replies to it are not taken any more."""
        self.ports.pop(port, None)
        self._gathers.pop(port, None)
        if self.on_done is not None:
            self.on_done(port)

    # Sending

    def reply(
        self, to: str, port: int, rank: int, status: int, body: bytes, buffers: Sequence[memoryview] = (), cost: int = 0
    ) -> None:
        """Sends a value or an error to a port of a process, after a message of it was handled of that cost.

        What it raises, it raises before anything is sent or counted.
        """
        peer = self.peers.get(to) or self.peer(to)
        bulk = self.put(buffers, [to]) if buffers and peer.host == self.host and pickling.are_large(buffers) else None
        more = lasting(buffers) if buffers and bulk is None else ()
        done = (self._finished.get(to) or self._finished_of(to)).report(cost)
        peer.send(m.encode(m.Reply(self.proc, port, rank, status, done, body, bulk, len(more))), more)

    def answer(self, to: str, port: int, view: bytes, status: int, body: bytes) -> None:
        """Answers a message from this rank's position in the view that it addressed.

        A rank that is not in that view answers with an error, never from the position of another one.
        """
        try:
            place = self.region_of(view).place_of(self.rank) if view else 0
        except Exception as error:
            place = m.NOWHERE
            if status == m.RESULT:
                name = self.config.procs.name if self.config is not None else self.proc
                text = f"rank {self.rank} of {name} was sent a message that is not for it: {error}"
                status, body = m.ERROR, pack_failure(PointError(text), True)
        self.reply(to, port, place, status, body)

    def has_finished(self, src: str, cost: int, replying: bool) -> None:
        """A message of a process was handled: its sender may send more. With ``replying``, an answer will say so."""
        finished = self._finished.get(src) or self._finished_of(src)
        if replying:
            finished.add(cost)
        elif total := finished.due(cost):
            self.peer(src).send(m.encode(m.Credit(self.proc, total)))

    def _finished_of(self, src: str) -> Finished:
        return self._finished.setdefault(src, Finished())

    def region_of(self, view: bytes) -> Region:
        """The region that a message addressed."""
        region = self._views.get(view)
        if region is None:
            if len(self._views) > _VIEWS:
                self._views.clear()
            region = self._views[view] = Region.unpack(m.unpack(view))
        return region

    def wait(self, waiter: Waiter, timeout: float | None = None) -> bool:
        """Waits in this thread. In an actor, a wait in a circle of actors ends with DeadlockError."""
        here = current.get()
        if here is None:
            return self.pump.wait(waiter, timeout)
        return self.circles.wait(here[0], here[1], waiter, timeout)

    def awaited(self, future: Future[Any], arrival: asyncio.Future[Any]) -> None:
        """Take note of an await. In an actor, one in a circle of actors ends with DeadlockError."""
        here = current.get()
        if here is not None:
            self.circles.awaited(here[0], here[1], future, arrival)

    # Ending

    def disown(self, why: str) -> None:
        """Refuse all use from now on, without touching a socket: this process is a fork."""
        self.ended = why
        self.closed = True

    def close(self, linger_ms: int = 0) -> None:
        """Closes all sockets; what waits here gets no answer any more."""
        if self.closed:
            return
        self.ended = "its session was shut down"
        self.closed = True
        for action in self.at_close:
            action()
        self.pump.close()
        gone = m.Dead(self.proc, "was shut down", True, [])
        for gather in list(self._gathers.values()):
            for peer in {*gather.targets}:
                gather.lost(peer, gone)
        for peer in self.peers.values():
            if isinstance(peer, IpcPeer):
                peer.close(linger_ms)
        for gateway in self._gateways.values():
            gateway.close(linger_ms)
        self.inbox.close()
        self.residence.close()
        reserve.give_up()
        self.segments.close()
        self.context.term()


class _Handlers(dict[type, Callable[[Any, Sequence[Any]], None]]):
    """What is done with each kind of message."""

    def __missing__(self, kind: type) -> Callable[[Any, Sequence[Any]], None]:
        raise ProtocolError(f"this process takes no {kind.__name__}")


def _nothing() -> None:
    pass


def _wanted(handler: _H | None) -> _H:
    """What this process does with a message, if it does anything with such messages."""
    if handler is None:
        raise ProtocolError("this process takes no messages of this kind")
    return handler
