"""Interrupts of one call of one actor, in the main thread, in another thread, or on an event loop."""

from __future__ import annotations

import ctypes
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from monarch._core.thread_trace import has_raised, raise_in, raise_nothing
from monarch._wire.held import harmless

trip = ctypes.pythonapi.PyErr_SetInterruptEx
trip.argtypes = [ctypes.c_int]
_FINALIZER_S = 0.1
"""Seconds for a ``__del__`` to end before it is interrupted."""
_DEEP = 40
"""Frames in which a ``__del__`` is looked for."""
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
        for _ in map(trip, (NOTICE,)):
            return
    if again and error is not None:
        for _ in map(trip, (NOTICE,)):
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
        trip(NOTICE)


def _is_blocked(number: int) -> bool:
    """Return whether the main thread blocks a signal."""
    with open("/proc/self/status", "rb") as file:
        blocked = next(int(line.split()[1], 16) for line in file if line.startswith(b"SigBlk:"))
    return bool(blocked >> (number - 1) & 1)


class Finalizers:
    """Interrupts that come in a ``__del__``, which drops them: they wait for its end, for a while."""

    def __init__(self) -> None:
        self.waits = False
        """Whether an interrupt has met one, and none has come outside since. Main thread; set to False by others."""
        self._since: float | None = None
        """When the interrupt came that waits. Main thread only."""

    def inside(self, frame: FrameType | None) -> bool:
        """Return whether an interrupt has come in a finalizer."""
        if _in_finalizer(frame):
            self.waits = True
            return True
        self.waits, self._since = False, None
        return False

    def defer(self) -> bool:
        """Return whether that interrupt waits longer for the end of the finalizer."""
        now = time.monotonic()
        if self._since is None:
            self._since = now
        if now < self._since + _FINALIZER_S:
            return True
        self._since = None
        return False


finalizers = Finalizers()
"""Of the main thread."""


def _in_finalizer(frame: FrameType | None) -> bool:
    for _ in range(_DEEP):
        if frame is None:
            return False
        if frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


def new_interrupt() -> KeyboardInterrupt:
    """Return an interrupt for this thread to raise."""
    error = raised[threading.get_ident()] = KeyboardInterrupt()
    return error


class Interrupt(KeyboardInterrupt):
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
Interrupt.__name__ = Interrupt.__qualname__ = "KeyboardInterrupt"
Interrupt.__module__ = "builtins"


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
                raise_in(self.ident, Interrupt)
            return True
