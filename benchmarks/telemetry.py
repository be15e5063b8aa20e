"""The cost of reports: for a rank that computes, and for the controller of 1,000 ranks."""

from __future__ import annotations

import time

from harness import OURS, Measure, Options, Target, calm

from monarch._core.roster import Procs, Roster
from monarch._core.telemetry.events import CallStarted, Metrics, RankReport, RankState, ResourceUsage
from monarch._telemetry.lives import Lives
from monarch._telemetry.mesh_telemetry import MeshTelemetry
from monarch._wire import messages as m
from monarch.actor import Actor, endpoint, this_host

HOSTS, RANKS_OF_HOST = 8, 125
RATE = 4
"""Reports a second of a rank of a mesh with many ranks."""
_SLICE = 0.25
"""Seconds of a loop with reports, or without."""
SECONDS = 4
"""Of reports, for one round."""


def run(options: Options) -> list[Measure]:
    """Percent of one core of a rank, and of the controller."""
    lines = _controller(options, False, "4 line changes of each rank a second")
    return [
        _rank(options),
        _in_turns(options),
        lines,
        _controller(options, True, "4 state changes of each rank a second"),
    ]


class Worker(Actor):
    """Computes, and reports meanwhile."""

    @endpoint
    def cost(self, seconds: float) -> float:
        """Return the percent of a core that the ticks of the reporter take beside a Python loop.

        The receive loop ticks as often without reports, so they cause no more switches between threads.
        """
        from monarch._telemetry.reporter import Reporter

        tick, used = Reporter.tick, 0.0

        def timed(self: Reporter) -> bool:
            nonlocal used
            begun = time.thread_time()
            found = tick(self)
            used += time.thread_time() - begun
            return found

        Reporter.tick = timed
        until, count = time.monotonic() + seconds, 0
        while time.monotonic() < until:
            count += 1
        Reporter.tick = tick
        return used / seconds * 100

    @endpoint
    def in_turns(self, seconds: float) -> float:
        """Return by how many percent a Python loop takes more CPU time of the process with reports than without.

        Slices with and without them take turns, in an order that changes, so that other load affects both.
        """
        from monarch._node.current import current_node
        from monarch._telemetry.reporter import Reporter

        tick = Reporter.tick
        used, done = [0.0, 0.0], [0, 0]
        for at in range(int(seconds / _SLICE)):
            reports = (at + at // 2) % 2
            Reporter.tick = tick if reports else lambda self: False
            current_node().output.watch()
            begun, until = time.process_time(), time.monotonic() + _SLICE
            count = 0
            while time.monotonic() < until:
                for _ in range(100):
                    count += 1
            used[reports] += time.process_time() - begun
            done[reports] += count
        Reporter.tick = tick
        without, with_reports = (used[each] / done[each] for each in (0, 1))
        return (with_reports / without - 1) * 100


def _in_turns(options: Options) -> Measure:
    name = "CPU time of a loop with reports, beyond that without, in turns"
    measure = Measure("telemetry", name, "%", "less", target=Target("≤ 1 %", 1.0))
    mesh = this_host().spawn_procs()
    worker = mesh.spawn("worker", Worker)
    worker.in_turns.call_one(2.0).get()
    measure.load = calm(options)
    measure.samples[OURS] = [worker.in_turns.call_one(8.0).get() for _ in range(options.rounds(15, 5))]
    mesh.stop().get()
    return measure


def _rank(options: Options) -> Measure:
    target = Target("≤ 1 %", 1.0)
    measure = Measure("telemetry", "core of a rank that computes", "%", "less", target=target)
    mesh = this_host().spawn_procs()
    worker = mesh.spawn("worker", Worker)
    worker.cost.call_one(1.0).get()
    measure.load = calm(options)
    rounds = options.rounds(15, 5)
    measure.samples[OURS] = [worker.cost.call_one(2.0).get() for _ in range(rounds)]
    mesh.stop().get()
    return measure


def _controller(options: Options, changes: bool, what: str) -> Measure:
    """Measure the controller: synthetic reports of all ranks, decoded, written to a log and folded as real ones are."""
    ranks = HOSTS * RANKS_OF_HOST
    name = f"core of the controller of {ranks:,} ranks: {what}"
    measure = Measure("telemetry", name, "%", "less", target=Target("≤ 5 %", 5.0))
    measure.load = calm(options)
    frames = [_frame(host, at, changes) for at in range(SECONDS * RATE) for host in range(HOSTS)]
    samples = measure.samples[OURS] = []
    for _ in range(options.rounds(15, 3)):
        lives = _lives()
        begun = time.process_time()
        for frame in frames:
            reports = m.decode(frame)
            assert isinstance(reports, m.Reports)
            for proc, state, more in reports.parts:
                lives.report(proc, state, more, reports.now, 0.0)
        samples.append((time.process_time() - begun) / SECONDS * 100)
    return measure


def _lives() -> Lives:
    """Return ranks that run a call."""
    names = tuple(f"host{host}" for host in range(HOSTS))
    procs = Procs("m", "mesh", ("hosts", "gpus"), 1, "c", Roster(0, names, RANKS_OF_HOST, (HOSTS, RANKS_OF_HOST)))
    lives = Lives(MeshTelemetry("m", "mesh", lambda: None, lambda: None), procs, str)
    lives.resized(1.0)
    for rank in range(procs.size):
        lives.joined(rank, procs.proc(rank), 1.0)
        lives.started(procs.proc(rank), rank + 1, 1.0)
    lives.log.add(CallStarted(1, "cell [3]", 3, tuple(range(procs.size))), 1.0)
    return lives


def _frame(host: int, at: int, changes: bool) -> bytes:
    """Return the reports of the ranks of a host at some time; each rank logs a metric once a second."""
    parts: list[tuple[str, bytes, list[bytes]]] = []
    for rank in range(host * RANKS_OF_HOST, (host + 1) * RANKS_OF_HOST):
        state = RankState.COLLECTIVE if changes and (at + rank) % 2 else RankState.RUNNING
        figures = ResourceUsage(round(0.5 + at % 9 / 20, 2), 3 << 30, 20 << 30, 0.9)
        tensors = {"model": 1 << 30, "optimizer": 2 << 30}
        report = RankReport(rank, state, f"cell [3] line {at % 7}", at / RATE, 0, "cuda:0", figures, None, tensors)
        more = [m.encode(Metrics(rank, "loss", (at // RATE,), (1.0 / (at + 1),)))] if at % RATE == 0 else []
        parts.append((f"host{host}/m.{rank}", m.encode(report), more))
    return m.encode(m.Reports(f"host{host}/agent", 2.0 + at / RATE, parts))
