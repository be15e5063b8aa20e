"""The notebook's own stdout and stderr, whose flush waits until the text has been sent, and only if there is any."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

from ipykernel.iostream import OutStream

_Task = Callable[[], None]


class NotebookStream(OutStream):
    """Stream to front ends whose flush waits until its text has been sent.

    ipykernel flushes four times a cell. Each flush waits for the IO thread, but returns before the text has been sent.
    """

    def __init__(self, session: Any, pub_thread: Any, name: str, **others: Any) -> None:
        # Set by any thread, and compared by identity only. Before the base class starts a thread that writes.
        self._text: object = object()
        """Replaced with each new text."""
        self._sent = self._text
        """Value of ``_text`` at the last flush."""
        base: Any = super()
        base.__init__(session, pub_thread, name, **others)

    def write(self, string: str) -> int | None:
        """Add text, which is sent after a moment or with the next flush; return its length."""
        written = super().write(string)
        self._text = object()
        return written

    def flush(self) -> None:
        """Return once all that was written has been sent, and the messages to front ends before it."""
        io: Any = self.pub_thread
        base: Any = super()
        if io is None or not io.thread.is_alive() or io.thread is threading.current_thread():
            # Closed, or in a fork, or called by the IO thread.
            base.flush()
            return
        tasks, text = _tasks_of(io), self._text
        if self._sent is text and tasks.are_over():
            return
        if tasks.run_and_wait(base.flush, self.flush_timeout):
            self._sent = text
            return
        # stderr itself may be what cannot be sent.
        print(f"the notebook's {self.name} was not sent within {self.flush_timeout:g} s", file=sys.__stderr__)


class _Tasks:
    """The tasks of ipykernel's IO thread.

    Args:
        io: ipykernel's object for that thread, whose ``schedule`` is replaced by the one here.
    """

    def __init__(self, io: Any) -> None:
        self._schedule: Callable[[_Task], None] = io.schedule
        # Set by any thread without a lock, which a fork could inherit locked. They are compared by identity only: a
        # stale value costs one wait.
        self._last: object = object()
        """Replaced with each new task."""
        self._done: object = None
        """Value of ``_last`` at a time before which all tasks have ended; None at first."""
        io.schedule = self.schedule

    def schedule(self, task: _Task) -> None:
        """Add a task, and note it, also if an interrupt comes in between."""
        self._last = object()
        self._schedule(task)
        self._last = object()

    def are_over(self) -> bool:
        """Return whether all tasks have ended that this thread has scheduled or knows of."""
        return self._done is self._last

    def run_and_wait(self, task: _Task, timeout: float) -> bool:
        """Let the IO thread run a task; return whether it and what it sends have ended in time (seconds)."""
        ended = threading.Event()

        def run() -> None:
            try:
                task()
            finally:
                seen = self._last

                def finish() -> None:
                    self._done = seen
                    ended.set()

                # Behind the messages of the task, which the IO thread schedules for itself.
                self._schedule(finish)

        self._schedule(run)
        return ended.wait(timeout)


def _tasks_of(io: Any) -> _Tasks:
    """Return the record of the IO thread; both streams share one."""
    owner = getattr(io.schedule, "__self__", None)
    return owner if isinstance(owner, _Tasks) else _Tasks(io)
