"""Torchrun with a plain script: the loop is in the ranks, without calls."""

from __future__ import annotations

import subprocess
import sys

from systems import base
from systems.training import RANKS


class Training(base.Task):
    def __init__(self, model: str) -> None:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
        self._process = subprocess.Popen(
            [*command, "-m", "systems.training", model], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.run(1)

    def run(self, count: int, ahead: int = 1, loop: bool = False) -> list[float]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{count}\n")
        self._process.stdin.flush()
        return [float(text) for text in self._process.stdout.readline().split()]

    def close(self) -> None:
        # The ranks end when there is nothing more to read.
        self._process.communicate(timeout=30)
