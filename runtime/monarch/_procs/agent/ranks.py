"""The ranks of a host agent: starts, signals, ends and deaths."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from monarch._core.causes import NotInSession, NotStarted, Orphaned, Overdue, Unknown
from monarch._core.roster import split_proc
from monarch._procs.agent.children import ChildProc, Children
from monarch._procs.agent.leaving import Leaving
from monarch._procs.agent.mishaps import AgentMishaps
from monarch._procs.agent.reports import ReportGathering
from monarch._procs.agent.request import AgentConfig
from monarch._procs.agent.routes.forwarding import Forwarding
from monarch._procs.agent.routes.router import Router
from monarch._procs.agent.routes.spreading import Spreading
from monarch._procs.agent.routes.uplink import AgentUplink
from monarch._procs.agent.spawning import Forks, lack_of_descriptors
from monarch._procs.os.orphans import end_orphans
from monarch._procs.os.posix import memfd, signal_main_thread
from monarch._procs.os.shared_names import remove_names
from monarch._procs.session_folder import host_of, remove_socket
from monarch._wire import messages as m
from monarch.exceptions import ProtocolError

_PIECE = 1 << 20
"""Bytes of output in one message."""
_RELIEVE, _RELIEVE_SOON = 1.0, 0.1
"""Seconds between checks of how much output ranks have not taken, and where one is far behind."""
_TIDY = 0.5
"""Seconds between checks on cleanup processes of dead ranks."""
_PATIENCE = 1.0
"""Seconds until a proc that nobody has asked for counts as unknown."""


class AgentRanks:
    """The ranks of an agent: how it starts, signals and ends them, and whom it tells of their deaths."""

    config: AgentConfig
    folder: str
    host: str
    proc: str
    owner: str
    children: Children
    forks: Forks
    router: Router
    reports: ReportGathering
    uplink: AgentUplink
    spreading: Spreading
    mishaps: AgentMishaps
    _forwarding: Forwarding
    _leaving: Leaving
    _later: Callable[[float, Callable[[], None]], None]
    _relieving: bool
    _tidying: bool

    def _refuses(self, spawn: m.Spawn) -> str:
        """Return why these procs cannot be started here; empty if they can."""
        if not all(self.router.is_here(proc) for proc in spawn.procs):
            # Another agent listens at the address of a lost one, and was sent the message meant for that one.
            return f"the address of its host now belongs to host {self.host}"
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
            self.children.add(ChildProc(proc, spawn.src, f"{spawn.title}[{place}]", pair))
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

    def _tell(self, proc: str, message: m.AnyMessage) -> None:
        if proc == self.proc:
            return
        frame = m.encode(message)
        # An expected death is no news, so it need not hurry.
        merges = isinstance(message, (m.Output, m.Reports)) or (isinstance(message, m.Dead) and message.expected)
        if not (merges and self.uplink.add(proc, frame)):
            self.router.send(proc, [frame])

    def _failed(self, frames: list[Any], error: Exception) -> None:
        self.mishaps.failed(self.owner, frames, error)
