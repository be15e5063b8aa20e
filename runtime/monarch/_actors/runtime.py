"""The runtime of actors in one process, be it the program's or a rank: its ports, its actors, its peers."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from itertools import count, islice
from threading import Lock, RLock
from typing import TYPE_CHECKING, Any, Protocol

from monarch._actors.asked import on_ask
from monarch._actors.bulk import Bulk, Lending
from monarch._actors.circles import Circles
from monarch._actors.future import judging
from monarch._actors.lanes import Lanes
from monarch._actors.peers import WINDOW, Gateway, IpcPeer, LocalPeer, Peer, RemotePeer
from monarch._actors.procs import split_proc
from monarch._core.region import Region
from monarch._procs.output import brief
from monarch._procs.pump import Pump, Waiter
from monarch._procs.session import host_of, ipc_address
from monarch._wire import messages as m
from monarch._wire import pickling
from monarch._wire.links import LEASE_S, Inbox, Link, make_context
from monarch.exceptions import StoppedError

if TYPE_CHECKING:
    from monarch._actors.actormesh import ActorMesh
    from monarch._actors.cells import Cell
    from monarch._actors.future import Promise
    from monarch._actors.gather import Gather
    from monarch._actors.procmesh import _Shared
    from monarch._actors.silence import Silence
    from monarch._actors.spec import RankConfig
    from monarch._actors.supervise import Supervisor
    from monarch._wire.keys import KeyPair

_EARLY = 5.0
"""Seconds that a message waits for the actor that it is for to be made."""
_CREDIT_EVERY = WINDOW // 4
_VIEWS = 4096
_OLDEST = 256
"""Calls that are looked at for ranks that do not answer, so that it costs little also where many are under way."""
_VERDICT = 120.0
"""Seconds to wait for those who supervise a mesh."""
_FRAMED = frozenset({m.Call, m.Create, m.Reply, m.Batch})

current: ContextVar[tuple[Cell, m.Call] | None] = ContextVar("monarch_call", default=None)
"""The actor whose code runs here, and the message that it handles."""


class Sink(Protocol):
    """What a port leads to."""

    def reply(self, reply: m.Reply, frames: Sequence[bytes]) -> None: ...


class Runtime(Bulk):
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
        self.peer_lock = Lock()
        self.future_lock = RLock()
        """Of all futures: held for a few steps, and again by a __del__ that runs in the middle of them."""
        self.lanes = Lanes()
        """Threads for what the receiving thread must not do."""
        self.peers: dict[str, Peer] = {}
        self.actors: dict[str, Cell] = {}
        self.gone: dict[str, str] = {}
        self.ports: dict[int, Sink] = {}
        self._port = count(1).__next__
        self.last_port = 0
        """The number that was given last."""
        self._gathers: dict[int, Gather[Any]] = {}
        self._finished: dict[str, int] = {}
        self._reported: dict[str, int] = {}
        self._views: dict[bytes, Region] = {}
        self._gateways: dict[str, Gateway] = {}
        self.hosts: dict[str, tuple[str, str]] = {}
        """Owner address and public key of the other hosts that this process talks to by itself."""
        self.keys: KeyPair | None = None
        self.secret = b""
        """Of the session: who has it may read and write the buffers of its processes."""
        self.lease = LEASE_S
        """Seconds of silence after which a host counts as lost."""
        self.begin_bulk()
        self._early: dict[str, list[tuple[m.Call, Sequence[Any]]]] = {}
        self.deferred: deque[Callable[[], None]] = deque()
        """What a garbage collection found to do, for when there is time."""
        self.circles = Circles(self)
        self.closed = False
        self.at_close: list[Callable[[], object]] = []
        """What others have left to do when this ends."""
        self.at_death: list[Callable[[str], object]] = []
        """Told the proc id of each process that has died."""
        self.deaths = 0
        """How many peers have died."""
        self.rank = 0
        """Base rank of this process in its mesh."""
        self.idle: Callable[[], None] = _nothing
        """Called where a thread has time: sends what was printed."""
        self.on_output: Callable[[m.Output], None] | None = None
        self.on_dead: Callable[[m.Dead, list[str]], None] | None = None
        """Told of a death, and of the calls that waited for the one that died."""
        self.supervising: Any = None
        """What becomes of deaths in the meshes of this process; told of who joins and leaves them."""
        self.on_dying: Callable[[m.Dead], None] = lambda dead: None
        """Told of a death before those who wait are."""
        self.on_sibling_died: Callable[[m.Dead], None] = lambda dead: None
        """Told of the death of ranks of this rank's own mesh."""
        self.on_fault: Callable[[m.Fault], None] | None = None
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
        self.supervisors: list[Supervisor] = []
        """Those whose ``with`` block runs, outermost first."""
        self.settling: dict[str, Promise[None]] = {}
        """Of meshes in which ranks have died, by uid: done when it is decided what becomes of them."""
        self.judges: dict[str, int] = {}
        """How many threads decide that."""
        self.need_agent: Callable[[], None] = _nothing
        """Starts the agent of this host, unless it runs."""
        self.base_env: Callable[[str], dict[str, str | None]] = lambda host: {}
        """How the environment of this program has changed since the agent of a host was started."""
        self.output_options: Callable[[str, bool, float | None], None] = lambda *options: None
        self.on_done: Callable[[int], None] | None = None
        self._handlers: dict[type, Callable[[Any, Sequence[Any]], None]] = {
            m.Call: self._on_call,
            m.Reply: self._on_reply,
            m.Credit: self._on_credit,
            m.Create: self._on_create_message,
            m.Halt: lambda halt, _: self.on_halt and self.on_halt(halt),
            m.Ready: self._on_ready,
            m.Dead: lambda dead, _: self.peer_died(dead),
            m.Release: self._on_released,
            m.Output: lambda output, _: self.on_output and self.on_output(output),
            m.Fault: lambda fault, _: self.on_fault and self.on_fault(fault),
            m.Probe: lambda probe, _: self.circles.on_probe(probe),
            m.Level: lambda level, _: self.on_level and self.on_level(level),
            m.Ask: lambda ask, _: on_ask(self, ask),
            m.Batch: self._on_batch,
            m.Hello: self._on_hello,
            m.Refused: self._on_refused,
            m.Listening: lambda listening, _: self.on_listening and self.on_listening(listening),
        }
        pickling.lender = Lending()
        self.inbox = Inbox(self.context, ipc_address(folder, proc))
        self._recv = self.inbox.socket.recv
        self.pump = Pump(self.inbox, self._on_frame)

    # Receiving

    def _on_frame(self, frame: bytes) -> None:
        message = m.decode(frame)
        kind = type(message)
        if kind in _FRAMED and message.frames:  # pyright: ignore[reportAttributeAccessIssue]
            number: int = message.frames  # pyright: ignore[reportAttributeAccessIssue]
            self._handlers[kind](message, [self.inbox.socket.recv(copy=False).buffer for _ in range(number)])
            return
        handler = self._handlers.get(kind)
        if handler is not None:
            handler(message, ())

    def on_message(self, frame: bytes, more: Sequence[Any] = ()) -> None:
        """Handles a message from within this process."""
        message = m.decode(frame)
        self._handlers[type(message)](message, more)

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
        from monarch._actors.cells import refuse

        refuse(self, call, self.gone.get(call.actor))

    def _never_came(self, actor: str) -> None:
        with self.peer_lock:
            waiting = self._early.pop(actor, [])
        for call, _ in waiting:
            self._refuse(call)

    def _on_create_message(self, create: m.Create, more: Sequence[Any]) -> None:
        if self.on_create is None:
            return
        self.on_create(create, more)
        if self._early:
            with self.peer_lock:
                waiting = self._early.pop(create.actor, [])
            for call, frames in waiting:
                self._on_call(call, frames)

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
        at = 0
        for size in batch.parts:
            reply = m.decode(more[at])
            self._handlers[type(reply)](reply, more[at + 1 : at + size])
            at += size

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
        if proc == self.proc:
            made: Peer = LocalPeer(self, proc)
        elif host_of(proc) == self.host:
            made = IpcPeer(self, proc, starting)
        else:
            made = RemotePeer(self, proc, self.gateway(host_of(proc)))
        with self.peer_lock:
            peer = self.peers.setdefault(proc, made)
        # An agent is missed by the loss of its host, and what this process belongs to takes it along.
        if peer is made and not starting and proc not in (self.proc, self.root) and not proc.endswith("/agent"):
            # A rank asks the agent of its own host, which hears of the loss of others as well.
            self.to_agent(self.host if self.config is not None else host_of(proc), m.Watch(self.proc, proc))
        return peer

    def gateway(self, host: str) -> Gateway:
        """The way to another host."""
        gateway = self._gateways.get(host)
        if gateway is None:
            agent = f"{host}/agent"
            if host in self.hosts and self.keys is not None:
                address, public = self.hosts[host]
                link = Link(self.context, address, self.hello, self.keys, public.encode(), self.lease)
                gateway = Gateway(link, agent, True)
            else:
                link = Link(self.context, ipc_address(self.folder, self.agent), self.hello)
                gateway = Gateway(link, agent, False)
            self._gateways[host] = gateway
        return gateway

    def adopt_gateway(self, host: str, link: Link) -> None:
        """Takes a connection that there is already as the way to another host."""
        self._gateways[host] = Gateway(link, f"{host}/agent", True)

    def address_of(self, host: str) -> str:
        """The address, without a port, at which another host is reached; empty if it is not known here."""
        address = self.hosts.get(host, ("", ""))[0]
        return address.removeprefix("tcp://").rpartition(":")[0].strip("[]")

    def to_agent(self, host: str, message: m.AnyMessage) -> None:
        """Sends to the agent of a host."""
        self.peer(f"{host}/agent").send(m.encode(message))

    def peer_died(self, dead: m.Dead) -> None:
        """Fails what waits for a process that has died."""
        peer = self.peer(dead.proc) if dead.proc in self.peers else self._dead_peer(dead.proc)
        if peer.dead is not None:
            return
        peer.end(dead)
        self.deaths += 1
        self.segments.forget(dead.proc)
        self.on_dying(dead)
        calls = [gather.label for gather in list(self._gathers.values()) if gather.lost(peer, dead)]
        if not dead.expected:
            self._tell_siblings(dead)
        self.pids.pop(dead.proc, None)
        for action in self.at_death:
            action(dead.proc)
        if self.on_dead is not None:
            self.on_dead(dead, calls)
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

    def wait_settled(self, uid: str) -> bool:
        """Waits until those who supervise a mesh have decided what becomes of its dead; whether that was open."""
        settling = self.settling.get(uid)
        if settling is None or settling.done or judging.get():
            return False
        self.wait(settling, _VERDICT)
        return True

    def shared_of(self, uid: str, name: str, wish: str) -> _Shared:
        """What belongs to a mesh that was spawned from here. StoppedError if it was not, or was stopped."""
        shared = self.own_procs.get(uid)
        if shared is None or shared.stopped is not None:
            why = "was stopped" if shared is not None else "was spawned elsewhere"
            raise StoppedError(f"{name} {why}, so it cannot be {wish} here", mesh=name)
        return shared

    def _dead_peer(self, proc: str) -> Peer:
        with self.peer_lock:
            return self.peers.setdefault(proc, Peer(self, proc))

    def host_died(self, host: str, reason: str, expected: bool = False) -> None:
        """A host is lost with all of its processes, or was shut down."""
        # It stays, closed: what is still sent to a lost host leads nowhere.
        gateway = self._gateways.get(host)
        if gateway is not None:
            gateway.close()
        for proc, peer in list(self.peers.items()):
            if peer.host == host and peer.dead is None and proc != self.proc:
                self.peer_died(m.Dead(proc, reason, expected, []))

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

    def make_room(self, peers: Iterable[Peer]) -> None:
        """Waits until each may be sent a message more: a sender that is far ahead slows down here."""
        for peer in peers:
            if peer.sent >= peer.credit and peer.dead is None:
                here = current.get()
                if here is None:
                    self.wait(peer, None)
                else:
                    self._wait_for_room(here[0], peer)

    def _wait_for_room(self, cell: Cell, peer: Peer) -> None:
        """In an actor: what it waits for may itself wait for room here, so a standstill is to end.

        Where nothing moves, and messages wait for this actor, it goes beyond the window: but so seldom that it is not
        far beyond if the receiver is only slow.
        """
        while not self.pump.wait(peer, peer.patience):
            self.idle()
            if cell.queue or peer.proc == self.proc:
                peer.go_beyond()
                return

    def reply(
        self, to: str, port: int, rank: int, status: int, body: bytes, buffers: Sequence[memoryview] = (), cost: int = 0
    ) -> None:
        """Sends a value or an error to a port of a process, after a message of it was handled of that cost."""
        done = self._finished[to] = self._finished.get(to, 0) + cost
        peer = self.peers.get(to) or self.peer(to)
        if not buffers:
            self._reported[to] = done
            peer.send(m.encode(m.Reply(self.proc, port, rank, status, done, body)))
        elif peer.host == self.host:
            bulk = self.put(buffers, [to])
            frames = 0 if bulk else len(buffers)
            peer.send(
                m.encode(m.Reply(self.proc, port, rank, status, done, body, bulk, frames)), () if bulk else buffers
            )
        else:
            frames = len(buffers)
            peer.send(m.encode(m.Reply(self.proc, port, rank, status, done, body, None, frames)), buffers)

    def has_finished(self, src: str, cost: int, replying: bool) -> None:
        """A message of a process was handled: its sender may send more."""
        done = self._finished[src] = self._finished.get(src, 0) + cost
        if not replying and done - self._reported.get(src, 0) >= _CREDIT_EVERY:
            self._reported[src] = done
            self.peer(src).send(m.encode(m.Credit(self.proc, done)))

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

    # Ending

    def close(self, linger_ms: int = 0) -> None:
        """Closes all sockets; what waits here gets no answer any more."""
        if self.closed:
            return
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
        self.segments.close()
        self.context.term()


def _nothing() -> None:
    pass
