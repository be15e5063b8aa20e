"""The host agent: one process on each host that starts ranks, watches over them and routes messages between hosts.

It is single-threaded, around one poll. It ends with its controller, and ends all ranks first.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from monarch._procs.agent import services
from monarch._procs.agent.children import Children
from monarch._procs.agent.connections import AgentConnections
from monarch._procs.agent.leaving import Leaving
from monarch._procs.agent.mishaps import AgentMishaps
from monarch._procs.agent.poll_loop import PollLoop
from monarch._procs.agent.reports import ReportGathering
from monarch._procs.agent.request import AgentConfig
from monarch._procs.agent.routes.forwarding import Forwarding
from monarch._procs.agent.routes.refusing import Refusing
from monarch._procs.agent.routes.router import Router
from monarch._procs.agent.routes.spreading import Spreading
from monarch._procs.agent.routes.uplink import AgentUplink
from monarch._procs.agent.spawning import Forks
from monarch._procs.agent.zygotes import Zygote
from monarch._procs.os.children import suspended_zygotes
from monarch._procs.os.orphans import end_descendants, end_orphans_in_time
from monarch._procs.os.posix import proc_start_time
from monarch._procs.rank.cell_marker import take_mark
from monarch._procs.session_folder import Residence, claim, host_id, make_folder, remove_folder, sweep
from monarch._wire import messages as m
from monarch._wire.keys import KeyPair
from monarch._wire.links import make_context
from monarch._wire.split import join
from monarch.exceptions import MonarchError

_UNCLAIMED_S = 1.0
"""Seconds between two looks whether a program has claimed this agent."""


class Agent(AgentConnections):
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
        self.uplink = AgentUplink(self.router, self._later, self._owner_died)
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
        self._later(self._residence.pause if self.owner else _UNCLAIMED_S, self._tend)

    def _follow_zygotes(self) -> None:
        fds = set(self.forks.filenos())
        for fd in self._zygotes - fds:
            self.loop.unwatch(fd)
        for fd in fds:
            self.loop.watch(fd, self._on_zygote, writable=self.forks.wants_write(fd))
        self._zygotes = fds

    def _read_lifeline(self, fd: int) -> None:
        if not os.read(fd, 4096):
            self._starter_ended()

    # Messages

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

    def _on_bye(self, bye: m.Bye, _: list[Any]) -> None:
        if bye.src == self.owner:
            self.closing = self.dismissed = True

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
