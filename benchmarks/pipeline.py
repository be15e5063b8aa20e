"""The bubble of a pipeline: the share of an iteration in which the busiest of two stages does nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from harness import Measure, Options, calm

PROGRAM = Path(__file__).resolve().parent / "pipeline_program.py"


def run(options: Options) -> list[Measure]:
    """Per cent, by the number of micro-batches; beside it that of the schedule without the time of moves."""
    bubble = Measure("pipeline", "1F1B of two recorded stages: bubble", "%", "less")
    counts = (4, 8) if options.quick else (2, 4, 8, 16)
    bubble.load = calm(options)
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(options.rounds(10, 3)), *map(str, counts)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    if done.returncode:
        bubble.notes.append(f"ended with code {done.returncode}")
        return [bubble]
    for count, rounds in json.loads(done.stdout).items():
        bubble.samples[f"{count} micro-batches"] = [100 * (1 - busy / seconds) for seconds, busy, _ in rounds]
        bubble.samples[f"{count}, schedule"] = [100 * (1 - busy / least) for _, busy, least in rounds]
    bubble.notes.append("stages of matrix products, one rank and one core each; the schedule line leaves out moves")
    return [bubble]
