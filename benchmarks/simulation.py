"""A simulation, not a measurement of real hosts: the controller's cost of a call to 8 ranks on each of many hosts.

The controller is real, with its real sockets over tcp and CURVE. Behind it, light processes stand in for host agents,
forked from a warm one: they take the messages of host agents, pass them on with the agents' own code, and answer for
eight ranks each that do not exist. They share the cores with the controller, so only its own times apply to real hosts:
the time until a call is sent, and the CPU time of sending and gathering it.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

from harness import OURS, Measure, Options, Target, calm

HERE = Path(__file__).resolve().parent
PER_HOST = 8
MOST = 2000
"""Hosts of the largest simulation."""
WHAT = {
    "send": "call: time to send it",
    "cpu": "call: processor time of the controller",
    "wall": "call: until all answered (stand-ins share the cores)",
    "broadcast": "broadcast: processor time of the controller",
    "attach": "attaching the hosts, once",
    "spawn": "spawning the ranks, once",
}


def run(options: Options) -> list[Measure]:
    """Milliseconds of each part, by the number of hosts."""
    measures = {key: Measure("simulation", text, "ms", "less") for key, text in WHAT.items()}
    most = Measure("simulation", f"call to {MOST:,} hosts: processor time of the controller", "ms", "less")
    most.target = Target("≤ 20 ms", 20.0)
    notes = measures["send"].notes
    notes.append(f"SIMULATED: stand-ins answer for host agents with {PER_HOST} ranks each; only the controller is real")
    for hosts in options.hosts or ((1, 10, 100) if options.quick else (1, 10, 100, 300, 1000, MOST)):
        missing = _missing(hosts)
        if missing:
            notes.append(f"{hosts} hosts: left out, {missing}")
            continue
        load = calm(options)
        done = subprocess.run(
            [sys.executable, str(HERE / "simulated_hosts.py"), str(hosts), str(PER_HOST), str(options.rounds(15, 5))],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        if done.returncode:
            notes.append(f"{hosts} hosts: ended with code {done.returncode}")
            continue
        for key, seconds in json.loads(done.stdout).items():
            measure = measures[key]
            measure.load = max(measure.load, load)
            measure.samples[f"{hosts} hosts"] = [value * 1e3 for value in seconds]
            if key == "cpu" and hosts == MOST:
                most.load, most.samples[OURS] = load, [value * 1e3 for value in seconds]
    return [*measures.values(), *([most] if most.samples else [])]


def _missing(hosts: int) -> str:
    """Return what so many stand-ins would lack."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    # A link and its monitor take files at the controller, and so does each connection of a host.
    if files != resource.RLIM_INFINITY and hosts * 8 + 200 > files:
        return f"the controller may have {files} files"
    with open("/proc/meminfo") as file:
        free = next(int(line.split()[1]) for line in file if line.startswith("MemAvailable:")) / 1024
    return f"there is {free:.0f} MB of memory" if hosts + 500 > free else ""
