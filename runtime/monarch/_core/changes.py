"""Long changes of a mesh, such as a heal: one at a time, visible to all threads. No I/O, no clock."""

from __future__ import annotations

from dataclasses import dataclass
from threading import RLock
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Change(Generic[T]):
    """A change under way."""

    what: str
    """The change itself, as in ``healed``."""
    since: float
    """Start time, by the clock of the caller of ``begin``."""
    end: T
    """Completed at the end of this change; callers that want to begin another one wait for it."""


class Changes(Generic[T]):
    """The change of a mesh that is under way, if any. Thread-safe; no lock is held between ``begin`` and ``end``."""

    def __init__(self) -> None:
        self._lock = RLock()
        self._now: Change[T] | None = None
        """Replaced under ``_lock``, read without it."""

    @property
    def now(self) -> Change[T] | None:
        """The change under way."""
        return self._now

    def begin(self, change: Change[T]) -> Change[T] | None:
        """Begin a change, or return the one that is under way; the caller then waits for its end."""
        with self._lock:
            if self._now is None:
                self._now = change
                return None
            return self._now

    def end(self, change: Change[T]) -> bool:
        """End the caller's change, which then completes what other threads wait for; return False if it never began."""
        with self._lock:
            if self._now is not change:
                return False
            self._now = None
            return True
