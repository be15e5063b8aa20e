"""Reports of hosts that start: lines that ``far_side`` prints, by any connection, and time limits of each step."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

from monarch._core.text.counts import count_text
from monarch._procs.launch.interface import Environment, Failed, Installing, Joined, News, Starting
from monarch._procs.launch.payload import CONNECTED
from monarch._wire.messages import Listening

_PREFIX = "monarch:"
_INSTALL_S = 1800.0
"""Seconds for a host to install packages, or to wait for another host that does so in the same home."""
_PACKAGES = {"zmq": "pyzmq"}
"""Names of packages that differ from those of their modules."""


@dataclass
class HostTask:
    """One host of a command."""

    host: str
    index: int
    phase: str = "connecting"
    """``connecting``, ``python``, perhaps ``installing``, ``agent``, then ``joined`` or ``failed``."""
    facts: dict[str, Any] = field(default_factory=dict[str, Any])


class HostReports:
    """The hosts of one connection, and how far each has come.

    Args:
        tasks: the hosts, in the order of their task numbers.
        limits: the most seconds of each phase.
    """

    def __init__(self, tasks: Sequence[HostTask], limits: Mapping[str, float]) -> None:
        self.tasks = list(tasks)
        self._limits = limits
        self._since = time.monotonic()
        self.words: list[str] = []
        """Other lines of its output, such as those of a login script."""

    @property
    def pending(self) -> list[HostTask]:
        """The hosts that have neither joined nor failed."""
        return [task for task in self.tasks if task.phase not in ("joined", "failed")]

    def take(self, line: str) -> Iterator[News]:
        """Return the news in a line."""
        if line == CONNECTED:
            starting = [task for task in self.tasks if task.phase == "connecting"]
            for task in starting:
                self._enter(task, "python")
            if starting:
                # Hosts that a scheduler chooses say their names later.
                yield Starting(starting[0].host or count_text(len(starting), "host"))
            return
        report: dict[str, Any] = {}
        if line.startswith(_PREFIX):
            with suppress(ValueError):
                report = json.loads(line.removeprefix(_PREFIX))
        number = report.get("task", -1) if len(self.tasks) > 1 else 0
        if not report or not 0 <= number < len(self.tasks):
            self.words = [*self.words, line][-5:]
            return
        yield from self._report(self.tasks[number], report)

    def _report(self, task: HostTask, report: dict[str, Any]) -> Iterator[News]:
        kind = report["kind"]
        if kind == "installing":
            task.host = task.host or report.get("host", "")
            self._enter(task, "installing")
            yield Installing(task.host, report["what"], report["by"])
            return
        if kind == "environment":
            task.facts = report
            task.host = task.host or report["host"]
            reason = problem(report)
            if reason:
                yield self.fail(task, *reason)
                return
            self._enter(task, "agent")
            yield Environment(
                task.host, report["python"], report["torch"], report["executable"], tuple(differences(report))
            )
        elif kind == "listening":
            task.phase = "joined"
            yield Joined(task.host, task.index, msgspec.convert(report["listening"], Listening))
        elif kind == "failed":
            yield self.fail(task, report["reason"])

    def _enter(self, task: HostTask, phase: str) -> None:
        task.phase = phase
        self._since = time.monotonic()

    def fail(self, task: HostTask, reason: str, advice: str = "") -> Failed:
        """Mark a host as failed."""
        is_reached = task.phase != "connecting"
        task.phase = "failed"
        return Failed(task.host, reason, advice, is_reached)

    def overdue(self) -> Iterator[News]:
        """Return the failures of hosts that have taken too long."""
        for task in self.pending:
            limit = self._limit(task)
            if limit and time.monotonic() - self._since > limit:
                waited = {
                    "connecting": "no connection",
                    "python": "no answer from its Python",
                    "installing": "its packages were not installed",
                }
                yield self.fail(task, f"{waited.get(task.phase, 'its agent did not start')} within {limit:g} s")

    def _limit(self, task: HostTask) -> float:
        return _INSTALL_S if task.phase == "installing" else self._limits.get(task.phase, 0.0)

    def next_limit(self) -> float:
        """Return the seconds until a host may be overdue."""
        limits = [self._limit(task) or 3600.0 for task in self.pending]
        return max(0.0, min(limits, default=3600.0) - (time.monotonic() - self._since)) + 0.01


def problem(facts: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return why a host cannot be used, and what to do; None if it can."""
    python, here = str(facts["python"]), ".".join(map(str, sys.version_info[:3]))
    if python.split(".")[:2] != here.split(".")[:2]:
        return (
            f"its Python is {python} ({facts['executable']}), this program's is {here}",
            f"choose Python {'.'.join(here.split('.')[:2])} there with python=PATH: functions of a notebook run "
            f"only on the same minor version",
        )
    missing = [_PACKAGES.get(name, name) for name in map(str, facts["missing"])]
    if missing:
        return (
            f"its Python ({facts['executable']}) has no {', '.join(missing)}",
            f"install them there with '{facts['executable']} -m pip install {' '.join(missing)}', or choose another "
            f"Python with python=PATH",
        )
    return None


def differences(facts: Mapping[str, Any]) -> Iterator[str]:
    """Return sentences on what differs between a host and this program, and may matter."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        here = version("torch")
    except PackageNotFoundError:
        return
    there = str(facts["torch"])
    (number, _, build), (here_number, _, here_build) = there.partition("+"), here.partition("+")
    if there and number != here_number:
        yield f"torch is {there}, this program has {here}"
    elif here_build.startswith("cu") and build != here_build:
        yield f"torch is {there}, built {_built(build)}; this program's is built {_built(here_build)}"


def _built(build: str) -> str:
    digits = build.removeprefix("cu")
    return f"for CUDA {digits[:-1]}.{digits[-1:]}" if build.startswith("cu") else "without CUDA"
