"""The lives of the ranks of one mesh, written to its log: started, silent, died, replaced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec import msgpack, structs

from monarch._core.roster import Procs
from monarch._core.telemetry.events import (
    MeshEnded,
    MeshStarted,
    Metrics,
    Progress,
    RankDied,
    RankReport,
    RankSilent,
    RankStarted,
)
from monarch._telemetry.mesh_telemetry import MeshTelemetry
from monarch._wire import messages as m

_report = msgpack.Decoder(RankReport).decode
_logged = msgpack.Decoder(Metrics | Progress).decode
_EVERY = 0.1


class Lives:
    """Which process is which rank. Used by one thread at a time; see ``Collector``.

    Args:
        log: the log of the mesh.
        procs: the procs of the mesh.
        name_of: returns the name of a host by its id.
    """

    def __init__(self, log: MeshTelemetry, procs: Procs, name_of: Callable[[str], str]) -> None:
        self.log = log
        self._name_of = name_of
        self._procs = procs
        self._started = MeshStarted("", (), (), ())
        self._size: tuple[Any, ...] = ()
        """All that ``_started`` follows from."""
        self.ranks: dict[str, int] = {}
        """By proc id, the ranks of the processes that live."""
        self._now: dict[int, str] = {}
        """By rank, the proc id of its newest process."""
        self._restarts: dict[int, int] = {}
        self._pids: dict[str, int] = {}
        """Of living processes that are ready, spares included."""
        self._told: set[str] = set()
        """Processes whose start is in the log."""
        self._former: set[str] = set()
        """Processes that were ranks, or would have become one."""
        self._early: dict[str, RankReport] = {}
        """The newest reports of processes whose start is not in the log yet."""
        self._goal = "start"
        """The work that starts processes."""
        self._coming: set[str] = set()
        """Processes that it has not started yet."""
        self._wanted = 0
        """How many it starts in all."""
        self._next = 0.0
        """When its progress is written again, if it has not ended."""
        self._starting: set[int] = set()
        """The ranks of the processes that it starts."""

    def resized(self, when: float) -> None:
        """Write the mesh as it is now, unless it is as before."""
        procs = self._procs
        size = procs.name, procs.labels, procs.sizes, procs.hosts, procs.per_host
        if size == self._size:
            # Asked for each process of a mesh that starts.
            return
        self._size = size
        names = [self._name_of(host) for host in procs.hosts]
        hosts = tuple(name for name in names for _ in range(procs.per_host))
        now = MeshStarted(procs.name, procs.labels, procs.sizes, hosts)
        if now != self._started:
            self._started = now
            self.log.add(now, when)
            self._goal = "resize" if self._told else "start"
            self._wanted = max(self._wanted, len(hosts) - len(self._now))
            for rank in [rank for rank in self._now if rank >= len(hosts)]:
                gone = self._now.pop(rank)
                self.ranks.pop(gone, None)
                self._former.add(gone)
                self._restarts.pop(rank, None)

    def joined(self, rank: int, proc: str, when: float) -> None:
        """Note that a process takes a rank; a spare may be ready."""
        former = self._now.get(rank)
        if former is not None and former != proc:
            self._goal = "heal"
            self._restarts[rank] = self._restarts.get(rank, 0) + 1
            self.ranks.pop(former, None)
            self._former.add(former)
        self._now[rank], self.ranks[proc] = proc, rank
        self._coming.add(proc)
        self._starting.add(rank)
        self._wanted = max(self._wanted, len(self._coming))
        if proc in self._pids:
            self.started(proc, self._pids[proc], when)
        else:
            self._advance(when)

    def started(self, proc: str, pid: int, when: float) -> None:
        """Note that a process is ready."""
        self._pids[proc] = pid
        rank = self.ranks.get(proc)
        if rank is not None and proc not in self._told:
            self._told.add(proc)
            self.log.add(RankStarted(rank, pid, self._restarts.get(rank, 0)), when)
            early = self._early.pop(proc, None)
            if early is not None:
                self.log.add(early, when)
            self._left(proc, when)

    def died(self, dead: m.Dead, when: float) -> None:
        """Note a death; that of a former process of a rank is no news."""
        self._pids.pop(dead.proc, None)
        self._told.discard(dead.proc)
        self._early.pop(dead.proc, None)
        self._former.add(dead.proc)
        rank = self.ranks.pop(dead.proc, None)
        if rank is not None:
            self.log.add(RankDied(rank, dead.expected, dead.reason), when)
        self._left(dead.proc, when)

    def _left(self, proc: str, when: float) -> None:
        """Note that a process need not be waited for any more."""
        if proc in self._coming:
            self._coming.discard(proc)
            self._advance(when)

    def _advance(self, when: float) -> None:
        """Write the progress of the start of processes, at most 10 times a second."""
        # Those of a mesh that this program attaches, or of a slow host, join one by one.
        left = len(self._coming) + max(0, len(self._started.hosts) - len(self._now))
        self._wanted = max(self._wanted, left)
        ended = not left
        if ended or when >= self._next:
            self._next = when + _EVERY
            done = self._wanted - left
            ranks = () if len(self._starting) >= len(self._now) else tuple(sorted(self._starting))
            self.log.add(Progress(-1, self._goal, done, self._wanted, "ranks", ended, ranks), when)
        if ended:
            self._wanted, self._next = 0, 0.0
            self._starting.clear()

    def report(self, proc: str, state: bytes, more: list[bytes], when: float, ahead: float) -> None:
        """Write the report of a rank.

        Args:
            proc: its process. That of a former one counts only for what it has logged.
            state: its packed RankReport, or empty.
            more: packed Metrics and Progress.
            when: seconds since the epoch when it arrived.
            ahead: seconds by which the clock of its host is ahead of this one.
        """
        for packed in more:
            self.log.add(_logged(packed), when)
        if not state or proc in self._former:
            return
        report = _report(state)
        report = structs.replace(report, since=report.since - ahead) if ahead else report
        if proc in self.ranks and proc in self._told:
            self.log.add(report, when)
        else:
            # The agent of a detached mesh sends the states of ranks before this program knows all of them.
            self._early[proc] = report

    def silent(self, proc: str, text: str, when: float) -> None:
        """Note that a process does not answer, or answers again if the text is empty."""
        rank = self.ranks.get(proc)
        if rank is not None:
            self.log.add(RankSilent(rank, text), when)

    def end(self, reason: str, when: float) -> None:
        """Note the end of the mesh."""
        self.log.add(MeshEnded(reason), when)
        self._procs.keep(self.log)
