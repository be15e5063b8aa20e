"""Work in a pool of ``concurrent.futures``, and the thread that runs it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from types import FrameType
from typing import Any

from monarch._core.kinds import is_a, is_list, is_set
from monarch._debug.why.holders import line_of
from monarch._python.frames import frame_of, outward

_DEPTH = 200
_LONGEST_CHAIN = 4


def of_future(values: Mapping[str, Any]) -> str:
    """Return the work that a thread waits for, and where it is.

    Args:
        values: the variables of a function of ``concurrent.futures`` that waits.
    """
    future = next(_awaited(values), None)
    parts: list[str] = []
    while future is not None and len(parts) < _LONGEST_CHAIN:
        running = _thread_of(future)
        if running is None:
            parts.append("a pool task that has not started" if not future.running() else "a pool task")
            break
        thread, frame = running
        at = line_of(frame)
        parts.append(f"a pool task in thread {thread.name!r}{f' at {at}' if at else ''}")
        future = _waited_by(frame)
    return ", which waits for ".join(parts) or "a pool task"


def _awaited(values: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the futures that have not ended, those that run first."""
    several = values.get("pending", values.get("fs"))
    futures: list[Any] = [values.get("self"), *(several if is_list(several) or is_set(several) else ())]
    left = [each for each in futures if is_a(each, Future) and not each.done()]
    yield from sorted(left, key=lambda each: not each.running())


def _thread_of(future: Any) -> tuple[threading.Thread, FrameType] | None:
    """Return the thread of a pool that runs the work of a future, and its innermost frame."""
    for thread in threading.enumerate():
        frame = frame_of(thread.ident) if thread.ident is not None else None
        for each in outward(frame, _DEPTH):
            if each.f_code.co_name == "run" and each.f_code.co_filename.endswith("concurrent/futures/thread.py"):
                if frame is not None and getattr(each.f_locals.get("self"), "future", None) is future:
                    return thread, frame
                break
    return None


def _waited_by(frame: FrameType) -> Any:
    """Return the future that a thread waits for; None if it waits for none."""
    for each in outward(frame, _DEPTH):
        if each.f_code.co_name == "result" and each.f_code.co_filename.endswith("concurrent/futures/_base.py"):
            return each.f_locals.get("self")
        if each.f_code.co_filename.endswith("concurrent/futures/thread.py"):
            break
    return None
