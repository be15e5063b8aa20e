"""Interrupting one call of one actor, wherever its code runs: in the main thread, in a thread, or on an event loop."""

from __future__ import annotations

import ctypes
import signal
import threading

from monarch._wire.held import harmless

_raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
_raise_in.argtypes = [ctypes.c_ulong, ctypes.py_object]
_arrived: set[int] = set()
"""Threads to which the last interrupt has come."""
NOTICE = signal.SIGRTMIN + 7
"""A signal that does nothing but have Python's own handler run, which it does between two steps of Python code."""
noticed = 0
"""How often it has run."""


def listen() -> None:
    """Take that signal; called from the main thread."""
    harmless.append(_notice)
    signal.signal(NOTICE, _notice)


def _notice(*_: object) -> None:
    notice()


def notice() -> None:
    """Return a handler of signals runs in the main thread, so Python code goes on there.

    That of SIGINT counts as well: where it raises, Python may leave the other signal pending until the next one.
    """
    global noticed
    noticed += 1


def prod() -> None:
    """Have the main thread show whether its Python code goes on, by ``noticed``."""
    signal.pthread_kill(threading.main_thread().ident or 0, NOTICE)


class Interrupt(KeyboardInterrupt):
    """A KeyboardInterrupt in a thread that is not the main one."""

    def __init__(self) -> None:
        super().__init__()
        # Python makes it in that thread, when it raises it there.
        _arrived.add(threading.get_ident())


# It is what an endpoint expects, and what is shown.
Interrupt.__name__ = Interrupt.__qualname__ = "KeyboardInterrupt"


class ThreadInterrupts:
    """Raises KeyboardInterrupt in a thread while it runs code of the user, and at no other time."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.ident = 0
        """The thread, once it has run something."""
        self.native = 0
        """Its native id; written as ``ident`` is."""
        self._inside = False
        self._raised = False
        self.entered = 0
        """How often code of the user has begun here; written by this thread."""

    def enter(self) -> None:
        """Code of the user begins in this thread."""
        if not self.native:
            self.native = threading.get_native_id()
        self.ident = threading.get_ident()
        self.entered += 1
        self._inside = True

    def leave(self) -> None:
        """It has ended: what was raised and has not come is taken back."""
        with self._lock:
            self._inside = False
            if self._raised:
                self._raised = False
                _raise_in(self.ident, ctypes.py_object())

    @property
    def pending(self) -> bool:
        """Whether an interrupt was raised and has not come yet."""
        return self._raised and self.ident not in _arrived

    def interrupt(self, inside: bool = False, entered: int | None = None) -> bool:
        """Raise it, from another thread; whether there was code to interrupt, as ``inside`` may say it.

        With ``entered``, only what had begun by then is interrupted.
        """
        with self._lock:
            if not (inside or self._inside) or entered not in (None, self.entered):
                return False
            if not self.pending:
                _arrived.discard(self.ident)
                self._raised = True
                _raise_in(self.ident, Interrupt)
            return True
