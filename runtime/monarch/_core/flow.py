"""Flow control between one sender and one receiver: how far the sender may be ahead, and what the receiver has
finished.

Both ends are pure: no I/O, no clock, no thread of their own. Any thread may use them; each object has one lock, which
is held for a few additions and never while other code runs. docs/wire-protocol.md has the rules on the wire.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from threading import RLock
from typing import NamedTuple, Protocol, TypeVar

WINDOW = 16_384
"""Window size: how far a sender may be ahead. Each message costs 1, plus 1 for every 4 KiB."""
PATIENCE = 0.1
"""Seconds for which an actor first waits for room when nothing moves and messages wait for it."""


class WindowStatistics(NamedTuple):
    """A window at one moment."""

    sent: int
    """Cost of everything sent."""
    finished: int
    """Cost that the receiver has reported as finished."""
    limit: float
    """Upper bound of ``sent``; infinite once the receiver is gone."""


R = TypeVar("R", bound="Receiver")


class Window:
    """The sender's end. Send a message only after ``take`` has reserved its cost.

    ``sent`` may pass ``limit`` by less than the cost of one message, and ``limit`` is ``size`` beyond what was
    reported, or what ``go_beyond`` has added.

    Args:
        size: how far the sender may be ahead.
    """

    __slots__ = ("_finished", "_limit", "_lock", "_reported", "_size", "_starved", "patience", "sent")

    def __init__(self, size: int = WINDOW) -> None:
        self._lock = RLock()
        self._size = size
        # All of these: written under _lock; read without it where a stale value is fine.
        self._finished = 0
        self.sent = 0
        self._limit: float = size
        self.patience = PATIENCE
        self._starved = False
        """Whether a sender was refused, and nothing has made room since."""
        # Also written without the lock, by ``heard`` and ``finish_all``.
        self._reported = 0
        """The newest report of the receiver, which counts when somebody looks."""

    @property
    def limit(self) -> float:
        """Upper bound of ``sent``."""
        if self._reported > self._finished:
            with self._lock:
                self._count()
        return self._limit

    def _count(self) -> None:
        """Count the newest report; with the lock held."""
        total = self._reported
        if total > self._finished:
            self._finished = total
            self.patience = PATIENCE
            self._limit = max(self._limit, total + self._size)

    @property
    def has_room(self) -> bool:
        """Return whether one more message may be sent now."""
        return self.sent < self.limit

    @property
    def behind(self) -> int:
        """Return how far the receiver is behind, by its last report."""
        return self.sent - max(self._reported, self._finished)

    def take(self, cost: int) -> bool:
        """Reserve room for a message of this cost; False without room."""
        with self._lock:
            if self.sent >= self._limit:
                self._count()
                if self.sent >= self._limit:
                    self._starved = True
                    return False
            self.sent += cost
            return True

    def give_back(self, cost: int) -> bool:
        """Undo a ``take`` whose message was not sent; True if that made room where there was none."""
        with self._lock:
            full = self.sent >= self._limit
            self.sent -= cost
            if not full or self.sent >= self._limit:
                return False
            self._starved = False
            return True

    def finished(self, total: int) -> bool:
        """Take the receiver's report of all that it has finished; True if that made room where there was none.

        Reports may arrive in any order: an older one changes nothing.
        """
        with self._lock:
            full = self._starved or self.sent >= self._limit
            self._reported = max(self._reported, total)
            self._count()
            if not full or self.sent >= self._limit:
                return False
            self._starved = False
            return True

    def heard(self, total: int) -> bool:
        """Take a report, in the one thread that hears of this receiver; True if it may have made room for a sender that
        was refused.

        Without a sender that was refused it only keeps the total: the count is made when somebody looks.
        """
        if total > self._reported:
            # First: a sender that is refused says so before it looks here once more.
            self._reported = total
            return self._starved and self.finished(total)
        return False

    def go_beyond(self) -> None:
        """Allow one more window, since the receiver may itself wait for room here. The next takes twice as long."""
        with self._lock:
            self._limit += self._size
            self._starved = False
            self.patience *= 2

    def open(self) -> None:
        """Let everything pass: the receiver is gone, and messages to it go nowhere."""
        with self._lock:
            self._limit = math.inf
            self._starved = False

    def statistics(self) -> WindowStatistics:
        """Return a consistent snapshot of the counts."""
        with self._lock:
            self._count()
            return WindowStatistics(self.sent, self._finished, self._limit)


class Receiver(Protocol):
    """Has a window."""

    @property
    def window(self) -> Window: ...


def take_all(receivers: Iterable[Receiver], cost: int) -> int:
    """Reserve room for a message of this cost at some receivers, up to the first without room.

    Returns:
        The place of that one; -1 if all had room.
    """
    # The code of ``take`` without its calls: there may be thousands.
    for place, receiver in enumerate(receivers):
        window = receiver.window
        with window._lock:  # pyright: ignore[reportPrivateUsage]
            if window.sent < window._limit:  # pyright: ignore[reportPrivateUsage]
                window.sent += cost
                continue
        if not window.take(cost):
            return place
    return -1


def finish_all(receivers: Iterable[R], total: int) -> list[R]:
    """Take an equal report of many receivers whose reports arrive in one thread at a time.

    Returns:
        Those that may have made room where there was none.
    """
    made: list[R] = []
    for receiver in receivers:
        window = receiver.window
        # The code of ``heard`` without its calls: there may be thousands.
        if total > window._reported:  # pyright: ignore[reportPrivateUsage]
            window._reported = total  # pyright: ignore[reportPrivateUsage]
            if window._starved and window.finished(total):  # pyright: ignore[reportPrivateUsage]
                made.append(receiver)
    return made


class FinishedStatistics(NamedTuple):
    """A receiver's progress for one sender, at one moment."""

    total: int
    """Cost of all finished messages."""
    reported: int
    """Cost reported to the sender."""


class Finished:
    """The receiver's end: adds up the cost of finished messages of one sender, and decides when to report it.

    Args:
        size: the size of the sender's window. A quarter of it is reported even if nothing else goes to the sender.
    """

    __slots__ = ("_every", "_lock", "reported", "total")

    def __init__(self, size: int = WINDOW) -> None:
        self._lock = RLock()
        self._every = max(1, size // 4)
        # Both: written under _lock.
        self.total = 0
        self.reported = 0

    def report(self, cost: int = 0) -> int:
        """Add a cost and return the total, for a message to the sender that carries it."""
        with self._lock:
            self.total += cost
            self.reported = self.total
            return self.total

    def add(self, cost: int) -> None:
        """Add the cost of a message whose answer is about to report it."""
        with self._lock:
            self.total += cost

    def due(self, cost: int) -> int:
        """Add the cost of a message without an answer; the total if it is due to be reported now, else 0."""
        with self._lock:
            self.total += cost
            if self.total - self.reported < self._every:
                return 0
            self.reported = self.total
            return self.total

    def statistics(self) -> FinishedStatistics:
        """Return a consistent snapshot of the counts."""
        with self._lock:
            return FinishedStatistics(self.total, self.reported)
