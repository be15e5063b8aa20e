"""The next line of user code in a thread, found by tracing until then."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from monarch._actors.interruptible import sleep
from monarch._core.places import is_users
from monarch._python.thread_trace import may_trace


def at_next_line(
    frame: FrameType | None,
    wanted: Callable[[], bool],
    reached: Callable[[FrameType], object],
    is_own: Callable[[Any], bool] = lambda trace: False,
    may_stop: Callable[[], bool] = lambda: True,
) -> bool:
    """Call a function once, when this thread reaches a line of user code.

    Args:
        frame: the innermost frame of the thread; tracing of the frames outside it continues after they are returned to.
        wanted: tells whether to keep looking; tracing ends when it does not.
        reached: called there with the frame. It may raise, as the line itself may.
        may_stop: tells at a line whether the thread may stop there; otherwise at a later one.
        is_own: tells whether a trace function is the one of breakpoints, which is replaced until then.

    Returns:
        False if the thread is already being traced, by a debugger for one, or cannot be traced now.
    """
    before = sys.gettrace()
    if (before is not None and not is_own(before)) or not may_trace():
        return False
    traced: list[tuple[FrameType, Any]] = []

    def trace(at: FrameType, event: str, _: Any) -> Any:
        here = event in ("line", "return") and _is_place(at) and may_stop()
        if not here and wanted():
            # Of a new function, only lines of user code are of interest.
            return trace if _is_place(at) else None
        sys.settrace(before)
        if all(each is not at for each, _ in traced):
            at.f_trace = None
        for each, its in traced:
            each.f_trace = its
        if here and wanted():
            reached(at)
        return None

    while frame is not None:
        if _is_place(frame):
            traced.append((frame, frame.f_trace))
            frame.f_trace = trace
        frame = frame.f_back
    sys.settrace(trace)
    return True


def _is_place(frame: FrameType) -> bool:
    """Return whether user code runs here, or sleeps: that may take long, and holds no lock of this package."""
    return is_users(frame) or frame.f_code is sleep.__code__
