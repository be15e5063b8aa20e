"""The threads of actors besides the main thread of a rank, as the debugger sees them."""

from __future__ import annotations

from collections.abc import Callable
from threading import RLock, get_ident
from types import FrameType
from typing import NamedTuple

from monarch._python.thread_trace import Traceable


class ActorThread(NamedTuple):
    """A thread that runs one actor."""

    traceable: Traceable
    in_call: Callable[[], bool]
    has_call: Callable[[], bool]
    """Whether it runs a call, or a call awaits on its event loop."""

    @property
    def ident(self) -> int:
        """The id of the thread."""
        return self.traceable.ident


class ActorThreads:
    """Those of this process that live."""

    def __init__(self) -> None:
        # Held briefly, and while another thread is asked to call something: so it cannot end meanwhile.
        self._lock = RLock()
        self._by_ident: dict[int, ActorThread] = {}
        """Changed with the lock; read without it, in single operations."""

    def begin(self, in_call: Callable[[], bool], has_call: Callable[[], bool]) -> None:
        """Add this thread, which tells whether it runs a call, and whether it does or one awaits."""
        with self._lock:
            self._by_ident[get_ident()] = ActorThread(Traceable(), in_call, has_call)

    def end(self) -> None:
        """Remove this thread, which ends."""
        with self._lock:
            known = self._by_ident.pop(get_ident(), None)
        if known is not None:
            known.traceable.end()

    def running(self) -> list[ActorThread]:
        """Return those that run a call."""
        return [each for each in list(self._by_ident.values()) if each.in_call()]

    def having(self) -> list[ActorThread]:
        """Return those that run a call, or where one awaits."""
        return [each for each in list(self._by_ident.values()) if each.has_call()]

    def has_here(self) -> bool:
        """Return whether this is one of them, and runs a call, or one awaits."""
        known = self._by_ident.get(get_ident())
        return known is not None and known.has_call()

    def runs_here(self) -> bool:
        """Return whether this is one of them, and runs a call."""
        known = self._by_ident.get(get_ident())
        return known is not None and known.in_call()

    def call_soon(self, thread: ActorThread, function: Callable[[FrameType], object]) -> None:
        """Have a thread call a function at its next step of Python, if it still lives."""
        with self._lock:
            if self._by_ident.get(thread.ident) is thread:
                thread.traceable.call_soon(function)
