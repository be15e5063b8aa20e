"""Measures this project beside the physical floor and every installed peer, in one run.

    python benchmarks/run.py                          everything, without peers
    python benchmarks/run.py roundtrip fanout         some of it
    python benchmarks/run.py --peers PEERS/bin/python with the peers that an interpreter has
    python benchmarks/run.py --quick                  a minute or two: fewer rounds, without peers

The peers need an environment of their own, because torchmonarch installs a package ``monarch`` too.
"""

from __future__ import annotations

import argparse
import os
import platform
import signal
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import breadth
import buffers
import cells
import clusters
import cpu
import failures
import fanout
import groups
import inflight
import interrupts
import memory
import page
import payload
import pipeline
import recorded
import roundtrip
import sessions
import simulation
import sizes
import spawn
import startup
import states
import steps
from harness import PEERS, LaneError, Measure, Options, installed
from report import as_json, load, markdown, show, show_verdicts
from rich.console import Console

import gpu
import telemetry

BENCHMARKS: dict[str, Callable[[Options], list[Measure]]] = {
    "roundtrip": roundtrip.run,
    "fanout": fanout.run,
    "inflight": inflight.run,
    "cpu": cpu.run,
    "payload": payload.run,
    "sizes": sizes.run,
    "buffers": buffers.run,
    "states": states.run,
    "steps": steps.run,
    "recorded": recorded.run,
    "pipeline": pipeline.run,
    "groups": groups.run,
    "failures": failures.run,
    "spawn": spawn.run,
    "sessions": sessions.run,
    "clusters": clusters.run,
    "gpu": gpu.run,
    "memory": memory.run,
    "simulation": simulation.run,
    "breadth": breadth.run,
    "cells": cells.run,
    "startup": startup.run,
    "interrupts": interrupts.run,
    "telemetry": telemetry.run,
    "page": page.run,
}


def main() -> int:
    """Entry point; returns 1 if a target is missed with ``--strict``, or if a benchmark could not run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="BENCHMARK", help=f"{', '.join(BENCHMARKS)}; all if none")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, fewer sizes, no peers")
    parser.add_argument("--peers", metavar="PYTHON", default=os.environ.get("MONARCH_BENCH_PEERS", ""))
    parser.add_argument("--only", metavar="PEERS", default="", help=f"some of {','.join(PEERS)}")
    parser.add_argument("--out", metavar="FILE", nargs="+", default=[], help="all figures as JSON; with .md, tables")
    parser.add_argument("--add", action="store_true", help="to what the JSON file of --out has of other benchmarks")
    parser.add_argument("--patience", type=float, default=0.0, metavar="SECONDS", help="to wait for an idle machine")
    parser.add_argument("--hosts", type=int, nargs="+", default=(), help="numbers of hosts to simulate")
    parser.add_argument("--strict", action="store_true", help="exit with 1 if a target does not hold")
    asked = parser.parse_args()
    unknown = set(asked.names) - set(BENCHMARKS)
    if unknown:
        parser.error(f"there is no benchmark {', '.join(sorted(unknown))}; there are {', '.join(BENCHMARKS)}")
    if strange := [path for path in asked.out if Path(path).suffix not in (".json", ".md")]:
        parser.error(f"--out: expected files that end in .json or .md, got {', '.join(strange)}")
    console = Console()
    # Started processes are ended in any case, also on a hang-up or a kill by another process.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    options = Options(asked.quick, patience=asked.patience, hosts=asked.hosts)
    about = _about()
    if options.quick:
        console.print("peers are left out by --quick", style="dim")
    elif asked.peers:
        found = installed(asked.peers)
        wanted = asked.only.split(",") if asked.only else PEERS
        options.peers = {peer: asked.peers for peer in found if peer in wanted}
        about["peers"] = ", ".join(f"{peer} {found[peer]}" for peer in options.peers)
        missing = ", ".join(peer for peer in PEERS if peer not in found)
        console.print(f"peers: {about['peers'] or 'none'}; not installed: {missing or 'none'}", style="dim")
    else:
        console.print("no peers: name an interpreter that has them with --peers PYTHON or MONARCH_BENCH_PEERS")
    kept: list[Measure] = []
    for path in map(Path, asked.out):
        if asked.add and path.suffix == ".json" and path.exists():
            before, said = load(path.read_text())
            kept = [measure for measure in before if measure.benchmark not in (asked.names or BENCHMARKS)]
            about = {**said, **about}
    measures: list[Measure] = []
    failed = False
    for name in asked.names or BENCHMARKS:
        try:
            done = BENCHMARKS[name](options)
        except LaneError as error:
            console.print(f"{name} could not be measured: {error}", style="red")
            failed = True
            continue
        if not done:
            # It has reported the reason.
            continue
        measures += done
        show(console, done)
        for path in map(Path, asked.out):
            # Finished results are kept, whatever becomes of the rest.
            path.write_text((markdown if path.suffix == ".md" else as_json)(kept + measures, about))
    if any(measure.target for measure in measures):
        show_verdicts(console, measures)
    return int(failed or (asked.strict and any(measure.holds() is False for measure in measures)))


def _about() -> dict[str, str]:
    """Describe the machine and the versions, without identifying it."""
    import numpy
    import torch
    import zmq

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    versions = f"pyzmq {zmq.__version__} (libzmq {zmq.zmq_version()}), torch {torch.__version__}"
    jupyter = ", ".join(f"{name} {version(name)}" for name in ("ipykernel", "jupyter_client"))
    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{os.cpu_count()} cores, {memory:.0f} GiB, {platform.system()} on {platform.machine()}",
        "versions": f"Python {platform.python_version()}, {versions}, numpy {numpy.__version__}, {jupyter}",
        "settings": "OMP_NUM_THREADS=1 everywhere",
    }


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("stopped; all that was started has been ended")
