"""The metrics and progress of a process that are still to be reported."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from monarch._core.telemetry.events import Metrics, Progress
from monarch._node.node import Node

if TYPE_CHECKING:
    from typing_extensions import TypeIs

MOST = 50_000
"""Values that wait until the thread that logs more of them reports them itself."""
_PIECE = 10_000
"""Values of a metric in one event."""
_PATIENCE = 1.0
"""Seconds that an answer waits for values that a GPU still computes."""
_LOOK = 0.001


class LateValue(Protocol):
    """A value on its way from a GPU."""

    def is_there(self) -> bool: ...
    def read(self) -> float: ...


class Bar:
    """Progress of one piece of work, as its thread counts it."""

    __slots__ = ("done", "ended", "name", "told", "total", "unit")

    def __init__(self, name: str, total: float, unit: str) -> None:
        self.name = name
        self.total = total
        self.unit = unit
        self.done = 0.0
        """Written by the thread that works; others read it from time to time, as ``ended``."""
        self.ended = False
        self.told: tuple[float, float, bool] | None = None
        """Its last reported state; written by the thread that reports."""


class Logged:
    """Metrics and progress of this process. Any thread logs; one at a time takes."""

    def __init__(self, node: Node) -> None:
        self._node = node
        # Steps of both are atomic: appended by any thread.
        self.values: deque[tuple[str, int, float | LateValue]] = deque()
        self.bars: deque[Bar] = deque()
        self._steps: dict[str, int] = {}
        """The last step of each metric."""
        self.wake: Callable[[], None] = _nothing
        """Called after something was logged; cheap. Set once."""
        self.flush: Callable[[], None] = _nothing
        """Reports now, in any thread. Set once."""
        self.heard: Callable[[], bool] = _yes
        """Whether somebody takes what is logged. Set once."""

    def add(self, name: str, value: float | LateValue, step: int | None) -> None:
        """Log a value; without a step, with the one after the last."""
        if step is None:
            step = self._steps.get(name, -1) + 1
        self._steps[name] = step
        self.values.append((name, step, value))
        self.wake()
        if len(self.values) > MOST:
            self.flush()

    def add_bar(self, bar: Bar) -> None:
        """Report a bar until it has ended."""
        self.bars.append(bar)
        self.wake()

    @property
    def pending(self) -> bool:
        """Whether there is something to report."""
        return bool(self.values) or any(bar.told != (bar.done, bar.total, bar.ended) for bar in list(self.bars))

    def settle(self) -> None:
        """Wait for values of GPUs, within a bound."""
        deadline = time.monotonic() + _PATIENCE
        while self.values and not _is_there(self.values[0][2]) and time.monotonic() < deadline:
            time.sleep(_LOOK)

    def take(self, rank: int) -> list[Metrics | Progress]:
        """Take all that is ready, in order. Values behind one that a GPU still computes wait for it."""
        found: list[Metrics | Progress] = []
        columns: dict[str, tuple[list[int], list[float]]] = {}
        while self.values:
            name, step, value = self.values[0]
            if not _is_there(value):
                break
            self.values.popleft()
            steps, values = columns.setdefault(name, ([], []))
            steps.append(step)
            values.append(_read(value))
            if len(steps) == _PIECE:
                found.append(Metrics(rank, name, tuple(steps), tuple(values)))
                del columns[name]
        found.extend(Metrics(rank, name, tuple(steps), tuple(values)) for name, (steps, values) in columns.items())
        return [*found, *self._bars(rank)]

    def _bars(self, rank: int) -> list[Progress]:
        found: list[Progress] = []
        for _ in range(len(self.bars)):
            bar = self.bars.popleft()
            ended = bar.ended
            now = bar.done, bar.total, ended
            if not ended:
                self.bars.append(bar)
            if bar.told != now:
                bar.told = now
                found.append(Progress(rank, bar.name, bar.done, bar.total, bar.unit, ended))
        return found


def _is_float(value: float | LateValue) -> TypeIs[float]:
    """Return whether a value is there already."""
    return type(value) is float


def _is_there(value: float | LateValue) -> bool:
    return _is_float(value) or value.is_there()


def _read(value: float | LateValue) -> float:
    return value if _is_float(value) else value.read()


def _nothing() -> None:
    pass


def _yes() -> bool:
    return True
