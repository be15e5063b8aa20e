"""Deferred actions of a receive loop: at a time, or as soon as possible."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

Action = Callable[[], None]


def until_next(period: float, now: float, early: float = 0.0) -> float:
    """Return the seconds until the clock is at the next multiple of a period: actions of each second share a wake-up.

    Args:
        period: seconds between two actions.
        now: of the clock.
        early: seconds by which the action may run early. It is due later than that, so that it does not run at once.
    """
    return early + period - (now + early) % period


class Timers:
    """Actions by due time."""

    def __init__(self, clock: Callable[[], float], mutex: Any) -> None:
        self._clock = clock
        # Guards the two below. Only the leader removes entries, so it may read the first one without it.
        self._lock = mutex
        self.entries: list[tuple[float, int, Action, float]] = []
        """When each is due, its number, the action, and the seconds by which it may run early."""
        self._count = 0
        self.posted: deque[Action] = deque()
        """Due actions. Appended to by any thread, taken by the leader."""

    def add(self, seconds: float, action: Action, early: float = 0.0) -> bool:
        """Add an action that is due in some seconds; return whether it is the first one.

        Args:
            seconds: until it is due.
            action: what to run.
            early: seconds by which it may run before that, while the leader is awake anyway.
        """
        with self._lock:
            self._count += 1
            entry = (self._clock() + seconds, self._count, action, early)
            heapq.heappush(self.entries, entry)
            return self.entries[0] is entry

    def first(self) -> float:
        """Return when the first action is due, or infinity."""
        try:
            return self.entries[0][0]
        except IndexError:
            return math.inf

    def due(self, awake: bool = False) -> Iterator[Action]:
        """Remove and yield the actions that are due; for the leader.

        Args:
            awake: whether the leader has not slept for them, so that actions run that may be early.
        """
        now = self._clock()
        while True:
            with self._lock:
                if not self.entries or self.entries[0][0] - (self.entries[0][3] if awake else 0.0) > now:
                    return
                action = heapq.heappop(self.entries)[2]
            yield action
