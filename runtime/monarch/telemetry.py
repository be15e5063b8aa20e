"""Metrics and progress that programs log, and the events of a mesh.

    from monarch.telemetry import log_metric, track

    class Trainer(Actor):
        @endpoint
        def train(self):
            for batch in track(self.loader, "epoch"):
                log_metric("loss", self.step(batch))

``mesh.events()`` returns the log of a mesh, and ``monarch.telemetry.state_of(mesh)`` its present state.
"""

from __future__ import annotations

from monarch._core.telemetry.event_table import EventTable
from monarch._core.telemetry.events import Entry, RankState
from monarch._core.telemetry.model import MeshModel
from monarch._telemetry.metrics import log_metric
from monarch._telemetry.progress import track
from monarch._telemetry.state import state_of
from monarch._telemetry.top import top

__all__ = ["Entry", "EventTable", "MeshModel", "RankState", "log_metric", "state_of", "top", "track"]
