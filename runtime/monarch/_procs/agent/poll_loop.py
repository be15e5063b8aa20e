"""The loop of a single-threaded process: one poll for sockets, file descriptors and timers."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from typing import Any, TypeAlias

import zmq

Source: TypeAlias = "zmq.Socket[bytes] | int"
"""A socket, or a file descriptor."""
Action: TypeAlias = Callable[[], None]


class PollLoop:
    """Calls the action of each source that is ready, and of each timer that is due."""

    def __init__(self) -> None:
        self._poller = zmq.Poller()
        self._actions: dict[Source, Action] = {}
        self._timers: list[tuple[float, int, Action]] = []
        """A heap: when each is due, its number, and what it does."""
        self._number = 0
        """Of the next timer."""

    def watch(self, source: Source, action: Action, writable: bool = False) -> None:
        """Call an action each time that a source can be read, or written if wanted; replaces an earlier one."""
        self._actions[source] = action
        self._poller.register(source, zmq.POLLIN | (zmq.POLLOUT if writable else 0))

    def unwatch(self, source: Source) -> None:
        """Forget a source."""
        self._poller.unregister(source)
        del self._actions[source]

    def watches(self, source: Source) -> bool:
        """Return whether a source has an action."""
        return source in self._actions

    def later(self, seconds: float, action: Action) -> None:
        """Call an action once, after some seconds."""
        heapq.heappush(self._timers, (time.monotonic() + seconds, self._number, action))
        self._number += 1

    def step(self) -> None:
        """Wait for a source or a timer, and call the actions of all that are ready or due."""
        timeout = None
        if self._timers:
            timeout = max(0, int((self._timers[0][0] - time.monotonic()) * 1000) + 1)
        ready: list[tuple[Any, int]] = self._poller.poll(timeout)
        for source, _ in ready:
            # An earlier action may have dropped it.
            action = self._actions.get(source)
            if action is not None:
                action()
        now, added = time.monotonic(), self._number
        # Those that an action adds wait for the next step, so that the sources have their turn.
        while self._timers and self._timers[0][0] <= now and self._timers[0][1] < added:
            heapq.heappop(self._timers)[2]()
