"""The host agent: one process on each host that starts ranks, watches over them and routes messages between hosts.

It runs as ``python -m monarch._procs.agent.main``, single-threaded, around one poll. Its configuration comes on
standard input, because keys must not appear in a process list. It ends with its controller, and ends all ranks first.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import zmq

from monarch._core.causes import HostLost, NotInSession, NotStarted, Orphaned, Overdue, Unknown
from monarch._procs.agent import services
from monarch._procs.agent.children import Child, Children
from monarch._procs.agent.leaving import Leaving
from monarch._procs.agent.mishaps import AgentMishaps
from monarch._procs.agent.reply_batches import ReplyBatches
from monarch._procs.agent.reports import ReportGathering
from monarch._procs.agent.request import AgentConfig
from monarch._procs.agent.router import Frames, Router
from monarch._procs.agent.spawning import Forks, lack_of_descriptors
from monarch._procs.agent.spreading import Spreading
from monarch._procs.agent.zygotes import Zygote
from monarch._procs.os.orphans import end_descendants, end_orphans, end_orphans_in_time
from monarch._procs.os.posix import memfd, proc_start_time, set_child_subreaper, set_comm
from monarch._procs.os.shared_names import remove_names
from monarch._procs.rank.cell_marker import take_mark
from monarch._procs.session_folder import (
    TEND,
    Residence,
    claim,
    host_id,
    host_of,
    make_folder,
    remove_folder,
    remove_socket,
    sweep,
)
from monarch._wire import messages as m
from monarch._wire.bulk.segments import Segments
from monarch._wire.descriptors import raise_limit
from monarch._wire.keys import KeyPair
from monarch._wire.links import make_context
from monarch._wire.split import join
from monarch.exceptions import MonarchError, ProtocolError

UNABLE = "cannot listen: "
"""Printed in place of its address, before the reason."""
_PIECE = 1 << 20
"""Bytes of output in one message."""
_GATHER = 0.05
"""Seconds for which replies wait for those of other ranks, to go as one message."""
_RELIEVE, _RELIEVE_SOON = 1.0, 0.1
"""Seconds between checks of how much output ranks have not taken, and where one is far behind."""
_TIDY = 0.5
"""Seconds between checks on cleanup processes of dead ranks."""
_PATIENCE = 1.0
"""Seconds until a proc that nobody has asked for counts as unknown."""


class Agent:
    """The state of the agent, and its handling of each message."""

    def __init__(self, config: AgentConfig, zygote: Zygote | None = None) -> None:
        self.config = config
        self._timers: list[tuple[float, Callable[[], None]]] = []
        self.folder = config.folder or make_folder()
        self.host = config.host or host_id(self.folder)
        self.proc = f"{self.host}/agent"
        claim(self.folder)
        self.children = Children(lambda proc: take_mark(self.folder, proc))
        # The controller does not know a folder that the agent has made itself.
        cleaner = (config.owner_pid, config.owner_start) if config.folder else (0, 0)
        self.forks = Forks(config.preload, config.later, self.folder, cleaner, self._died, self._later, zygote)
        keys = KeyPair(config.keys[0].encode(), config.keys[1].encode()) if config.keys else KeyPair.new()
        self.router = Router(make_context(), self.proc, self.folder, keys, config.lease)
        self._residence = Residence(self.folder, self.router.inbox, hold=True)
        self.reply_batches = ReplyBatches(self.proc)
        self.reports = ReportGathering(self.proc, self.children, self._later, self._tell)
        self.spreading = Spreading(self.router, self._later, self._handle, self._failed, self._parted)
        self.segments = Segments()
        self.owner = config.owner
        end = partial(setattr, self, "closing", True)
        self._leaving = Leaving(config, self.host, self._later, self._tell_owner, end)
        self._claimed_by = time.monotonic() + (config.unclaimed or float("inf"))
        self.mishaps = AgentMishaps(self.proc, self.children, self._tell, self._died)
        self.poller = zmq.Poller()
        self.poller.register(self.router.inbox.socket, zmq.POLLIN)
        self._lost_hosts: set[str] = set()
        self.closing = False
        self._relieving = False
        self._tidying = False
        """Whether to look for cleanup processes of dead ranks now and then."""
        self.listening: m.Listening | None = None
        self._raw: dict[int, Callable[[], None]] = {}
        self._handlers: dict[type, Callable[[Any, list[Any]], None]] = {
            m.Hello: self._on_hello,
            m.Spawn: self._on_spawn,
            m.Stop: self._on_stop,
            m.Signal: self._on_signal,
            m.Watch: self._on_watch,
            m.Route: self._on_route,
            m.Cast: self._on_cast,
            m.Dead: self._on_dead,
            m.Hosts: self._on_hosts,
            m.Listen: self._on_listen,
            m.Release: self._on_release,
            m.Split: lambda split, pieces: self._handle(join(split, pieces)),
            m.Bye: self._on_bye,
            # Reported to those that want to reach the process that refuses.
            m.Refused: lambda refused, _: None,
            m.Ask: self._on_ask,
            m.Report: lambda report, _: self.reports.add(report),
            m.Ordered: self.spreading.on_ordered,
            m.Spread: self.spreading.on_spread,
            m.Answers: self.spreading.on_answers,
        }
        self.services: dict[str, Callable[[m.Ask, Any], Any]] = {
            services.STATES: lambda _, procs: self.children.states(procs),
            services.GPUS: lambda _, uid: self.forks.gpus.sharers(uid),
        }
        """Its services by name; arguments and answers are plain values."""

    # The loop

    def run(self) -> None:
        """Run until the controller ends or says so."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._leaving.on_term)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        self._watch_fd(reader, lambda: self._drain(reader))
        if self.config.owner_pid:
            try:
                pidfd = os.pidfd_open(self.config.owner_pid)
            except ProcessLookupError:
                self.closing = True
            else:
                self._watch_fd(pidfd, self._owner_died)
                if proc_start_time(self.config.owner_pid) != self.config.owner_start:
                    self.closing = True
        if self.config.lifeline >= 0:
            self._watch_fd(self.config.lifeline, lambda: self._read_lifeline(self.config.lifeline))
        self._tend()
        while not self.closing:
            self._step()

    def _tend(self) -> None:
        problem = self._residence.tend()
        if problem:
            print(f"{self.proc}: {problem}", file=sys.stderr, flush=True)
        self.closing = self.closing or (not self.owner and time.monotonic() > self._claimed_by)
        self._later(TEND, self._tend)

    def _step(self) -> None:
        for fd in self.forks.filenos():
            self._raw.setdefault(fd, self._on_zygote)
            self.poller.register(fd, select.POLLIN | (select.POLLOUT if self.forks.wants_write(fd) else 0))
        for fd in [fd for fd, action in self._raw.items() if action == self._on_zygote]:
            if fd not in self.forks.filenos():
                self.poller.unregister(fd)
                del self._raw[fd]
        timeout = None
        if self._timers:
            timeout = max(0, int((min(when for when, _ in self._timers) - time.monotonic()) * 1000) + 1)
        for source, _ in self.poller.poll(timeout):
            if isinstance(source, int):
                action = self._raw.get(source)
                if action is not None:
                    action()
            elif source is self.router.owner_monitor:
                if self.router.owner_lost():
                    self._owner_died()
            elif source in self.router.monitors():
                self.poller.unregister(source)
                name = self.router.lost(source)
                if name:
                    self._host_lost(name)
            else:
                self._receive(source)
        for monitor in self.router.monitors():
            if monitor not in self.poller:
                self.poller.register(monitor, zmq.POLLIN)
        now = time.monotonic()
        for timer in [timer for timer in self._timers if timer[0] <= now]:
            self._timers.remove(timer)
            timer[1]()

    def _watch_fd(self, fd: int, action: Callable[[], None]) -> None:
        self._raw[fd] = action
        self.poller.register(fd, select.POLLIN)

    def _read_lifeline(self, fd: int) -> None:
        if not os.read(fd, 4096):
            self._owner_died()

    def _later(self, seconds: float, action: Callable[[], None]) -> None:
        self._timers.append((time.monotonic() + seconds, action))

    def _receive(self, socket: zmq.Socket[bytes]) -> None:
        # A few at a time, so that no sender keeps the others waiting.
        for _ in range(200):
            try:
                frames: list[Any] = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if not frames[0]:
                continue
            try:
                self._handle(frames)
            except Exception as error:
                # A bad message must not end everyone's ranks.
                self._failed(frames, error)

    def _failed(self, frames: list[Any], error: Exception) -> None:
        self.mishaps.failed(self.owner, frames, error)

    def _handle(self, frames: list[Any]) -> None:
        message = m.decode(frames[0])
        handler = self._handlers.get(type(message))
        if handler is None:
            raise ProtocolError(f"unexpected {type(message).__name__} message for a host agent")
        handler(message, frames[1:])

    # Messages

    def _on_hello(self, hello: m.Hello, _: list[Any]) -> None:
        if hello.version != m.VERSION:
            reason = f"this host agent speaks protocol version {m.VERSION}, {hello.proc} speaks {hello.version}"
            self.router.send(hello.proc, [m.encode(m.Refused(m.VERSION, self.proc, reason))])
        elif not self.owner:
            self.owner = hello.proc

    def _refuses(self, spawn: m.Spawn) -> str:
        """Return why these procs cannot be started here; empty if they can."""
        if not all(self.router.is_here(proc) for proc in spawn.procs):
            # Another agent listens at the address of a lost one, and was sent the message meant for that one.
            return f"host {self.host} now has the address of its host"
        return lack_of_descriptors(len(spawn.procs))

    def _on_spawn(self, spawn: m.Spawn, _: list[Any]) -> None:
        reason = self._refuses(spawn)
        if reason:
            for proc in spawn.procs:
                self._tell(spawn.src, m.Dead(proc, NotStarted(reason), False, []))
            return
        if len(spawn.procs) != len(spawn.places):
            raise ProtocolError(f"a Spawn of {len(spawn.procs)} procs has {len(spawn.places)} places")
        fds = [(memfd("stdout"), memfd("stderr")) for _ in spawn.procs]
        for proc, place, pair in zip(spawn.procs, spawn.places, fds, strict=True):
            self.children.add(Child(proc, spawn.src, f"{spawn.title}[{place}]", pair))
        if not self.router.is_here(spawn.src) and spawn.src != self.owner:
            # The owner is a rank of another host: its agent reports its death.
            self.children.watch(self.proc, spawn.src)
            self._watch_elsewhere(spawn.src)
        self.forks.gpus.keep(self.children.by_proc)
        self.forks.spawn(spawn, fds)
        if not self._relieving:
            self._relieve()
        ended = self.children.death_of(spawn.src)
        if ended is not None:
            self._end_owned(ended)

    def _relieve(self) -> None:
        """From time to time, limit the output of ranks that are too busy to do so, such as in C code."""
        self._relieving = bool(self.children.by_proc)
        if self._relieving:
            self._later(_RELIEVE_SOON if self.children.relieve() else _RELIEVE, self._relieve)

    def _on_stop(self, stop: m.Stop, _: list[Any]) -> None:
        if stop.procs == [stop.src]:
            # Note that it is stopping, and how long its actors may take to clean up.
            for child in self.children.get(stop.procs):
                child.grace = stop.grace
            return
        for child in self.children.get(stop.procs):
            child.stopping = True
        self._later(stop.grace, lambda: self._end(stop.procs, stop.grace))

    def _end(self, procs: Sequence[str], grace: float) -> None:
        """Kill those that have not ended, unless they have asked for more time; 0 s cannot be extended."""
        for child in self.children.get(procs):
            if grace and child.grace > grace:
                self._later(child.grace - grace, partial(self._end, [child.proc], child.grace))
            else:
                child.kill(Overdue(grace))

    def _on_signal(self, request: m.Signal, _: list[Any]) -> None:
        for child in self.children.get(request.procs):
            if child.pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child.pid, request.number)

    def _on_ask(self, ask: m.Ask, _: list[Any]) -> None:
        try:
            service = self.services.get(ask.service)
            if service is None:
                raise MonarchError(f"a host agent has no service {ask.service!r}")
            status, body = m.RESULT, m.pack(service(ask, m.unpack(ask.body)))
        except MonarchError as error:
            # As a packed Failure, which belongs to a floor above.
            status, body = m.ERROR, m.pack([type(error).__name__, str(error), "", "", None, True])
        if ask.port:
            self._tell(ask.src, m.Reply(self.proc, ask.port, 0, status, 0, body))

    def _on_watch(self, watch: m.Watch, _: list[Any]) -> None:
        if not self.router.is_here(watch.proc):
            if self.router.knows(watch.proc):
                self.children.watch(watch.src, watch.proc)
                self._watch_elsewhere(watch.proc)
            else:
                self._tell(watch.src, m.Dead(watch.proc, NotInSession(), False, []))
            return
        dead = self.children.watch(watch.src, watch.proc)
        if dead is not None:
            self._tell(watch.src, dead)
        elif watch.proc not in self.children.by_proc and watch.proc not in (self.owner, self.proc):
            self._later(_PATIENCE, lambda: self._unknown(watch))

    def _watch_elsewhere(self, proc: str) -> None:
        self.router.send(f"{host_of(proc)}/agent", [m.encode(m.Watch(self.proc, proc))])

    def _unknown(self, watch: m.Watch) -> None:
        if watch.proc not in self.children.by_proc:
            dead = self.children.watch(watch.src, watch.proc)
            if dead is not None:
                self._tell(watch.src, dead)
                return
            self.router.drop(watch.proc)
            self._spread(m.Dead(watch.proc, Unknown(), False, []))

    def _on_dead(self, dead: m.Dead, _: list[Any]) -> None:
        """The agent of another host reports the death of its proc, or the controller the loss of a host."""
        if dead.proc.endswith("/agent"):
            self.spreading.lost(host_of(dead.proc))
        self._spread(dead)

    def _on_route(self, route: m.Route, frames: list[Any]) -> None:
        if route.dst == self.proc:
            self._handle(frames)
            return
        if not self.router.is_here(route.dst) and len(frames) >= 1:
            message = m.decode(frames[0])
            if isinstance(message, m.Reply):
                batch = self.reply_batches.add(route.dst, message.port, message.src, frames)
                if batch is not None:
                    if batch:
                        self.spreading.answer(route.dst, message.port, batch, True)
                    elif self.reply_batches.waiting(route.dst, message.port) == 1:
                        dst, port = route.dst, message.port
                        self._later(_GATHER, lambda: self._send_gathered(dst, port))
                    return
        if self.children.death_of(route.dst) is None and not self.router.send(route.dst, frames):
            self._undelivered(route.dst, frames)

    def _undelivered(self, dst: str, frames: list[Any]) -> None:
        """Tell the sender of a message that its target is unreachable."""
        source = getattr(m.decode(frames[0]), "src", "")
        if source and source != dst:
            host = host_of(dst)
            cause = HostLost(host) if host in self._lost_hosts else NotInSession()
            self._tell(source, m.Dead(dst, cause, False, []))

    def _send_gathered(self, dst: str, port: int) -> None:
        """Stop gathering, so that replies do not wait for those of slow ranks."""
        self.spreading.answer(dst, port, self.reply_batches.take(dst, port), False)

    def _on_cast(self, cast: m.Cast, frames: list[Any]) -> None:
        # A proc not started yet gets it then: the sender may have overtaken the Spawn.
        procs = [proc for proc in cast.procs if self.children.death_of(proc) is None]
        if cast.port and not self.reply_batches.begin(cast.src, cast.port, procs):
            self.spreading.answer(cast.src, cast.port, [], True)
        if len(frames) > 1:
            frames = self._into_shared_memory(frames, procs)
        for proc in procs:
            if not self.router.send(proc, frames):
                self._undelivered(proc, frames)

    def _into_shared_memory(self, frames: list[Any], procs: list[str]) -> list[Any]:
        """Large buffers from another host are written once for all ranks of this one."""
        call = m.decode(frames[0])
        if not isinstance(call, m.Call) or not procs:
            return frames
        try:
            ref = self.segments.put([memoryview(frame) for frame in frames[1:]], procs)
        except MemoryError:
            # No memory or no file descriptor: each gets the frames themselves.
            return frames
        bulk = (self.proc, ref.pid, ref.fd, ref.segment, list(ref.spans))
        return [m.encode(msgspec.structs.replace(call, bulk=bulk, frames=0))]

    def _on_release(self, release: m.Release, _: list[Any]) -> None:
        for segment in release.segments:
            self.segments.release(segment, release.src)

    def _on_hosts(self, hosts: m.Hosts, _: list[Any]) -> None:
        self.router.learn(hosts)
        self._lost_hosts.difference_update(hosts.hosts)
        if self.config.one_port and self.owner in hosts.hosts:
            # Its connection to the shared port is not told from those of others: watch the one back to it.
            self.router.connect(self.owner)
        self.router.watched_by = self.owner if self.router.owner_monitor is not None else ""
        if self.listening is not None and hosts.token and self.owner in hosts.hosts:
            # An owner that connected by address alone learns the agent's identity from this.
            self._tell(self.owner, msgspec.structs.replace(self.listening, token=hosts.token))

    def _on_listen(self, listen: m.Listen, _: list[Any]) -> None:
        allowed = [key.encode() for key in listen.allowed]
        listening = self.listen(listen.address, allowed[0], allowed)
        self._tell(listen.src, listening)

    def listen(self, address: str, owner: bytes, allowed: list[bytes]) -> m.Listening:
        """Bind for other hosts, and watch the connection of the owner if it is on another one."""
        listening = self.router.listen(address, owner, allowed, self.config.one_port)
        for socket in (self.router.owner_socket, self.router.peer_socket):
            assert socket is not None
            self.poller.register(socket, zmq.POLLIN)
        if self.config.listen and self.router.owner_monitor is not None:
            self.poller.register(self.router.owner_monitor, zmq.POLLIN)
            self.listening = listening
        return listening

    def _on_bye(self, bye: m.Bye, _: list[Any]) -> None:
        self.closing = self.closing or bye.src == self.owner

    # Deaths

    def _drain(self, reader: int) -> None:
        deaths: list[m.Dead] = []
        with contextlib.suppress(BlockingIOError):
            os.read(reader, 4096)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if not pid:
                break
            if self._leaving.ended(pid, status) or self.forks.ended(pid, status):
                continue
            dead = self.children.ended(pid, status)
            if dead is not None:
                deaths.append(dead)
        if deaths and not self._tidying:
            self._end_orphans()
        elif deaths:
            end_orphans()
        for dead in deaths:
            self._died(dead)
        if not self.forks.busy():
            self.children.forget_early()

    def _end_orphans(self) -> None:
        """Until the cleanup processes are done."""
        self._tidying = bool(end_orphans())
        if self._tidying:
            self._later(_TIDY, self._end_orphans)
        else:
            remove_names(self.folder, list(self.children.by_proc))

    def _on_zygote(self) -> None:
        self.forks.work(self.children)
        if not self.forks.busy():
            self.children.forget_early()

    def _died(self, dead: m.Dead) -> None:
        self.segments.forget(dead.proc)
        self.reports.died(dead.proc)
        self.router.drop(dead.proc)
        remove_socket(self.folder, dead.proc)
        words, self.children.last_words = self.children.last_words, []
        for proc, stream, offset, data in words:
            for at in range(0, len(data), _PIECE):
                self._tell(self.owner, m.Output(proc, "", "", "", 0, [(stream, offset + at, data[at : at + _PIECE])]))
        self._spread(dead)

    def _spread(self, dead: m.Dead) -> None:
        for watcher in self.children.watchers(dead.proc):
            self._tell(watcher, dead)
        for dst, port, batch in self.reply_batches.died(dead.proc):
            self.spreading.answer(dst, port, batch, True)
        self._end_owned(dead)

    def _end_owned(self, dead: m.Dead) -> None:
        for child in self.children.owned_by(dead.proc):
            child.kill(Orphaned(dead.proc, dead.cause))

    def _tell_owner(self, message: m.AnyMessage) -> bool:
        return self.router.send(self.owner, [m.encode(message)])

    def _tell(self, proc: str, message: m.AnyMessage) -> None:
        if proc != self.proc:
            self.router.send(proc, [m.encode(message)])

    def _host_lost(self, name: str) -> None:
        if name == self.owner:
            self._owner_died()
            return
        self._lost_hosts.add(name)
        self.spreading.lost(name)
        for proc in self.children.watched_on(name):
            self._spread(m.Dead(proc, HostLost(name), False, []))
        self._parted(name)

    def _parted(self, host: str) -> None:
        if self.owner:
            # It may still be connected to both hosts.
            self._tell_owner(m.Parted(self.proc, self.host, host))

    def _owner_died(self) -> None:
        self.closing = True

    def close(self) -> None:
        """End all ranks and zygotes, and remove the session's folder."""
        self.children.kill_all()
        self.forks.close()
        self.router.close()
        self._residence.close()
        end_descendants()
        end_orphans_in_time()
        with contextlib.suppress(OSError):
            # The fork server may have been killed with the controller, and has a folder too.
            sweep(Path(self.folder).parent)
        remove_folder(self.folder)


