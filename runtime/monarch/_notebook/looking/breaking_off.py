"""The service that ends statements in a frame; apart from the others, so that it does not queue behind them."""

from __future__ import annotations

import signal
import threading

from monarch._actors.interrupts import ThreadInterrupt
from monarch._node.services.registry import service
from monarch._python.thread_trace import raise_in


class _Running:
    """Whether statements run in a frame of the paused thread."""

    def __init__(self) -> None:
        # Guarded by _lock, under which no user code runs.
        self._lock = threading.Lock()
        self._runs = False
        self._broken_off = False
        self._ident = 0
        """The thread that runs them."""

    def begin(self) -> None:
        """Note that they begin."""
        with self._lock:
            self._runs, self._broken_off = True, False
            self._ident = threading.get_ident()

    def end(self) -> bool:
        """Note that they have ended; return whether they were to be broken off."""
        with self._lock:
            self._runs = False
            return self._broken_off

    def break_off(self) -> bool:
        """Interrupt them; return whether there were any."""
        with self._lock:
            if self._runs:
                self._broken_off = True
                if self._ident == threading.main_thread().ident:
                    signal.pthread_kill(self._ident, signal.SIGINT)
                else:
                    # Of a further actor; it arrives at the next line of Python.
                    raise_in(self._ident, ThreadInterrupt)
            return self._runs


running = _Running()
"""Of this process."""


@service("breaking_off.break_off_here", "quick")
def break_off_here() -> bool:
    """Service: interrupt the statements that run in a frame, and only these; return whether there were any."""
    return running.break_off()
