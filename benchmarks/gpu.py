"""GPUs: buffers by CUDA IPC and tensors in messages between ranks of one host, and training on distributed tensors."""

from __future__ import annotations

import json
import subprocess
import sys

from harness import FLOOR, HERE, OURS, LaneError, Measure, Options, Target

TARGETS = {"read 256 MB, GPU to GPU": 0.8, "training steps, recorded": 0.95, "training steps, op by op": 0.7}
"""Target shares of the floor."""


def run(options: Options) -> list[Measure]:
    """GB/s compared with copies within one process, steps with the same loop in one; nothing without a GPU."""
    program = subprocess.run(
        [sys.executable, str(HERE / "gpu_program.py"), str(options.rounds(15))], capture_output=True, text=True
    )
    if program.returncode != 0:
        raise LaneError(program.stderr.strip()[-2000:])
    measures: list[Measure] = []
    for line in program.stdout.splitlines():
        found = json.loads(line)
        share = TARGETS.get(found["name"])
        target = Target(f"≥ {share:g}x floor", share, FLOOR) if share else None
        samples = {OURS: found["ours"], FLOOR: found["floor"]}
        measures.append(Measure("gpu", found["name"], found["unit"], "more", samples, target, [found["note"]]))
    if not measures:
        print("gpu: this machine has no GPU", file=sys.stderr)
    return measures
