"""The host agent: one process on each host that starts ranks, watches over them and routes messages between hosts.

It is single-threaded, around one poll. It ends with its controller, and ends all ranks first.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import zmq

from monarch._core.causes import HostLost, NotInSession, NotStarted, Orphaned, Overdue, Unknown
from monarch._core.roster import split_proc
from monarch._procs.agent import services
from monarch._procs.agent.children import Child, Children
from monarch._procs.agent.leaving import Leaving
from monarch._procs.agent.mishaps import AgentMishaps
from monarch._procs.agent.poll_loop import PollLoop
from monarch._procs.agent.reports import ReportGathering
from monarch._procs.agent.request import AgentConfig
from monarch._procs.agent.routes.forwarding import Forwarding
from monarch._procs.agent.routes.refusing import Refusing
from monarch._procs.agent.routes.router import Router
from monarch._procs.agent.routes.spreading import Spreading
from monarch._procs.agent.routes.uplink import Uplink
from monarch._procs.agent.spawning import Forks, lack_of_descriptors
from monarch._procs.agent.zygotes import Zygote
from monarch._procs.os.children import suspended_zygotes
from monarch._procs.os.orphans import end_descendants, end_orphans, end_orphans_in_time
from monarch._procs.os.posix import memfd, proc_start_time, signal_main_thread
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
from monarch._wire.keys import KeyPair
from monarch._wire.links import make_context
from monarch._wire.split import join
from monarch.exceptions import MonarchError, ProtocolError

_PIECE = 1 << 20
"""Bytes of output in one message."""
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
        self.loop = PollLoop()
        self._later = self.loop.later
        self.folder = zygote.session_dir if zygote is not None else config.folder or make_folder()
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
        self.reports = ReportGathering(self.proc, self.children, self._later, self._tell)
        self.uplink = Uplink(self.router, self._later, self._owner_died)
        self.spreading = Spreading(self.router, self.uplink, self._later, self._handle, self._failed, self._parted)
        self._forwarding = Forwarding(
            self.router, self.children, self.spreading, self.uplink, self._later, self._tell, self._handle
        )
        self.owner = config.owner
        self.refusing = Refusing(self.router, self._later)
        end = partial(setattr, self, "closing", True)
        self._leaving = Leaving(config, self.host, self._later, self._tell_owner, end)
        self._claimed_by = time.monotonic() + (config.unclaimed or float("inf"))
        self.mishaps = AgentMishaps(self.proc, self.children, self._tell, self._died)
        self._receive_from(self.router.inbox.socket)
        self._zygotes: set[int] = set()
        """Descriptors of the zygotes in the loop."""
        self.closing = False
        self.dismissed = False
        """Whether its controller has said goodbye."""
        self._relieving = False
        self._tidying = False
        """Whether to look for cleanup processes of dead ranks now and then."""
        self.listening: m.Listening | None = None
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
            m.Release: self._forwarding.released,
            m.Split: lambda split, pieces: self._handle(join(split, pieces)),
            m.Bye: self._on_bye,
            # Reported to those that want to reach the process that refuses.
            m.Refused: lambda refused, _: None,
            m.Ask: self._on_ask,
            m.Report: lambda report, _: self.reports.add(report),
            m.Ordered: self.spreading.on_ordered,
            m.Spread: self.spreading.on_spread,
            m.Answers: self.spreading.on_answers,
            m.Uplink: self._on_uplink,
            m.Down: self._on_down,
            m.Upward: self.uplink.on_upward,
            m.Taken: self.uplink.on_taken,
        }
        self.services: dict[str, Callable[[m.Ask, Any], Any]] = {
            services.STATES: lambda _, procs: self.children.states(procs),
            services.ENDED: lambda _, procs: self.children.ended_of(procs),
            services.GPUS: lambda _, uid: self.forks.gpus.sharers(uid),
            services.SUSPENDED: lambda _, __: suspended_zygotes(os.getpid()),
        }
        """Its services by name; arguments and answers are plain values."""

    # The loop

    def take_signals(self) -> None:
        """Let ``run`` handle the signals that come from now on: before anybody knows of this agent."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._leaving.on_term)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        self.loop.watch(reader, lambda: self._drain(reader))

    def run(self) -> None:
        """Run until the controller ends or says so."""
        if self.config.owner_pid:
            try:
                pidfd = os.pidfd_open(self.config.owner_pid)
            except ProcessLookupError:
                self.closing = True
            else:
                self.loop.watch(pidfd, self._starter_ended)
                if proc_start_time(self.config.owner_pid) != self.config.owner_start:
                    self.closing = True
        if self.config.lifeline >= 0:
            self.loop.watch(self.config.lifeline, lambda: self._read_lifeline(self.config.lifeline))
        self._tend()
        while not self.closing:
            self._follow_zygotes()
            self._follow_links()
            self.loop.step()

    def _tend(self) -> None:
        problem = self._residence.tend()
        if problem:
            print(f"{self.proc}: {problem}", file=sys.stderr, flush=True)
        # A SIGTERM meanwhile also sets it.
        if not self.owner and time.monotonic() > self._claimed_by:
            self.closing = True
        self._later(TEND, self._tend)

    def _follow_zygotes(self) -> None:
        fds = set(self.forks.filenos())
        for fd in self._zygotes - fds:
            self.loop.unwatch(fd)
        for fd in fds:
            self.loop.watch(fd, self._on_zygote, writable=self.forks.wants_write(fd))
        self._zygotes = fds

    def _follow_links(self) -> None:
        for monitor in self.router.idle():
            if self.loop.watches(monitor):
                self.loop.unwatch(monitor)
            monitor.close(0)
        for monitor in self.router.monitors():
            if not self.loop.watches(monitor):
                self.loop.watch(monitor, partial(self._link_lost, monitor))

    def _link_lost(self, monitor: zmq.Socket[bytes]) -> None:
        self.loop.unwatch(monitor)
        name = self.router.lost(monitor)
        if name == self.owner and self.uplink.hung:
            # It may have gone for good: then the agent on the way to it will, too.
            self.uplink.straight_lost()
        elif name and self.refusing.told(name):
            self.router.forget_address(name)
        elif name and self._may_reconnect(name):
            self._host_left(name)
            self._tell_owner(m.Parted(self.proc, self.host, name, True))
        elif name:
            self.router.forget_address(name)
            self._host_lost(name)

    def _look_at_owner(self) -> None:
        if self.router.owner_lost():
            self._owner_parted()

    def _owner_parted(self) -> None:
        # Without an owner, it was a program that is not served.
        if self.owner and not (self.uplink.hung or self.uplink.orphan):
            self._owner_died()

    def _receive_from(self, socket: zmq.Socket[bytes]) -> None:
        self.loop.watch(socket, lambda: self._receive(socket))

    def _read_lifeline(self, fd: int) -> None:
        if not os.read(fd, 4096):
            self._starter_ended()

    def _receive(self, socket: zmq.Socket[bytes]) -> None:
        # A few at a time, so that no sender keeps the others waiting.
        for _ in range(200):
            try:
                frames = self.router.receive(socket)
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
            self.refusing.greeted(hello)
        elif not self.owner:
            self.owner = hello.proc
            self.refusing.pid = hello.pid
            if self.router.owner_monitor is not None:
                # It may have looked with another connection before, whose end is not that of the owner.
                self.router.owner_lost()
                if not self.router.own():
                    self._owner_died()
        elif hello.proc == self.owner and not self.router.own_too():
            self._owner_parted()

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
                self._forwarding.died(proc)
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
        if not request.procs:
            # It asks what has arrived.
            self.spreading.ordering.say(request.src)
        for child in self.children.get(request.procs):
            if child.pid:
                with contextlib.suppress(ProcessLookupError):
                    signal_main_thread(child.pid, request.number)

    def _on_ask(self, ask: m.Ask, _: list[Any]) -> None:
        try:
            service = self.services.get(ask.service)
            if service is None:
                raise MonarchError(f"a host agent has no service {ask.service!r}")
            status, body = m.RESULT, m.pack(service(ask, m.unpack(ask.body)))
        except MonarchError as error:
            status, body = m.ERROR, m.pack(m.Failure(type(error).__name__, str(error), "", "", None, True))
        if ask.port:
            # Those of a request to agents of many hosts are gathered, as those of ranks.
            self._forwarding.route(ask.src, [m.encode(m.Reply(self.proc, ask.port, 0, status, 0, body))])

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
        if dead.proc == self.owner:
            # It counts this host as lost.
            self._owner_died()
            return
        if dead.proc.endswith("/agent"):
            self.spreading.lost(host_of(dead.proc))
            self.uplink.lost(host_of(dead.proc))
        self._spread(dead)

    def _on_route(self, route: m.Route, frames: list[Any]) -> None:
        if route.dst == self.proc:
            self._handle(frames)
            return
        self._forwarding.route(route.dst, frames)

    def _on_cast(self, cast: m.Cast, frames: list[Any]) -> None:
        if frames and frames[0][:2] == m.SPAWN_HEAD:
            self._spawn_of(cast, frames[0])
        else:
            self._forwarding.cast(cast, frames)

    def _spawn_of(self, cast: m.Cast, frame: Any) -> None:
        """Start the procs of this host that a request for procs of many hosts names."""
        spawn = m.decode(frame)
        assert isinstance(spawn, m.Spawn)
        places = [split_proc(proc)[1] for proc in cast.procs]
        spawn = msgspec.structs.replace(spawn, procs=cast.procs, places=places)
        self._forwarding.expect(cast)
        try:
            self._on_spawn(spawn, [])
        except Exception as error:
            self._failed([m.encode(spawn)], error)
            for proc in cast.procs:
                if proc not in self.children.by_proc:
                    self._forwarding.died(proc)

    def _on_uplink(self, uplink: m.Uplink, _: list[Any]) -> None:
        if uplink.src != self.owner:
            return
        waited, before = self.uplink.hung or self.uplink.orphan, self.uplink.via
        self.uplink.on_uplink(uplink)
        if before not in ("", self.proc) and not uplink.via:
            # It may hang.
            self.spreading.avoid(before)
        if waited:
            self._take_back()

    def _take_back(self) -> None:
        """Live as long as the connections with the owner again, which has just connected."""
        self.router.hurries = ""
        if self.router.owner_monitor is None:
            self.router.connect(self.owner)
            return
        self.router.watched_by = self.owner
        # Earlier connections of it may have broken.
        self.router.owner_lost()
        if not self.router.own():
            self._owner_died()

    def _on_down(self, down: m.Down, frames: list[Any]) -> None:
        """Pass a message of the controller on to an agent that hangs on this one."""
        if not self.router.post(f"{down.host}/agent", frames):
            self._parted(down.host)

    def _on_hosts(self, hosts: m.Hosts, _: list[Any]) -> None:
        if hosts.token and self.owner not in hosts.hosts:
            # The end of the owner may not be processed yet.
            self._look_at_owner()
            if not self.closing:
                self.refusing.answer(hosts, self.owner)
            return
        self.router.learn(hosts)
        self._forwarding.found(hosts.hosts)
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
            self._receive_from(socket)
        if self.config.listen:
            self.listening = listening
            if self.router.owner_monitor is not None:
                self.loop.watch(self.router.owner_monitor, self._look_at_owner)
        return listening

    def _on_bye(self, bye: m.Bye, _: list[Any]) -> None:
        if bye.src == self.owner:
            self.closing = self.dismissed = True

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
        self._forwarding.forget(dead.proc)
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
        self._forwarding.died(dead.proc)
        self._end_owned(dead)

    def _end_owned(self, dead: m.Dead) -> None:
        for child in self.children.owned_by(dead.proc):
            child.kill(Orphaned(dead.proc, dead.cause))

    def _tell_owner(self, message: m.AnyMessage) -> bool:
        return self.router.send(self.owner, [m.encode(message)])

    def _tell(self, proc: str, message: m.AnyMessage) -> None:
        if proc == self.proc:
            return
        frame = m.encode(message)
        # An expected death is no news, so it need not hurry.
        merges = isinstance(message, (m.Output, m.Reports)) or (isinstance(message, m.Dead) and message.expected)
        if not (merges and self.uplink.add(proc, frame)):
            self.router.send(proc, [frame])

    def _host_lost(self, name: str) -> None:
        if name == self.owner:
            self._owner_died()
            return
        self._forwarding.lost(name)
        self._host_left(name)
        for proc in self.children.watched_on(name):
            self._spread(m.Dead(proc, HostLost(name), False, []))
        self._parted(name)

    def _may_reconnect(self, name: str) -> bool:
        """Return whether all that was on a connection to a host is kept until it has arrived, for another one."""
        return bool(self.owner) and name != self.owner and not self.children.has_ties(name)

    def _host_left(self, name: str) -> None:
        """Send the controller itself what a host may not have passed on."""
        self.uplink.lost(name)
        self.spreading.lost(name)

    def _parted(self, host: str) -> None:
        if self.owner:
            # It may still be connected to both hosts.
            self._tell_owner(m.Parted(self.proc, self.host, host))

    def _owner_died(self) -> None:
        self.closing = True

    def _starter_ended(self) -> None:
        """Handle the end of the process that this one ends with, or of the connection to it."""
        self.closing = True

    def close(self) -> None:
        """End all ranks and zygotes, and remove the session's folder."""
        self.children.kill_all()
        self.forks.close()
        self.uplink.close()
        self.router.close()
        self._residence.close()
        end_descendants()
        end_orphans_in_time()
        with contextlib.suppress(OSError):
            # The fork server may have been killed with the controller, and has a folder too.
            sweep(Path(self.folder).parent)
        remove_folder(self.folder)
