"""Waits of threads and event loops for futures."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from monarch._wire.receiving.loop import ReceiveLoop, Waiter

if TYPE_CHECKING:
    import asyncio


class ActorWaits(Protocol):
    """Watches the waits of actors; registered by the room of actors."""

    def wait(self, waiter: Waiter, timeout: float | None, /) -> bool: ...
    def awaited(self, future: Any, arrival: asyncio.Future[Any], /) -> None: ...


class Waits:
    """The waits of one process, and the output shown before a result is read."""

    def __init__(self, receive_loop: ReceiveLoop) -> None:
        self._receive_loop = receive_loop
        self.lock = threading.RLock()
        """The lock of all futures: held briefly, and reentrantly by a ``__del__`` that runs meanwhile."""
        self.unshown: dict[int, threading.Event] = {}
        """By port of an ended call with pending output: set once it is shown."""
        self.await_shown: Callable[[], None] = lambda: None
        """Waits for that output, briefly."""
        self.actors: ActorWaits | None = None
        """Set once, before the first actor runs."""

    def wait(self, waiter: Waiter, timeout: float | None = None) -> bool:
        """Wait in this thread; return whether it is done. In an actor, a deadlock raises DeadlockError."""
        if self.actors is None:
            return self._receive_loop.wait(waiter, timeout)
        return self.actors.wait(waiter, timeout)

    def awaited(self, future: Any, arrival: asyncio.Future[Any]) -> None:
        """Note that an event loop awaits a future. In an actor, a deadlock raises DeadlockError there."""
        if self.actors is not None:
            self.actors.awaited(future, arrival)
