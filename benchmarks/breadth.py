"""Many hosts: calls to 64 real host agents beside those to 8, and a file for 8 hosts. All agents are on this machine.

The agents and their ranks share the cores of this machine, so the time of a call grows with their number whatever its
way; on hosts of their own only the processor time of the controller does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from harness import FLOOR, OURS, LaneError, Measure, Options, Target, calm

HERE = Path(__file__).resolve().parent
FEW, MANY = 8, 64


def run(options: Options) -> list[Measure]:
    """Milliseconds of calls and of an idle controller, its connections, and copies of a file that leave it."""
    return [
        *_calls(options, "calls", "call {} agents with a rank each and gather"),
        *_calls(options, "lines", "call {} agents with a rank each, of which each prints a line"),
        *_idle(options),
        _files(options),
    ]


def _calls(options: Options, what: str, text: str) -> list[Measure]:
    many = 24 if options.quick else MANY
    target = Target("≤ 4x 8 agents", 4.0, FLOOR)
    name = text.format(many)
    cpu = Measure("breadth", f"{name}: processor time of the controller", "ms", "less", target=target)
    wall = Measure("breadth", f"{name}: until all answered (agents share the cores)", "ms", "less")
    cpu.notes.append(f"floor: the same with {FEW} agents, to which the controller sends by itself")
    for system, count in ((FLOOR, FEW), (OURS, many)):
        cpu.load = wall.load = max(cpu.load, calm(options))
        rounds = options.rounds(10, 4)
        found = _run(what, count, rounds * 20)
        cpu.notes.append(f"{found['messages'][0]:.0f} messages reach the controller of {count} agents for each call")
        for measure, key in ((cpu, "cpu"), (wall, "wall")):
            values = [value * 1e3 for value in found[key]]
            measure.samples[system] = [median(values[at : at + 20]) for at in range(0, len(values), 20)]
    return [cpu, wall]


def _idle(options: Options) -> list[Measure]:
    many = 24 if options.quick else MANY
    connections = Measure("breadth", f"connections of the controller of {many} agents", "", "less")
    cpu = Measure("breadth", f"processor time of the idle controller of {many} agents in a second", "ms", "less")
    connections.notes.append(f"floor: with {FEW} agents, to which it has two connections each")
    for system, count in ((FLOOR, FEW), (OURS, many)):
        connections.load = cpu.load = max(cpu.load, calm(options))
        found = _run("idle", count, options.rounds(30, 10))
        connections.samples[system] = found["connections"]
        cpu.samples[system] = [value * 1e3 for value in found["cpu"]]
    return [connections, cpu]


def _files(options: Options) -> Measure:
    megabytes = 64 if options.quick else 1024
    target = Target("≤ 1.5x one copy", 1.5, FLOOR)
    measure = Measure("breadth", f"{megabytes} MiB to {FEW} hosts: sent by the controller", "MB", "less", target=target)
    measure.load = calm(options)
    found = _run("files", FEW, megabytes)
    measure.samples = {OURS: [found["bytes"][0] / 1e6], FLOOR: [found["size"][0] / 1e6]}
    measure.notes.append(
        f"floor: one copy; {found['seconds'][0]:.1f} s in all, and {_memcpy(megabytes):.1f} s for 8 memcpy"
    )
    return measure


def _memcpy(megabytes: int) -> float:
    """Return the seconds of a copy for each host."""
    source = bytearray(os.urandom(1 << 20) * megabytes)
    begin = time.perf_counter()
    for _ in range(FEW):
        bytes(source)
    return time.perf_counter() - begin


def _run(what: str, count: int, amount: int) -> dict[str, list[float]]:
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, str(HERE / "breadth_program.py"), what, str(count), str(amount)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    if done.returncode:
        raise LaneError(f"{what} with {count} agents ended with code {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])
