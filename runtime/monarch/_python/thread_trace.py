"""Having another thread of this process call a function, or raise, at its next step of Python."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from threading import RLock, get_ident
from types import FrameType
from typing import Any

from monarch._python.frames import caller

Called = Callable[[FrameType], object]
_pending: dict[int, Called] = {}
"""By thread, what it is to call. Set by any thread, taken by that one, in single operations."""
_lock = RLock()
"""Held for a few steps, while other threads are asked to do something: so they cannot end meanwhile."""
_states: dict[int, int] = {}
"""By thread that is traceable, the address of Python's state of it. Changed and used with the lock."""


class Traceable:
    """A thread that other threads can have call a function; made by that thread, for as long as it lives."""

    def __init__(self) -> None:
        self.ident = get_ident()
        self._state = _own_state()
        with _lock:
            _states[self.ident] = self._state

    def end(self) -> None:
        """Note that the thread ends."""
        with _lock:
            _states.pop(self.ident, None)
        self.withdraw()

    def call_soon(self, function: Called) -> bool:
        """Have the thread call a function with its innermost frame, when it next enters, leaves or steps in a function.

        A call that is still pending is replaced. Before Python 3.12, so is a debugger that traces the thread.

        Args:
            function: called once. It may set a trace function. It must not raise.

        Returns:
            False if this Python offers no way.
        """
        _pending[self.ident] = function
        if not may_trace():
            self.withdraw()
            return False
        begun = _trace(self._state) if _monitoring is None else _monitor()
        if not begun:
            self.withdraw()
        return begun

    def withdraw(self) -> None:
        """Do not have the thread call anything."""
        _pending.pop(self.ident, None)


# From Python 3.12 on: events of all threads, as long as a call is pending.

_monitoring: Any = getattr(sys, "monitoring", None)
_TOOL = 4
"""One of the numbers that Python leaves to tools without one of their own."""


def _monitor() -> bool:
    events = _monitoring.events
    if _monitoring.get_tool(_TOOL) is None:
        _monitoring.use_tool_id(_TOOL, "monarch")
        for each in (events.LINE, events.PY_START, events.PY_RETURN):
            _monitoring.register_callback(_TOOL, each, _on_event)
    elif _monitoring.get_tool(_TOOL) != "monarch":
        return False
    _monitoring.set_events(_TOOL, events.LINE | events.PY_START | events.PY_RETURN)
    return True


def _on_event(*_: Any) -> None:
    function = _pending.pop(get_ident(), None)
    if not _pending:
        _monitoring.set_events(_TOOL, 0)
    if function is not None:
        function(caller())


# Before: the trace function of the other thread, which only C code can set.

_Trace = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)


def _own_state() -> int:
    """Return the address of Python's state of this thread."""
    get: Any = ctypes.PyDLL(None).PyThreadState_Get
    get.restype = ctypes.c_void_p
    return get()


def _trace(state: int) -> bool:
    set_trace: Any = ctypes.PyDLL(None)._PyEval_SetTrace
    set_trace.argtypes = [ctypes.c_void_p, _Trace, ctypes.py_object]
    return set_trace(state, _on_trace, None) == 0


@_Trace
def _on_trace(*_: Any) -> int:
    sys.settrace(None)
    function = _pending.pop(get_ident(), None)
    if function is not None:
        function(caller())
    return 0


# Raising in another thread. In Python 3.11, a thread that is traced runs in place, at the beginning of a function, as
# long as another thread has not raised what it is to raise; so none is traced meanwhile.

_raise_in: Any = ctypes.pythonapi.PyThreadState_SetAsyncExc
_raise_in.argtypes = [ctypes.c_ulong, ctypes.py_object]
_SPINS = sys.version_info[:2] == (3, 11)
_raising: set[int] = set()
"""The threads that have not raised theirs. Changed by any thread, in single operations."""


def raise_in(ident: int, error: type[BaseException]) -> None:
    """Have a thread raise an error when it next runs Python; it calls ``has_raised`` then."""
    if _SPINS:
        _raising.add(ident)
        _trace_nothing()
    _raise_in(ident, error)


class _Nothing(BaseException):
    """Raised in a thread by itself, and caught there."""


def raise_nothing() -> None:
    """Drop the exception that this thread has not raised yet."""
    try:
        # It takes the place of what is still to come, and comes at once. If that were only taken back, all threads
        # would look for it forever, and traced ones on Python 3.11 would not continue.
        _raise_in(get_ident(), _Nothing)
        while True:
            pass
    except _Nothing:
        _raising.discard(get_ident())


def has_raised() -> None:
    """Note that this thread raises its pending exception."""
    _raising.discard(get_ident())


def may_trace() -> bool:
    """Return whether tracing of a thread may begin: not in Python 3.11 while another one has an exception to raise."""
    if _raising:
        # Without those that have ended.
        _raising.intersection_update(sys._current_frames())  # pyright: ignore[reportPrivateUsage]
    return not _raising


def _trace_nothing() -> None:
    """End the tracing of threads that are traceable. Breakpoints are set again at the beginnings of calls."""
    set_trace: Any = ctypes.PyDLL(None)._PyEval_SetTrace
    set_trace.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    with _lock:
        for state in _states.values():
            set_trace(state, None, None)
