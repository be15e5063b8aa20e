"""The reports of the ranks of a host, gathered into few messages for their owners."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from monarch._procs.agent.children import Children
from monarch._wire.messages import Report, Reports

PERIOD, PERIOD_OF_MANY = 0.1, 0.25
"""Seconds for which reports wait for those of other ranks."""
MANY = 128
"""Ranks of a host from which on they wait longer."""
MOST = 16 << 20
"""Bytes of metrics and progress kept while no program is attached; beyond it, the oldest are dropped."""
_FORMER = 1000
_PIECE = 1 << 20
"""Bytes that are sent at once."""


class ReportGathering:
    """Reports on their way. The newest state of a rank replaces an earlier one; what it has logged is all sent.

    Args:
        proc: id of the agent.
        children: the ranks.
        later: runs a function after some seconds.
        tell: sends a message to a process.
    """

    def __init__(
        self,
        proc: str,
        children: Children,
        later: Callable[[float, Callable[[], None]], None],
        tell: Callable[[str, Reports], None],
    ) -> None:
        self._proc = proc
        self._children = children
        self._later = later
        self._tell = tell
        self._new: set[str] = set()
        """Ranks whose state has changed since it was sent."""
        self._states: dict[str, bytes] = {}
        """The newest state of each living rank."""
        self._owners: dict[str, str] = {}
        """The owner of each rank that has reported; those of dead ranks for a while, for reports that arrive late."""
        self._logged: deque[tuple[str, bytes]] = deque()
        """Metrics and progress with their ranks, oldest first."""
        self._size = 0
        self._waits = False
        self.held = False
        """Whether no program is attached."""

    def add(self, report: Report) -> None:
        """Take the report of a rank."""
        child = self._children.by_proc.get(report.src)
        if child is not None:
            self._owners[report.src] = child.owner
        if report.state and child is not None:
            self._states[report.src] = report.state
            self._new.add(report.src)
        for each in report.more:
            self._logged.append((report.src, each))
            self._size += len(each)
        while self.held and self._size > MOST:
            self._size -= len(self._logged.popleft()[1])
        if not self.held and (report.urgent or self._size > _PIECE):
            self._send()
        elif not self.held and not self._waits:
            self._waits = True
            self._later(PERIOD if len(self._children.by_proc) <= MANY else PERIOD_OF_MANY, self._due)

    def died(self, proc: str) -> None:
        """Forget a rank, before its death is told."""
        self._new.discard(proc)
        self._states.pop(proc, None)
        if not self.held:
            self._send()
        while len(self._owners) > len(self._children.by_proc) + _FORMER:
            del self._owners[next(iter(self._owners))]

    def resume(self, owner: str) -> None:
        """Send a program that has just attached the state of each rank, and what they logged meanwhile."""
        self.held = False
        ranks = self._children.by_proc
        self._owners = {proc: ranks[proc].owner if proc in ranks else owner for proc in self._owners}
        self._new.update(self._states)
        self._send()

    def _due(self) -> None:
        self._waits = False
        if not self.held:
            self._send()

    def _send(self) -> None:
        logged: dict[str, list[bytes]] = {}
        for proc, each in self._logged:
            logged.setdefault(proc, []).append(each)
        by_owner: dict[str, list[tuple[str, bytes, list[bytes]]]] = {}
        for proc in dict.fromkeys([*logged, *sorted(self._new)]):
            state = self._states[proc] if proc in self._new else b""
            if owner := self._owners.get(proc, ""):
                by_owner.setdefault(owner, []).append((proc, state, logged.get(proc, [])))
        self._new.clear()
        self._logged.clear()
        self._size = 0
        for owner, parts in by_owner.items():
            self._tell(owner, Reports(self._proc, time.time(), parts))
