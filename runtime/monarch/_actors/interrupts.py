"""Interrupts of one call of one actor, in the main thread, in another thread, or on an event loop."""

from __future__ import annotations

import ctypes
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from monarch._python.thread_trace import has_raised, raise_in, raise_nothing
from monarch._wire.deferred_signals import harmless

_trip = ctypes.pythonapi.PyErr_SetInterruptEx
_trip.argtypes = [ctypes.c_int]
_arrived: set[int] = set()
"""Threads that received the last interrupt."""
raised: dict[int, BaseException] = {}
"""The last interrupt that was raised in a thread's running call. Set and removed by that thread, in atomic steps."""
NOTICE = signal.SIGRTMIN + 7
"""A signal that only runs Python's handler, which happens between two bytecodes."""
noticed: int = 0
"""How often the handler has run."""


def listen() -> None:
    """Install the handler of that signal; called from the main thread."""
    harmless.append(_notice)
    signal.signal(NOTICE, _notice)


on_notice: list[Callable[[FrameType | None], tuple[bool, BaseException | None]]] = []
"""Called by that handler with the interrupted frame; filled while modules are imported."""


_noticing = False
"""Whether that handler runs. Main thread only."""


def _notice(_: int, frame: FrameType | None) -> None:
    global _noticing
    notice()
    if _noticing:
        # One more signal, in the middle of this.
        return
    again, error = False, None
    _noticing = True
    try:
        for look in on_notice:
            again, error = look(frame)
    finally:
        _noticing = False
    # A loop steps without a call or a jump, at which the signal would run this handler again.
    if again and error is None:
        for _ in map(_trip, (NOTICE,)):
            return
    if again and error is not None:
        for _ in map(_trip, (NOTICE,)):
            raise error


def notice() -> None:
    """Count a run of a signal handler, which shows that Python code runs in the main thread.

    The SIGINT handler counts too: if it raises, Python may leave the other signal pending until the next one.
    """
    global noticed
    noticed += 1


def prod() -> None:
    """Make the main thread show by ``noticed`` whether its Python code runs."""
    signal.pthread_kill(threading.main_thread().ident or 0, NOTICE)
    if _is_blocked(NOTICE):
        # By code of the user. This runs the handler too, but ends no wait.
        _trip(NOTICE)


def _is_blocked(number: int) -> bool:
    """Return whether the main thread blocks a signal."""
    with open("/proc/self/status", "rb") as file:
        blocked = next(int(line.split()[1], 16) for line in file if line.startswith(b"SigBlk:"))
    return bool(blocked >> (number - 1) & 1)


def raise_again_after_finalizers() -> None:
    """Let interrupts of the main thread come again that a finalizer drops; called from it.

    Python reports what is raised in a ``__del__``, a weakref callback or a generator that is collected, and continues.
    """
    show = sys.unraisablehook

    def take(unraisable: sys.UnraisableHookArgs) -> None:
        ident = threading.get_ident()
        error = unraisable.exc_value
        if error is None or ident != threading.main_thread().ident or error is not raised.get(ident):
            show(unraisable)
            return
        # The call has not taken it, so it does not clean up.
        raised.pop(ident, None)
        # Without a call or a jump, at which the signal would run its handler in here.
        for _ in map(_trip, (signal.SIGINT,)):
            return

    sys.unraisablehook = take


def new_interrupt() -> KeyboardInterrupt:
    """Return an interrupt for this thread to raise."""
    error = raised[threading.get_ident()] = KeyboardInterrupt()
    return error


class ThreadInterrupt(KeyboardInterrupt):
    """A KeyboardInterrupt in a thread other than the main one."""

    def __init__(self) -> None:
        super().__init__()
        # Python constructs it in that thread when it raises it.
        has_raised()
        _arrived.add(threading.get_ident())
        raised[threading.get_ident()] = self

    def __reduce__(self) -> tuple[Any, ...]:
        # Constructed elsewhere, it would count as raised there.
        return KeyboardInterrupt, ()


# Endpoints expect, and users see, this name; callers know by it that a Stop has ended their call.
ThreadInterrupt.__name__ = ThreadInterrupt.__qualname__ = "KeyboardInterrupt"
ThreadInterrupt.__module__ = "builtins"


class ThreadInterrupts:
    """Raises KeyboardInterrupt in a thread, but only while it runs user code."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.ident = 0
        """The thread id, once it has run something."""
        self.native = 0
        """The native thread id; written like ``ident``."""
        self._inside = False
        self._raised = False
        self.entered = 0
        """How often user code has begun here; written by this thread."""

    def enter(self) -> None:
        """Note that user code begins in this thread."""
        if not self.native:
            self.native = threading.get_native_id()
        self.ident = threading.get_ident()
        self.entered += 1
        self._inside = True

    def leave(self) -> None:
        """Note that it has ended, and take back a pending interrupt."""
        with self._lock:
            self._inside = False
            if self._raised:
                self._raised = False
                raise_nothing()

    @property
    def pending(self) -> bool:
        """Whether an interrupt was raised and has not arrived yet."""
        return self._raised and self.ident not in _arrived

    def interrupt(self, entered: int | None = None, is_due: Callable[[], bool] | None = None) -> bool:
        """Raise it from another thread and return whether user code was running.

        Args:
            entered: the value of ``entered`` when the code had begun that is meant; None for any code.
            is_due: returns whether that code still runs, instead of the marks of ``enter`` and ``leave``. It is called
                under the lock that ``leave`` takes, so an interrupt does not come after that.
        """
        with self._lock:
            if not (self._inside if is_due is None else is_due()) or entered not in (None, self.entered):
                return False
            if not self.pending:
                _arrived.discard(self.ident)
                self._raised = True
                raise_in(self.ident, ThreadInterrupt)
            return True
