"""Types of the debugger: where the code of a rank is, and how values differ across ranks.

mesh = this_host().spawn_procs({"gpus": 4})
training = mesh.spawn("trainer", Trainer).train.call()
mesh.pause()                   # where each rank is
mesh.evaluate("loss.item()")   # in the line where it is
mesh.diff("model")             # which ranks agree, and the first tensor and index that differ
mesh.resume()
print(mesh.why())              # who waits for whom
training.get()
"""

from __future__ import annotations

from monarch._core.diagnosis.explanation import Explanation
from monarch._core.diagnosis.facts import Entered, Kind
from monarch._core.diagnosis.findings import Cause, Finding, Level, Standing
from monarch._core.digests.comparison import Comparison, Difference
from monarch._core.digests.elements import Elements
from monarch._core.position import Frame, Position, ThreadPosition
from monarch._debug.debug_controller import DebugController, DebugSessionInfo
from monarch._debug.sentry.rank import watch

__all__ = [
    "Cause",
    "Comparison",
    "DebugController",
    "DebugSessionInfo",
    "Difference",
    "Elements",
    "Entered",
    "Explanation",
    "Finding",
    "Frame",
    "Kind",
    "Level",
    "Position",
    "Standing",
    "ThreadPosition",
    "watch",
]
