"""Runs systems side by side: a round runs each of them in turn, so that other load on the machine affects all."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Literal, Protocol

HERE = Path(__file__).resolve().parent
OURS, FLOOR = "ours", "floor"
MODULES = {OURS: "mesh", FLOOR: "floor", "torchmonarch": "mesh"}
"""Modules of systems with another name."""
PEERS = {
    "torchmonarch": "torchmonarch",
    "ray": "ray",
    "dask": "distributed",
    "ipyparallel": "ipyparallel",
    "nbdistributed": "nbdistributed",
}
"""Peers, each with the package that it needs."""

_SETTLING_S = 15.0
"""Maximum seconds to wait for an idle machine after workers have started: our fork server imports for two seconds, on a
core that the calls of all systems need."""
_TAIL = 20
"""Figures from which on the 99th percentile is more than the slowest of a few."""
Samples = dict[str, list[float]]
"""One figure a round, by system."""


class LaneError(Exception):
    """A system could not do what it was asked."""


@dataclass
class Target:
    """A target for us: a limit, in the unit of the measure or as a factor of another system's figure."""

    text: str
    limit: float
    against: str = ""
    """The system whose figure is multiplied; empty for an absolute limit."""


@dataclass
class Measure:
    """One figure of several systems."""

    benchmark: str
    name: str
    unit: str
    better: Literal["less", "more"]
    samples: Samples = field(default_factory=dict)
    target: Target | None = None
    notes: list[str] = field(default_factory=list)
    load: float = 0.0
    """Share of the cores that was busy before the start."""
    worst: bool = False
    """Whether the figure of the worst round counts, because the limit must hold each time."""
    p99: dict[str, float] = field(default_factory=dict)
    """By system, the 99th percentile of all figures of all rounds."""
    words: dict[str, dict[str, str]] = field(default_factory=dict)
    """By system, results that are not figures, by topic."""

    def take(self, seconds: dict[str, list[list[float]]], scale: float) -> None:
        """Take all figures of each round, by system: their median for each round, and the 99th percentile of all.

        Args:
            seconds: the figures.
            scale: from seconds to the unit of the measure.
        """
        for system, rounds in seconds.items():
            self.samples[system] = [median(figures) * scale for figures in rounds]
            every = [figure * scale for figures in rounds for figure in figures]
            if len(every) >= _TAIL:
                self.p99[system] = quantiles(every, n=100, method="inclusive")[-1]

    def spread(self, system: str) -> tuple[float, float] | None:
        """First and third quartile over the rounds; None for too few rounds."""
        samples = self.samples.get(system, [])
        if len(samples) < 4:
            return None
        first, _, third = quantiles(samples, n=4, method="inclusive")
        return first, third

    def value(self, system: str) -> float | None:
        """Median over the rounds, or the worst of them."""
        samples = self.samples.get(system)
        if not samples:
            return None
        if self.worst:
            return max(samples) if self.better == "less" else min(samples)
        return median(samples)

    def ratio(self, system: str, other: str) -> float | None:
        """Median over the rounds of one system's figure divided by another's of the same round."""
        mine, theirs = self.samples.get(system), self.samples.get(other)
        if not mine or not theirs or not all(theirs):
            return None
        if len(mine) != len(theirs):
            return median(mine) / median(theirs)
        return median(a / b for a, b in zip(mine, theirs, strict=True))

    def holds(self) -> bool | None:
        """Return whether we meet the target; None if unknown."""
        if self.target is None:
            return None
        against = self.target.against
        reached = self.ratio(OURS, against) if against else self.value(OURS)
        if reached is None:
            return None
        return reached <= self.target.limit if self.better == "less" else reached >= self.target.limit


@dataclass
class Options:
    """The command line."""

    quick: bool = False
    peers: dict[str, str] = field(default_factory=dict)
    """Interpreter of each peer."""
    patience: float = 0.0
    """Maximum seconds to wait, before each measure, for an idle machine."""
    hosts: Sequence[int] = ()
    """Numbers of hosts to simulate, if not the default."""

    def rounds(self, usual: int, quick: int = 3) -> int:
        return quick if self.quick else usual

    def systems(self, *without: str) -> list[str]:
        return [name for name in (OURS, FLOOR, *self.peers) if name not in without]


class Lane(Protocol):
    """A system that takes part in a race."""

    def ask(self, what: str, /, **options: Any) -> list[float]:
        """Run one operation, and return the figures."""
        ...

    def end(self) -> None:
        """Shut it down."""
        ...


