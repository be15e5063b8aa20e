"""Long changes of a mesh, such as a heal: one at a time, and all see which one is under way. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
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
    """The change of one mesh that is under way, if any. Thread-safe; nothing is held between ``begin`` and ``end``.

    Args:
        make: makes what others wait for; it must neither block nor call back.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._lock = Lock()
        self._now: Change[T] | None = None
        """Lock: ``_lock``."""

    @property
    def now(self) -> Change[T] | None:
        """The one under way."""
        return self._now

    def begin(self, what: str, now: float) -> Change[T] | None:
        """Begins a change; or returns the one that is under way instead, whose end the caller waits for."""
        with self._lock:
            if self._now is None:
                self._now = Change(what, now, self._make())
                return None
            return self._now

    def end(self) -> T:
        """Ends the change that the caller has begun; what this returns is the caller's to complete."""
        with self._lock:
            assert self._now is not None
            done, self._now = self._now, None
            return done.end
