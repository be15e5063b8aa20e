"""A wait that ends as ranks stop or continue."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from monarch._kernel_api import open_node, stops


class PauseWait:
    """A wait of this thread that changes among the stopped ranks may end.

    Args:
        is_over: tells whether it is over; quick, called in the receiving thread.
    """

    def __init__(self, is_over: Callable[[], bool]) -> None:
        self._is_over = is_over
        self.thread: Any = None
        """See Waiter."""

    @property
    def done(self) -> bool:
        """Whether it is over."""
        return self._is_over()

    def wait(self, seconds: float) -> bool:
        """Wait; return whether it is over."""
        loop, changes = open_node().receive_loop, stops().on_change
        changes.append(self._notify)
        try:
            return loop.wait(self, seconds)
        finally:
            changes.remove(self._notify)

    def _notify(self) -> None:
        open_node().receive_loop.notify(self)
