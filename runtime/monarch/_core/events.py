"""Events with several subscribers, called in the order in which they subscribed."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from threading import RLock
from typing import Generic, ParamSpec

P = ParamSpec("P")


class Event(Generic[P]):
    """A recurring event and its subscribers. Thread-safe.

    Args:
        report: called with each exception that a subscriber raises.
    """

    __slots__ = ("_lock", "_report", "subscribers")

    def __init__(self, report: Callable[[Exception], object] = traceback.print_exception) -> None:
        self._report = report
        self._lock = RLock()
        self.subscribers: tuple[Callable[P, object], ...] = ()
        """Replaced as a whole under ``_lock``, so it is read without it."""

    def subscribe(self, subscriber: Callable[P, object]) -> None:
        """Call a function at each event, after those that subscribed before it."""
        with self._lock:
            self.subscribers = (*self.subscribers, subscriber)

    def tell(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Call all subscribers. If one raises, report it and call the next."""
        for subscriber in self.subscribers:
            try:
                subscriber(*args, **kwargs)
            except Exception as error:
                self._report(error)
