"""The collector of a process: what happens to its meshes becomes entries of their logs.

The threads in which things happen only note them; a thread of its own writes the logs, and so does a thread that reads
one, so that it sees all that has happened before.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from threading import RLock, Thread
from typing import Any
from weakref import WeakValueDictionary

from monarch._core.roster import split_proc
from monarch._core.telemetry.event_table import EventTable
from monarch._core.telemetry.events import Progress
from monarch._meshes.inside import node_of, region_of, state_of
from monarch._meshes.mesh_like import ActorMeshLike, ProcMeshLike
from monarch._meshes.procs.state import ProcsState
from monarch._meshes.registry import meshes_of
from monarch._node.liveness import Liveness
from monarch._node.node import Node
from monarch._node.services.registry import service
from monarch._python.threads import new_thread
from monarch._telemetry.calls import ProcessCalls
from monarch._telemetry.lives import Lives
from monarch._telemetry.logged import Logged
from monarch._telemetry.mesh_telemetry import MeshTelemetry
from monarch._telemetry.serving import TelemetryServer
from monarch._wire import messages as m
from monarch._wire.receiving.aside import tell_error
from monarch._wire.receiving.leadership import Gate
from monarch.exceptions import MonarchError

PERIOD, UNWATCHED = 0.1, 5.0
"""Seconds between two looks at what has happened, and without subscribers."""
_EARLY = 1000
"""Reports of ranks of unknown meshes that are kept."""
SKEW = 0.5
"""Seconds by which the clock of a host differs at least if it is corrected."""


class Collector:
    """Writes the logs of the meshes that were spawned from a process."""

    def __init__(self, node: Node) -> None:
        self._node = node
        # Appended by any thread, taken with _writing held: what to do, with its arguments.
        self._noted: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._writing = RLock()
        """Held while noted things are written to the logs; by one thread at a time, so that they stay in order."""
        # Lock of the next four: _writing; looked up without it.
        self.lives: dict[str, Lives] = {}
        self._logs: WeakValueDictionary[str, MeshTelemetry] = WeakValueDictionary()
        self._early: deque[tuple[str, bytes, list[bytes], float, float]] = deque(maxlen=_EARLY)
        self._calls = ProcessCalls(self.lives, node.ports)
        self._calls.wake = self.wake
        self._gate = Gate()
        self._closing = False
        """Whether the thread must end. Set once."""
        self._thread: Thread | None = None
        """Made once, under ``_writing``."""
        self._server: TelemetryServer | None = None
        """Shows the meshes to other programs; made once, under ``_writing``. None in a rank."""
        self._own: Logged | None = None
        """Metrics and progress of this program; None in a rank, which reports them to its owner. Set once."""
        if node.config is None and node.proc == node.root:
            self._own = node.part(Logged)
            self._own.wake, self._own.heard = self.wake, self._is_heard
            self._own.flush = self.settle
        self._subscribe()

    def _subscribe(self) -> None:
        node, meshes = self._node, meshes_of(self._node)
        meshes.added.subscribe(self._added)
        meshes.joined.subscribe(lambda uid, rank, proc: self.note(self._joined, uid, rank, proc, time.time()))
        meshes.left.subscribe(lambda uid, rank: self.note(self._left, uid, time.time()))
        node.events.ready.subscribe(self._ready)
        node.events.died.subscribe(self._died)
        node.events.call_failed.subscribe(self._calls.failed)
        node.events.call_waits.subscribe(self._calls.waits)
        node.ports.closed.subscribe(self._calls.closed)
        node.events.closing.subscribe(self._close)
        node.dispatch.handle(m.Report, lambda report, _: self.note(self._report, report, time.time()))
        node.dispatch.handle(m.Reports, lambda reports, _: self.note(self._reports, reports, time.time()))
        node.part(Liveness).changed.subscribe(lambda proc, text: self.note(self._silent, proc, text, time.time()))

    def _added(self, uid: str, shared: ProcsState) -> None:
        # From the first mesh on: calls of a rank cost nothing here.
        self._node.events.sent = self._calls.sent
        self.note(self._add, uid, shared, time.time())
        if self._own is not None and self._server is None:
            self._show()

    def _show(self) -> None:
        """Show the meshes to other programs of this user from now on."""
        with self._writing, suppress(OSError):
            if self._server is None and not self._closing:
                self._server = TelemetryServer(self._node.folder, self.running_logs)

    # From any thread

    def note(self, what: Callable[..., None], *args: Any) -> None:
        """Note something to write to a log soon."""
        self._noted.append((what, args))
        self.wake()

    def wake(self) -> None:
        """Make the thread look soon."""
        if self._calls.asleep:
            self._calls.asleep = False
            if self._thread is None:
                self._start()
            self._gate.open()

    def advance(self, uid: str, event: Progress) -> None:
        """Note progress of work on a mesh."""
        self.note(self._advance, uid, event, time.time())

    def _hurry(self) -> None:
        """Make the thread look at once."""
        self.wake()
        self._gate.open()

    def log_of(self, uid: str) -> MeshTelemetry | None:
        """Return the log of a mesh that was spawned from here; None if it has none, or no longer."""
        self.settle()
        return self._logs.get(uid)

    def running_logs(self) -> list[MeshTelemetry]:
        """Return the logs of the meshes that run."""
        self.settle()
        with self._writing:
            return [lives.log for lives in self.lives.values()]

    def settle(self) -> None:
        """Write all that has happened so far."""
        held: list[Any] = []
        with self._writing:
            while self._noted:
                what, args = self._noted.popleft()
                try:
                    what(*args)
                except Exception as error:
                    tell_error(error)
            self._calls.look(held)
            if self._own is not None:
                self._log_own(self._own)
        # The last references to results may go here, without the lock.
        del held

    # The thread

    def _start(self) -> None:
        with self._writing:
            if self._thread is None:
                self._thread = new_thread("monarch-telemetry", self._run)
                self._thread.start()

    def _run(self) -> None:
        quiet = True
        while not self._closing:
            if quiet:
                self._calls.asleep = True
                if not self._has_news() and not self._behind():
                    self._gate.wait(None)
                    if self._closing:
                        break
                self._calls.asleep = False
            # Opened early for a new subscriber, and at the end.
            self._gate.wait(PERIOD if self._is_watched() else UNWATCHED)
            # After news it looks once more before it sleeps: for a call now and then, that wakes it half as often.
            quiet = not self._has_news()
            self.settle()
            self._tell()

    def _has_news(self) -> bool:
        return bool(self._noted or self._calls.are_open or (self._own and self._own.pending))

    def _is_watched(self) -> bool:
        return any(log.subscribers for log in list(self._logs.values()))

    def _behind(self) -> bool:
        """Return whether a subscriber has not been told all: a reader may have written what was noted meanwhile."""
        with self._writing:
            logs = list(self._logs.values())
            return any(each.told < log.number for log in logs for each in log.subscribers)

    def _tell(self) -> None:
        """Call the subscribers of logs that have changed, unless their last call has not ended."""
        for log in list(self._logs.values()):
            for subscriber in log.subscribers:
                if subscriber.told < log.number and not subscriber.running:
                    subscriber.told, subscriber.running = log.number, True
                    self._node.lanes.post(f"events-{log.name}", subscriber)

    def _close(self) -> None:
        """End with the session."""
        now = time.time()
        # First, since the thread looks at it after each wait: an opening that another one has preceded may be lost.
        self._closing = True
        for uid in list(self.lives):
            self.note(self._end, uid, "the session was shut down", now)
        self._gate.open()
        self.settle()
        with self._writing:
            server = self._server
        if server is not None:
            server.close()
        thread = self._thread
        if thread is not None:
            thread.join(1.0)

    # News, with the lock

    def _add(self, uid: str, shared: ProcsState, when: float) -> None:
        if uid in self.lives:
            return
        log = MeshTelemetry(uid, shared.procs.name, self.settle, self._hurry)
        self._logs[uid] = log
        lives = self.lives[uid] = Lives(log, shared.procs, self._node.hosts.name_of)
        lives.resized(when)
        shared.ended.subscribe(lambda: self.note(self._end, uid, shared.stopped or "stopped", time.time()))

    def _joined(self, uid: str, rank: int, proc: str, when: float) -> None:
        lives = self.lives.get(uid)
        if lives is not None:
            lives.resized(when)
            lives.joined(rank, proc, when)

    def _left(self, uid: str, when: float) -> None:
        lives = self.lives.get(uid)
        if lives is not None:
            lives.resized(when)

    def _end(self, uid: str, reason: str, when: float) -> None:
        lives = self.lives.pop(uid, None)
        if lives is not None:
            lives.end(reason, when)

    def _ready(self, ready: m.Ready) -> None:
        self.note(self._started, ready.src, ready.pid, time.time())

    def _started(self, proc: str, pid: int, when: float) -> None:
        lives = self.lives.get(split_proc(proc)[0])
        if lives is not None:
            lives.started(proc, pid, when)
            early, self._early = self._early, deque(maxlen=_EARLY)
            for each in early:
                self._take(*each)

    def _died(self, dead: m.Dead, _: list[str]) -> None:
        self.note(self._dead, dead, time.time())

    def _dead(self, dead: m.Dead, when: float) -> None:
        lives = self.lives.get(split_proc(dead.proc)[0])
        if lives is not None:
            lives.died(dead, dead.when or when)

    def _advance(self, uid: str, event: Progress, when: float) -> None:
        lives = self.lives.get(uid)
        if lives is not None:
            lives.log.add(event, when)

    def _report(self, report: m.Report, when: float) -> None:
        self._take(report.src, report.state, report.more, when, 0.0)

    def _reports(self, reports: m.Reports, when: float) -> None:
        ahead = reports.now - when
        for proc, state, more in reports.parts:
            # Clocks of hosts differ; on one host, only the message took time.
            self._take(proc, state, more, when, ahead if abs(ahead) > SKEW else 0.0)

    def _take(self, proc: str, state: bytes, more: list[bytes], when: float, ahead: float) -> None:
        lives = self.lives.get(split_proc(proc)[0])
        if lives is None:
            # An agent sends the reports of a detached mesh before this program knows the mesh.
            self._early.append((proc, state, more, when, ahead))
        else:
            lives.report(proc, state, more, when, ahead)

    def _log_own(self, own: Logged) -> None:
        events = own.take(-1)
        for lives in list(self.lives.values()) if events else ():
            for event in events:
                lives.log.add(event)

    def _is_heard(self) -> bool:
        return bool(self.lives) or bool(self._noted)

    def _silent(self, proc: str, text: str, when: float) -> None:
        lives = self.lives.get(split_proc(proc)[0])
        if lives is not None:
            lives.silent(proc, text, when)


def telemetry_of(mesh: ProcMeshLike | ActorMeshLike) -> MeshTelemetry:
    """Return the events and state of the processes of a mesh.

    Raises:
        MonarchError: the mesh was spawned elsewhere.
    """
    state = state_of(mesh)
    log = node_of(mesh).part(Collector).log_of(state.procs.uid)
    if log is None:
        raise MonarchError(f"{state.procs.name} has no events here; read them in the process that spawned it")
    return log


@service("collector.events_of", "local")
def events_of(mesh: ProcMeshLike | ActorMeshLike) -> EventTable:
    """Service: return the events of the processes of a mesh, of a slice those of its ranks."""
    table = telemetry_of(mesh).events()
    region = region_of(mesh)
    return table if region == state_of(mesh).procs.region() else table.of_ranks(*region.base_ranks())


@service("collector.progress", "local")
def progress(mesh: ProcMeshLike | ActorMeshLike, bar: str, done: float, total: float, unit: str, ended: bool) -> None:
    """Service: report how far long work on a mesh has come."""
    region = region_of(mesh)
    ranks = () if region == state_of(mesh).procs.region() else tuple(region.base_ranks())
    event = Progress(-1, bar, done, total, unit, ended, ranks)
    node_of(mesh).part(Collector).advance(state_of(mesh).procs.uid, event)


@service("collector.begin", "local")
def begin(node: Node) -> None:
    """Service: write the logs of all meshes of a process from now on."""
    node.part(Collector)
