"""The frames of a rank that are of interest to a person, and what to show of them."""

from __future__ import annotations

import linecache
from collections.abc import Iterator
from types import FrameType

from monarch._core.places import is_ours, is_users
from monarch._core.position import Frame

_MOST = 100
"""Frames that are shown."""
_LONGEST = 160
"""Characters that are shown of a line."""


def users_frames(frame: FrameType | None) -> list[FrameType]:
    """Return the frames of a stack from the innermost one of the user's code outward, without those of this package.

    Frames of libraries that the user's code has called are left out, and those that call user code are kept.
    """
    frames = list(_outward(frame))
    first = next((at for at, each in enumerate(frames) if is_users(each)), len(frames))
    last = next((at for at in range(len(frames) - 1, -1, -1) if is_users(frames[at])), -1)
    return [each for each in frames[first : last + 1] if not is_ours(each)]


def described(frame: FrameType, line: int = 0) -> Frame:
    """Return what to show of a frame, in its current line or another one."""
    code, line = frame.f_code, line or frame.f_lineno
    text = " ".join(linecache.getline(code.co_filename, line, frame.f_globals).split())
    return Frame(code.co_filename, line, code.co_name, text[:_LONGEST])


def _outward(frame: FrameType | None) -> Iterator[FrameType]:
    for _ in range(_MOST):
        if frame is None:
            return
        yield frame
        frame = frame.f_back
