"""The log of one mesh, and its state: what views are drawn from."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from threading import RLock
from typing import TypeVar

from monarch._core.telemetry.event_table import EventTable
from monarch._core.telemetry.events import Entry, Event
from monarch._core.telemetry.fold import copy_of, fold
from monarch._core.telemetry.model import MeshModel
from monarch._telemetry.ring import Ring

T = TypeVar("T")
_UNFOLDED = 100
"""Entries that the model may lack until it is read. Together they take less time than one by one: code that runs now
and then has left the caches of the CPU."""


class MeshTelemetry:
    """The events of a mesh and the state that follows from them. Thread-safe.

    Args:
        uid: the uid of the mesh.
        name: the name of the mesh.
        settle: takes in what has happened so far.
        wake: makes the thread that calls subscribers start.
    """

    def __init__(self, uid: str, name: str, settle: Callable[[], None], wake: Callable[[], None]) -> None:
        self.uid = uid
        self.name = name
        self._settle = settle
        self._wake = wake
        # Guards the next two, and that numbers and entries agree; held briefly, never over code of others.
        self._lock = RLock()
        self._model = MeshModel()
        self._unfolded: deque[Entry] = deque()
        """The newest entries, which the model lacks."""
        self._ring = Ring()
        self.subscribers: tuple[Subscriber, ...] = ()
        """Replaced as a whole under ``_lock``, so it is read without it."""

    @property
    def number(self) -> int:
        """The number of the newest entry."""
        return self._ring.last

    def add(self, event: Event, when: float = 0.0) -> None:
        """Add an event to the log.

        Args:
            event: what has happened.
            when: seconds since the epoch; 0 for now.
        """
        with self._lock:
            entry = Entry(self._ring.last + 1, when or time.time(), event)
            self._ring.append(entry)
            self._unfolded.append(entry)
            if len(self._unfolded) >= _UNFOLDED:
                self._newest_model()

    def _newest_model(self) -> MeshModel:
        """Return the state after the newest entry; with the lock."""
        # One by one: an interrupt of a reader must not lose the others.
        while self._unfolded:
            fold(self._model, self._unfolded.popleft())
        return self._model

    def events(self) -> EventTable:
        """Return the entries of the log that are kept, oldest first."""
        self._settle()
        return EventTable(self.name, self._ring.since(0))

    def since(self, number: int) -> Iterator[Entry]:
        """Yield the kept entries after a number, oldest first. The first may be later than the next number."""
        self._settle()
        return self._ring.since(number)

    def model(self) -> MeshModel:
        """Return a copy of the state of the mesh."""
        self._settle()
        with self._lock:
            return copy_of(self._newest_model())

    def read(self, reader: Callable[[MeshModel], T]) -> T:
        """Return the result of a function of the state, which is cheaper than copying the state of a large mesh.

        Args:
            reader: quick; does not change the model, keep parts of it, wait or run user code.
        """
        self._settle()
        with self._lock:
            return reader(self._newest_model())

    def base(self) -> MeshModel:
        """Return the state before the first entry that is kept."""
        with self._lock:
            return copy_of(self._ring.base)

    def subscribe(self, callback: Callable[[], object]) -> Callable[[], None]:
        """Call a function soon after each change, and return a function that ends this.

        It is called in a thread of its own, without a lock, for many changes at once: at most 10 times a second.
        """
        subscriber = Subscriber(callback)
        with self._lock:
            self.subscribers = (*self.subscribers, subscriber)
        self._wake()
        return lambda: self._unsubscribe(subscriber)

    def _unsubscribe(self, subscriber: Subscriber) -> None:
        with self._lock:
            self.subscribers = tuple(each for each in self.subscribers if each is not subscriber)


class Subscriber:
    """A function that is called after changes."""

    def __init__(self, callback: Callable[[], object]) -> None:
        self.callback = callback
        self.told = 0
        """Number of the newest entry at its last call; written by the collector's thread."""
        self.running = False
        """Whether a call is queued or runs; set by the collector's thread, cleared by the thread of the call."""

    def __call__(self) -> None:
        self.running = False
        self.callback()
