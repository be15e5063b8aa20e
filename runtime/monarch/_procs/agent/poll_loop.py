"""The loop of a single-threaded process: one poll for sockets, file descriptors and timers."""

from __future__ import annotations

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
        self._timers: list[tuple[float, Action]] = []

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
        self._timers.append((time.monotonic() + seconds, action))

    def step(self) -> None:
        """Wait for a source or a timer, and call the actions of all that are ready or due."""
        timeout = None
        if self._timers:
            timeout = max(0, int((min(when for when, _ in self._timers) - time.monotonic()) * 1000) + 1)
        ready: list[tuple[Any, int]] = self._poller.poll(timeout)
        for source, _ in ready:
            # An earlier action may have dropped it.
            action = self._actions.get(source)
            if action is not None:
                action()
        now = time.monotonic()
        for timer in [timer for timer in self._timers if timer[0] <= now]:
            self._timers.remove(timer)
            timer[1]()
