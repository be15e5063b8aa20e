"""How threads and event loops of a process wait for futures."""

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
    """The waits of one process, and what is shown before a result is read."""

    def __init__(self, receive_loop: ReceiveLoop) -> None:
        self._receive_loop = receive_loop
        self.lock = threading.RLock()
        """Of all futures: held for a few steps, and again by a ``__del__`` that runs in the middle of them."""
        self.unshown: dict[int, threading.Event] = {}
        """By port that is done and whose output is not shown yet: set once it is."""
        self.await_shown: Callable[[], None] = lambda: None
        """Waits for that, at most a moment."""
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
