"""Debug mode of the receive loop: reports, with a stack, what keeps the receiving thread busy for long, or runs there
but must not.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from monarch._python.frames import frame_of
from monarch._python.threads import spawn_thread
from monarch._wire.receiving.checks import Check, watched

VARIABLE = "MONARCH_DEBUG"
"""Environment variable that turns it on, unless empty or 0."""
LIMIT = 0.05
"""Maximum seconds of a handler."""
_LOOK = 0.01

Step = Callable[[Any], None]


def is_on() -> bool:
    """Return whether this process reports slow handlers."""
    return os.environ.get(VARIABLE, "") not in ("", "0")


class SlowHandlerWatch:
    """Watches the receiving thread from another one, in debug mode; otherwise does nothing.

    Args:
        handle: handles a message.
        run: runs a deferred action.
    """

    def __init__(self, handle: Step, run: Step) -> None:
        self.handle, self.run = handle, run
        """The same functions, watched in debug mode."""
        self._over = threading.Event()
        self._now: tuple[int, float, str] | None = None
        """Written by the leader: its thread, the start time, and its current task."""
        if not is_on():
            return
        self._check = Check()
        self.handle = self._watched(handle, "a message of {} bytes", len)
        self.run = self._watched(run, "{}", _title)
        spawn_thread("monarch-slow-handlers", self._look)

    def end(self) -> None:
        """Stop watching."""
        self._over.set()

    def _watched(self, step: Step, text: str, about: Callable[[Any], object]) -> Step:
        def watched_step(what: Any) -> None:
            self._now = threading.get_ident(), time.monotonic(), text.format(about(what))
            try:
                watched(self._check, step, what)
            finally:
                self._now = None

        return watched_step

    def _look(self) -> None:
        reported = None
        while not self._over.wait(_LOOK):
            # A snapshot: the thread may continue meanwhile.
            for _ in range(len(self._check.found)):
                print(f"monarch: error: {self._check.found.popleft()}", file=sys.stderr, flush=True)
            now = self._now
            if now is None or now is reported or time.monotonic() - now[1] < LIMIT:
                continue
            reported = now
            frame = frame_of(now[0])
            stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
            if self._now is now:
                print(
                    f"monarch: the receiving thread has been busy for over {LIMIT * 1e3:g} ms with {now[2]}; "
                    f"process {os.getpid()} handles no other message meanwhile:\n{stack}",
                    file=sys.stderr,
                    flush=True,
                )


def _title(action: Any) -> str:
    return getattr(action, "__qualname__", None) or repr(action)
