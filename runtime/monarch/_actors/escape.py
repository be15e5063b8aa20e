"""Interrupts that get out of code that swallows them: one in its body, and another where that one was caught.

A signal that sends itself again runs its handler wherever Python looks for signals: at calls and jumps. The handler
raises in frames of user code only, so that it cuts off no context manager of a library.
"""

from __future__ import annotations

import os
import sys
import threading
from time import monotonic
from types import CodeType, FrameType

from monarch._actors import interrupts
from monarch._actors.cleanup import CleanupRegion, is_in, of_interrupt, region_of
from monarch._actors.letting_go import letting_go
from monarch._node.remote_errors import is_ours

_LASTS = 0.6
"""Seconds: afterwards the rank is replaced."""
_LIBRARY = os.path.dirname(os.__file__) + os.sep


class Escape:
    """An attempt to get a running call of the main thread out of blocks that swallow interrupts."""

    def __init__(self, region: CleanupRegion) -> None:
        self._until = monotonic() + _LASTS
        # Main thread only.
        self._regions = [region]
        self._caught_by: list[CleanupRegion] = []
        """Blocks that may catch the last interrupt of a body."""
        self._tried: set[tuple[CodeType, int]] = set()
        """Instructions where an interrupt was raised for those."""

    @property
    def over(self) -> bool:
        """Whether its time is up, or the call has ended."""
        return monotonic() > self._until or threading.get_ident() not in interrupts.raised

    def must_interrupt(self, frame: FrameType) -> bool:
        """Return whether to raise an interrupt in a frame: in a body, or where a block has caught that one."""
        outside = [region for region in self._caught_by if not is_in(frame, region)]
        if outside and not self._is_new(frame):
            return False
        if outside:
            self._caught_by = [region for region in self._caught_by if region not in outside]
            return True
        if of_interrupt(sys.exc_info()[1]):
            return False
        region = region_of(interrupts.raised.get(threading.get_ident()))
        # An outer block may have swallowed the interrupt that left an inner one.
        if region is not None and region not in self._regions:
            self._regions.append(region)
        if not any(is_in(frame, region) for region in self._regions):
            return False
        self._caught_by = list(self._regions)
        return True

    def _is_new(self, frame: FrameType) -> bool:
        """Return whether to raise here, every other time: Python 3.12 may count a jump to the body."""
        place = frame.f_code, frame.f_lasti
        self._tried ^= {place}
        return place in self._tried


_wanted: list[Escape] = []
"""The last one asked for; set by the thread of a service, read by the main thread, in atomic steps."""


def ask_escape(region: CleanupRegion) -> None:
    """Get the main thread's call out of a block that has swallowed an interrupt, if its Python code runs soon."""
    _wanted[:] = [Escape(region)]
    interrupts.prod()


def _look(frame: FrameType | None) -> tuple[bool, BaseException | None]:
    """Return whether the signal is to come again, and what its handler is to raise."""
    escape = _wanted[-1] if _wanted else None
    if escape is None or escape.over:
        _wanted.clear()
        return False, None
    if frame is None or not _is_of_user(frame) or not escape.must_interrupt(frame):
        return True, None
    return True, interrupts.new_interrupt()


def _is_of_user(frame: FrameType) -> bool:
    name = frame.f_code.co_filename
    return not (name.startswith((_LIBRARY, "<frozen")) or "site-packages" in name or is_ours(name))


interrupts.on_notice.append(_look)


def forget_interrupt() -> None:
    """Note the end of a call that was interrupted; the interrupt holds its frames."""
    with letting_go():
        interrupts.raised.pop(threading.get_ident(), None)
