"""Long changes of a mesh, such as a heal: one at a time, and all see which one is under way. No I/O, no clock."""

from __future__ import annotations

from dataclasses import dataclass
from threading import RLock
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Change(Generic[T]):
    """A change under way."""

    what: str
    """As in ``healed``."""
    since: float
    """When it began, by the clock of whoever began it."""
    end: T
    """What those wait for who want to begin another one."""


class Changes(Generic[T]):
    """The change of a mesh that is under way, if any. Thread-safe; nothing is locked between ``begin`` and ``end``."""

    def __init__(self) -> None:
        self._lock = RLock()
        self._now: Change[T] | None = None
        """Replaced under ``_lock``, read without it."""

    @property
    def now(self) -> Change[T] | None:
        """The one under way."""
        return self._now

    def begin(self, change: Change[T]) -> Change[T] | None:
        """Begins a change; or returns the one that is under way instead, whose end the caller waits for."""
        with self._lock:
            if self._now is None:
                self._now = change
                return None
            return self._now

    def end(self) -> None:
        """Ends the change that the caller has begun; the caller then completes what others wait for."""
        with self._lock:
            assert self._now is not None
            self._now = None
