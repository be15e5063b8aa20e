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


class ProcessWaits:
    """The waits of one process, and the output shown before a result is read."""

    def __init__(self, receive_loop: ReceiveLoop) -> None:
        self.lock = threading.RLock()
        """The lock of all futures: held briefly, and reentrantly by a ``__del__`` that runs meanwhile."""
        self.unshown: dict[int, threading.Event] = {}
        """By port of an ended call with pending output: set once it is shown."""
        self.await_shown: Callable[[], None] = lambda: None
        """Waits for that output, briefly."""
        self.wait: Callable[[Waiter, float | None], bool] = receive_loop.wait
        """Waits in this thread, at most some seconds; returns whether it is done. In an actor, a deadlock raises
        DeadlockError. Set once, with the next one, before the first actor runs: a call less for each wait."""
        self.awaited: Callable[[Any, asyncio.Future[Any]], None] = _nothing
        """Notes that an event loop awaits a future. In an actor, a deadlock raises DeadlockError there."""

    def watched_by(self, actors: ActorWaits) -> None:
        """Let the room of actors watch all waits."""
        self.wait, self.awaited = actors.wait, actors.awaited


def _nothing(future: Any, arrival: asyncio.Future[Any]) -> None:
    pass