class Process:
    """A lane: a system in its own process."""

    def __init__(self, system: str, python: str) -> None:
        self.system = system
        self._process = subprocess.Popen(
            [python, str(HERE / "lane.py"), MODULES.get(system, system)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if not os.environ.get("MONARCH_BENCH_STDERR") else None,
            text=True,
            env=environment(python),
            start_new_session=True,
        )

    def ask(self, what: str, /, **options: Any) -> list[float]:
        """Run one operation, and return the figures."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"do": what, "with": options}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise LaneError(f"{self.system} ended with code {self._process.wait()} in {what}")
        answer = json.loads(line)
        if "result" not in answer:
            raise LaneError(answer.get("unsupported") or f"{what}: {answer['error']}")
        return answer["result"]

    def end(self) -> None:
        """Shut the system down."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self.ask("stop")
        except LaneError:
            pass
        with suppress(BrokenPipeError):
            # Reap one that has ended by itself.
            self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            pass
        try:
            # End what is left of it, in its own session.
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()
        self._process.stdout.close()


class Race:
    """Systems that take turns. One that fails drops out, with a note of the reason."""

    def __init__(self, options: Options, notes: list[str]) -> None:
        self._options = options
        self._notes = notes
        self.lanes: dict[str, Lane] = {}

    def enter(self, systems: Sequence[str]) -> None:
        """Start the controllers of systems, without workers."""
        for system in systems:
            self.lanes[system] = Process(system, self._options.peers.get(system, sys.executable))
            self.each("start", only=[system])

    def each(self, what: str, /, only: Sequence[str] | None = None, **options: Any) -> Samples:
        """Run each system once, in turn, and return all figures of each."""
        figures: Samples = {}
        for system, lane in list(self.lanes.items()):
            if only is None or system in only:
                try:
                    figures[system] = lane.ask(what, **options)
                except LaneError as error:
                    self._drop(system, str(error))
        return figures

    def rounds(self, number: int, what: str, /, **options: Any) -> Samples:
        """Run each system in turn so many times; return one figure of each a round, the median of its figures."""
        everything = self.all_figures(number, what, **options)
        return {system: [median(figures) for figures in rounds] for system, rounds in everything.items()}

    def all_figures(self, number: int, what: str, /, **options: Any) -> dict[str, list[list[float]]]:
        """Same as ``race``, with all figures of each round."""
        figures: dict[str, list[list[float]]] = {}
        for _ in range(number):
            for system, found in self.each(what, **options).items():
                figures.setdefault(system, []).append(found)
            self.turn()
        return {system: figures[system] for system in figures if system in self.lanes}

    def turn(self) -> None:
        """Another one goes first in the next round."""
        first = next(iter(self.lanes))
        self.lanes[first] = self.lanes.pop(first)

    def _drop(self, system: str, why: str) -> None:
        self._notes.append(f"{system}: {why}")
        self.lanes.pop(system).end()
        if system in (OURS, FLOOR):
            raise LaneError(f"{system}: {why}")

    def end(self) -> None:
        """Shut down all, even on errors."""
        if self.lanes:
            try:
                self.lanes.popitem()[1].end()
            finally:
                self.end()


@contextmanager
def race(options: Options, systems: Sequence[str], notes: list[str]) -> Iterator[Race]:
    """Start systems, and shut them down at the end."""
    entered = Race(options, notes)
    try:
        entered.enter(systems)
        yield entered
    finally:
        entered.end()


@contextmanager
def workers(
    options: Options, systems: Sequence[str], count: int, notes: list[str], torch: bool = False
) -> Iterator[Race]:
    """Start so many workers of each system, and wait until the machine is idle, or long enough."""
    with race(options, systems, notes) as entered:
        entered.each("spawn", count=count, torch=torch)
        _await_idle(max(_SETTLING_S, options.patience))
        yield entered


def installed(python: str) -> dict[str, str]:
    """Return the installed peers of an interpreter, each with its version."""
    code = """
import importlib.metadata, json, sys
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""
    done = subprocess.run([python, "-c", code, *PEERS.values()], capture_output=True, text=True, check=True)
    versions = json.loads(done.stdout)
    return {peer: versions[package] for peer, package in PEERS.items() if package in versions}


def cold_start(system: str, python: str, count: int) -> float:
    """Return the seconds from the start of a fresh controller process to so many torch-ready workers."""
    begin = time.perf_counter()
    lane = Process(system, python)
    try:
        lane.ask("start")
        lane.ask("spawn", count=count, torch=True)
        return time.perf_counter() - begin
    finally:
        lane.end()


def busy(seconds: float = 0.4) -> float:
    """Return the share of the cores that is busy now."""

    def read() -> tuple[int, int]:
        with open("/proc/stat") as file:
            times = [int(text) for text in file.readline().split()[1:9]]
        return sum(times), times[3] + times[4]

    total, idle = read()
    time.sleep(seconds)
    total_then, idle_then = read()
    return 1 - (idle_then - idle) / max(1, total_then - total)


def calm(options: Options) -> float:
    """Wait for an idle machine, if asked to; return the share of the cores that is busy."""
    return _await_idle(options.patience)


def _await_idle(patience: float) -> float:
    deadline = time.monotonic() + patience
    while (load := busy()) > 0.1 and time.monotonic() < deadline:
        time.sleep(0.5)
    return load


def environment(python: str) -> dict[str, str]:
    """Return the environment of every system."""
    env = dict(os.environ)
    # One thread each: there are few cores, and arithmetic is not measured.
    env["OMP_NUM_THREADS"] = "1"
    env["PYTHONPATH"] = str(HERE)
    # Installed packages come compiled, and so is a checkout that has run.
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    # Some systems start workers by the name of the interpreter.
    env["PATH"] = os.pathsep.join([os.path.dirname(python), env.get("PATH", "")])
    return env