A = TypeVar("A", bound=Agent)


def run_agent(make: Callable[[], A], begin: Callable[[A], None]) -> None:
    """Run an agent in this process, until its end.

    Args:
        make: makes the agent.
        begin: called with it once, before it runs.
    """
    raise_limit()
    set_child_subreaper()
    set_comm("monarch-agent")
    agent = make()
    try:
        begin(agent)
        agent.run()
    finally:
        agent.close()


def main() -> None:
    """Entry point of the agent's process."""
    serve(msgspec.msgpack.decode(sys.stdin.buffer.read(), type=AgentConfig))


def _print(outcome: m.Listening | str) -> None:
    """Write where an agent listens, or why it cannot, to standard output."""
    line = outcome.encode() if isinstance(outcome, str) else msgspec.json.encode(outcome)
    sys.stdout.buffer.write(line + b"\n")
    sys.stdout.flush()


def serve(
    config: AgentConfig, zygote: Zygote | None = None, announce: Callable[[m.Listening | str], None] = _print
) -> None:
    """Run until the controller ends or says so.

    Args:
        config: its configuration.
        zygote: an existing one.
        announce: called once with where an agent for another host listens, or with why it cannot.
    """

    def begin(agent: Agent) -> None:
        hello: Frames = [m.encode(m.Ready(agent.proc, os.getpid()))]
        if config.listen:
            try:
                listening = agent.listen(config.listen, config.owner_public.encode(), [])
            except zmq.ZMQError as error:
                announce(f"{UNABLE}{zmq.strerror(error.errno or 0)}")
                agent.closing = True
                return
            announce(listening)
        if config.owner_pid and agent.router.is_here(config.owner):
            agent.router.send(config.owner, hello)

    run_agent(lambda: Agent(config, zygote), begin)


if __name__ == "__main__":
    main()
