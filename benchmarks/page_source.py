"""A mesh of made-up ranks that change all the time, for the kernel whose page is measured."""

from __future__ import annotations

import threading
import time

from monarch._core.telemetry.events import CallStarted, MeshStarted, RankReport, RankStarted, RankState, ResourceUsage
from monarch._telemetry.mesh_telemetry import MeshTelemetry

EVERY_S = 0.1


class Changing(MeshTelemetry):
    """The log of ranks that change their state, line and load 10 times a second."""

    def __init__(self, ranks: int) -> None:
        super().__init__("made-up", "mesh", lambda: None, lambda: None)
        hosts = tuple(f"node-{rank // 8}" for rank in range(ranks))
        self.ranks = ranks
        self.states = True
        """Whether the states change too, not only line and load. Set by the notebook."""
        self.changes = 0
        """How often all ranks have changed; written by the thread."""
        self.add(MeshStarted("mesh", ("hosts", "gpus"), (ranks // 8, 8), hosts))
        for rank in range(ranks):
            self.add(RankStarted(rank, 1000 + rank, 0))
        self.add(CallStarted(1, "cell [3]", 3, tuple(range(ranks))))
        threading.Thread(target=self._run, name="changing", daemon=True).start()

    def _run(self) -> None:
        due = time.monotonic()
        while True:
            self._change()
            for each in self.subscribers:
                each.callback()
            due = max(due + EVERY_S, time.monotonic())
            time.sleep(max(0.0, due - time.monotonic()))

    def _change(self) -> None:
        self.changes += 1
        for rank in range(self.ranks):
            state = (RankState.RUNNING, RankState.COLLECTIVE)[(self.changes * self.states + rank) % 2]
            place = f"cell [3] line {(self.changes + rank) % 9}"
            figures = ResourceUsage(0.5 + (self.changes + rank) % 9 / 20, 3 << 30, 20 << 30, -1.0)
            self.add(RankReport(rank, state, place, time.time(), 0, "cuda:0", figures))
