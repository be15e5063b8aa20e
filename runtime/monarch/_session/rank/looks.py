"""When a rank looks for something to send outside its answers: often while it is busy, and seldom while it is idle."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from monarch._actors.mailbox import Mailbox
from monarch._actors.table import actors_of
from monarch._node.node import Node
from monarch._wire.receiving.aside import tell_recurring

_T = TypeVar("_T")

_BUSY, _IDLE = 0.05, 4.0
"""Seconds between two looks of a busy rank, and the most between two of an idle one."""
_EARLY_S = 1.0
"""Seconds by which the look of an idle rank may come early, with a call."""
_RARE = 0.05
"""Share of the time that calls take in a rank which counts as idle between them."""
_JUST_S = 0.01
"""Seconds after a call in which its answer stands for a look: it has sent all output."""
_ANSWERS = 3
"""The most looks in a row that answers stand for."""
_WATCH_MOST = 0.5
"""Seconds for which short calls may put off the look in their middle."""


class Looks:
    """Takes some steps in the receiving thread, time and again, and tends the files of this process there.

    Args:
        node: the node of this rank.
        busy: returns whether an actor runs a call.
        steps: each returns whether there was something to send.
    """

    def __init__(self, node: Node, busy: Callable[[], bool], steps: Sequence[Callable[[], bool]]) -> None:
        self._node = node
        self._actors = actors_of(node)
        self._busy = busy
        self._steps = (*steps, busy)
        # Receiving thread only, except that the first one is also read by others: the times of the next and of the last
        # look, the pause between them, the seconds of calls until the last one, and when files are due.
        self._next = self._last = 0.0
        self._pause = _BUSY
        self._called_s = 0.0
        self._next_tend = 0.0
        self._answers = 0
        """Looks since the last one for which an answer has stood."""
        # Any thread: when ``expect`` was called first and last, and whether a timer follows that. Two do no harm.
        self._expected_first = self._expected = 0.0
        self._expecting = False

    def look(self) -> None:
        """Take the steps, and arrange the next look; in the receiving thread, and once as the rank begins."""
        self._pause = min(_IDLE, self._pause * 2)
        try:
            if any([_tried(step) for step in self._steps]):
                self._pause = _BUSY
            _tried(self._node.bulk.settle)
            if time.monotonic() >= self._next_tend:
                _tried(self._node.tend)
                self._next_tend = time.monotonic() + self._node.residence.pause
        finally:
            self._last, self._called_s, self._answers = time.monotonic(), self._seconds_of_calls(), 0
            self._arrange(self._last)

    def _arrange(self, now: float) -> None:
        """Arrange the next look."""
        self._next = now + self._pause
        early = _EARLY_S if self._pause == _IDLE else 0.0
        self._node.receive_loop.call_later(self._pause, self._look_at(self._next), early)

    def _look_at(self, when: float) -> Callable[[], None]:
        """Return a look that does nothing if another has taken its place, and in a busy rank never comes early.

        Early looks come between two calls, so they would find each rank idle.
        """

        def look() -> None:
            if self._next == when:
                now = time.monotonic()
                if now >= when:
                    self.look()
                elif not self._is_called_rarely(now):
                    self._node.receive_loop.call_later(when - now, look)
                elif self._answers < _ANSWERS and now - self._last_end() < _JUST_S:
                    self._answers += 1
                    self._arrange(now)
                else:
                    self.look()

        return look

    def _is_called_rarely(self, now: float) -> bool:
        """Return whether no call runs, and those since the last look have taken almost no time."""
        if self._busy() or any(mailbox.executor.loop is not None for mailbox in self._mailboxes()):
            # The time of calls on event loops is not known.
            return False
        return self._seconds_of_calls() - self._called_s <= _RARE * (now - self._last)

    def _seconds_of_calls(self) -> float:
        return sum(executor.seconds for executor in {mailbox.executor for mailbox in self._mailboxes()})

    def _last_end(self) -> float:
        return max((mailbox.executor.last_end for mailbox in self._mailboxes()), default=0.0)

    def _mailboxes(self) -> list[Mailbox]:
        return list(self._actors.here.values())

    def expect(self) -> None:
        """Look at short intervals again, after a long pause, as long code begins; from any thread.

        The first look comes by a timer, since most cells end before it: waking the receiving thread costs more than
        such a cell.
        """
        self._expected = now = time.monotonic()
        if not self._expecting and self._next - now > _BUSY:
            self._expecting = True
            self._expected_first = now
            self._node.receive_loop.call_later(_BUSY, self._look_if_due)

    def _look_if_due(self) -> None:
        now = time.monotonic()
        if self._expected + _BUSY > now and self._expected_first + _WATCH_MOST > now:
            # A newer cell runs, so another one has ended since, which has sent all output.
            self._node.receive_loop.call_later(_BUSY, self._look_if_due)
            return
        self._expecting = False
        self._pause = _BUSY
        self.look()


def _tried(step: Callable[[], _T]) -> _T | None:
    """Take a step of a look; its failure, which the next look may repeat, must not hold up the other steps."""
    try:
        return step()
    except Exception as error:
        tell_recurring(error)
        return None
