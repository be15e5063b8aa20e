"""Async endpoints that await calls: like sync ones, the endpoint with its actor's turn may be part of a deadlock."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

from monarch._actors.running import ActorLike
from monarch._core.kinds import is_a
from monarch._python.later import asyncio
from monarch.exceptions import DeadlockError

if TYPE_CHECKING:
    from monarch._core.deadlock import PendingRequest
    from monarch._node.future import Future
    from monarch._wire.messages import Call

FIRST = 0.05
"""Seconds after which an awaiting actor begins to look for a deadlock."""
_LAST = 1.0
"""Seconds between looks, at most."""


class DeadlockFinder(Protocol):
    """A finder of actors that wait for each other; see deadlocks.py."""

    def begin(self, mailbox: ActorLike, texts: dict[PendingRequest, str], awaits: Awaits, /) -> int: ...
    def end(self, number: int, /) -> None: ...
    def ask_around(self, number: int, futures: list[Future[Any]], /) -> None: ...
    def requests(
        self, mailbox: ActorLike, call: Call, waiter: Any, /
    ) -> tuple[list[PendingRequest], Callable[[PendingRequest], str]]: ...


class Awaits:
    """The awaited calls of the endpoint with an actor's turn. All state belongs to the thread of the event loop.

    Only calls that the endpoint's own task awaits count, directly or through a task or ``asyncio.gather``: an actor
    that may continue without an answer does not wait for it.
    """

    def __init__(self, mailbox: ActorLike, deadlocks: DeadlockFinder) -> None:
        self._mailbox = mailbox
        self._deadlocks = deadlocks
        self._awaited: dict[asyncio.Future[Any], Future[Any]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._pause = FIRST
        self._waiting: tuple[asyncio.Future[Any], ...] = ()
        self._number = 0
        """The number of the registered wait; 0 for none."""
        self._by_text: dict[str, asyncio.Future[Any]] = {}

    def add(self, arrival: asyncio.Future[Any], future: Future[Any]) -> None:
        """Note that the endpoint, or one of its tasks, awaits a call."""
        self._awaited[arrival] = future
        if self._timer is None:
            self._pause = FIRST
            self._timer = arrival.get_loop().call_later(FIRST, self._look)

    def waited(self) -> list[Future[Any]]:
        """Return the calls that the endpoint or its tasks await; from any thread."""
        return [future for arrival, future in list(self._awaited.items()) if not arrival.done()]

    def tell(self, cycle: str, path: str) -> None:
        """Fail the wait, which is part of a deadlock, unless it has ended."""
        arrival = self._by_text.get(path)
        if arrival is not None and arrival in self._blocking() and not arrival.done():
            self.end()
            arrival.set_exception(DeadlockError(cycle))

    def tell_from_elsewhere(self, cycle: str, path: str) -> None:
        """Call ``tell`` from another thread."""
        loop = self._mailbox.executor.loop
        if loop is not None:
            loop.call_soon_threadsafe(self.tell, cycle, path)

    def end(self) -> None:
        """Note that the endpoint continues."""
        if self._number:
            self._deadlocks.end(self._number)
        self._number, self._waiting = 0, ()

    def _look(self) -> None:
        self._timer = None
        self._awaited = {arrival: future for arrival, future in self._awaited.items() if not arrival.done()}
        waiting = tuple(self._blocking())
        if waiting != self._waiting:
            self.end()
            self._begin(waiting)
        if self._number:
            self._deadlocks.ask_around(self._number, [self._awaited[each] for each in waiting])
        if self._awaited:
            self._pause = min(_LAST, self._pause * 2)
            self._timer = asyncio.get_running_loop().call_later(self._pause, self._look)

    def _begin(self, waiting: tuple[asyncio.Future[Any], ...]) -> None:
        call = self._mailbox.turns.call
        if not waiting or call is None:
            return
        self._by_text = {}
        texts: dict[PendingRequest, str] = {}
        for arrival in waiting:
            requests, text = self._deadlocks.requests(self._mailbox, call, self._awaited[arrival])
            for request in requests:
                texts[request] = text(request)
                self._by_text[texts[request]] = arrival
        if texts:
            self._number = self._deadlocks.begin(self._mailbox, texts, self)
            self._waiting = waiting
            for arrival in waiting:
                arrival.add_done_callback(self._arrived)

    def _arrived(self, arrival: asyncio.Future[Any]) -> None:
        if arrival in self._waiting:
            self.end()

    def _blocking(self) -> Iterator[asyncio.Future[Any]]:
        """Return the awaited calls that the endpoint cannot continue without."""
        task = self._mailbox.turns.task
        return (each for each in _leaves(task) if each in self._awaited)


def _leaves(waited: Any) -> Iterator[asyncio.Future[Any]]:
    """Return the futures that a task or gather needs; none where asyncio does not tell, as for ``asyncio.wait``."""
    if waited is None or waited.done():
        return
    children = getattr(waited, "_children", None)
    if is_a(waited, asyncio.Task):
        yield from _leaves(getattr(waited, "_fut_waiter", None))
    elif children is not None:
        for child in children:
            yield from _leaves(child)
    else:
        yield waited
