"""The frame of a thread of this process, and the exception that it handles."""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any, cast


def frame_of(ident: int) -> FrameType | None:
    """Return the innermost Python frame of a thread; None if the thread has ended."""
    return sys._current_frames().get(ident)  # pyright: ignore[reportPrivateUsage]


_BETWEEN = ("JUMP", "POP_JUMP", "RESUME")
"""Beginnings of the names of instructions that call nothing, at which Python switches threads."""


def is_between_calls(frame: FrameType) -> bool:
    """Return whether the innermost frame of another thread runs bytecode, and so waits for nothing but the GIL."""
    code, at = frame.f_code.co_code, frame.f_lasti
    return 0 <= at < len(code) and dis.opname[code[at]].startswith(_BETWEEN)


def outward(frame: FrameType | None, most: int) -> Iterator[FrameType]:
    """Yield a frame and its callers, innermost first.

    Args:
        frame: the innermost one.
        most: yield no more than these, since a stack may be deep.
    """
    for _ in range(most):
        if frame is None:
            return
        yield frame
        frame = frame.f_back


_HANDLING = 200
"""Nested calls that the handling of a message may take, with those of the finalizers that run in it."""


def has_room(calls: int = _HANDLING) -> bool:
    """Return whether the stack of this thread has room for some nested calls.

    Args:
        calls: how many; not looked at while less than a third of the limit of recursion is used, since that is usual.
    """
    try:
        sys._getframe(sys.getrecursionlimit() // 3)  # pyright: ignore[reportPrivateUsage]
    except ValueError:
        return True
    try:
        _descend(calls)
    except RecursionError:
        return False
    return True


def _descend(calls: int) -> None:
    if calls:
        _descend(calls - 1)


def handled_by(ident: int) -> BaseException | None:
    """Return the exception that a thread handles in an ``except`` or ``finally`` clause; None if it handles none."""
    found: Any = sys._current_exceptions().get(ident)  # pyright: ignore[reportPrivateUsage]
    # A tuple before Python 3.12.
    return cast("Any", found)[1] if isinstance(found, tuple) else found


def caller(depth: int = 1) -> FrameType:
    """Return the frame of the function that called the caller of this, or one further out."""
    return sys._getframe(depth + 1)  # pyright: ignore[reportPrivateUsage]
