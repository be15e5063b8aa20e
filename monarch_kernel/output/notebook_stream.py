"""The notebook's own stdout and stderr: their flush waits until front ends have been sent all, and not without need."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

from ipykernel.iostream import OutStream

_Task = Callable[[], None]


class NotebookStream(OutStream):
    """A stream of ipykernel.

    ipykernel flushes four times for each cell, and each time waits for the thread that sends, but not for the text
    itself: its flush returns once that thread knows what to send.
    """

    _sending: _Sending | None = None
    """None while it is being constructed, when ipykernel's thread that watches the descriptor may already use it."""

    def __init__(self, session: Any, pub_thread: Any, name: str, **others: Any) -> None:
        base: Any = super()
        base.__init__(session, pub_thread, name, **others)
        self._sending = _sending_of(self.pub_thread)

    def flush(self) -> None:
        """Return once all that was written has been sent, and the messages to front ends before it."""
        own: Any = self
        thread: Any = self.pub_thread and own.pub_thread.thread
        sending = self._sending
        if sending is None or thread is None or not thread.is_alive() or thread is threading.current_thread():
            # Closed, or in a fork, or called by the thread that sends.
            super().flush()
            return
        if (sending.is_over() and not own._buffers) or sending.ends(self._flush, self.flush_timeout):
            return
        # stderr itself may be what cannot be sent.
        print(f"the notebook's {self.name} was not sent within {self.flush_timeout:g} s", file=sys.__stderr__)


class _Sending:
    """The tasks of the thread that sends to front ends.

    Args:
        thread: ipykernel's object for it, whose ``schedule`` then passes through this one.
    """

    def __init__(self, thread: Any) -> None:
        self._schedule: Callable[[_Task], None] = thread.schedule
        # Any thread may set either, without a lock that a fork could keep: they are compared only by identity, and a
        # value that another thread has just replaced at most causes a wait.
        self._last: object = object()
        """Replaced after each new task."""
        self._done: object = None
        """The ``_last`` of a moment, all tasks before which have ended."""
        thread.schedule = self._given

    def _given(self, task: _Task) -> None:
        self._schedule(task)
        self._last = object()

    def is_over(self) -> bool:
        """Return whether all tasks have ended that the calling thread has given, or has seen given."""
        return self._done is self._last

    def ends(self, task: _Task, timeout: float) -> bool:
        """Let the thread carry out a task; return whether it and what it sends have ended in time (seconds)."""
        ended = threading.Event()

        def last() -> None:
            try:
                task()
            finally:
                known = self._last

                def end() -> None:
                    self._done = known
                    ended.set()

                # Behind the messages of the task, which the thread gives to itself.
                self._schedule(end)

        self._schedule(last)
        return ended.wait(timeout)


def _sending_of(thread: Any) -> _Sending:
    """Return the record of a thread that sends; both streams share one."""
    scheduled: Any = thread.schedule
    owner = getattr(scheduled, "__self__", None)
    return owner if isinstance(owner, _Sending) else _Sending(thread)
