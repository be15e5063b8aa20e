"""The alarm of the background thread. The kernel wakes it: at a time, or when a message comes that nobody awaits."""

from __future__ import annotations

import ctypes
import math
import os
import select
import time
from collections.abc import Callable
from functools import partial


class _Spec(ctypes.Structure):
    _fields_ = (
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("value_s", ctypes.c_long),
        ("value_ns", ctypes.c_long),
    )


# The call takes less than a microsecond, so it keeps the GIL: releasing it would cost more.
_set = ctypes.PyDLL(None).timerfd_settime
_set.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
_create = ctypes.CDLL(None, use_errno=True).timerfd_create
_ONCE = select.EPOLLIN | select.EPOLLONESHOT


class Alarm:
    """Rings at a set time, and once when a watched descriptor becomes readable.

    One thread waits for it. The others must serialize their calls.

    Args:
        descriptor: the one to watch.

    Raises:
        OSError: the process has no free file descriptor.
    """

    def __init__(self, descriptor: int) -> None:
        self._timer: int = _create(time.CLOCK_MONOTONIC, os.O_CLOEXEC | os.O_NONBLOCK)
        if self._timer < 0:
            number = ctypes.get_errno()
            raise OSError(number, f"cannot create a timer: {os.strerror(number)}")
        self._spec = _Spec()
        self._address = ctypes.addressof(self._spec)
        try:
            self._poll = select.epoll()
        except OSError:
            os.close(self._timer)
            raise
        self._poll.register(self._timer, select.EPOLLIN)
        self._poll.register(descriptor, 0)
        # Each message to an idle process needs both, so they are not Python functions.
        self.watch: Callable[[], None] = partial(self._poll.modify, descriptor, _ONCE)
        """Ring once when the descriptor is readable, immediately if it is."""
        self.unwatch: Callable[[], None] = partial(self._poll.modify, descriptor, 0)
        """Stop watching the descriptor."""

    def set(self, seconds: float) -> None:
        """Ring in some seconds, replacing an earlier time; never if infinite."""
        nanoseconds = max(1, int(seconds * 1e9)) if seconds != math.inf else 0
        self._spec.value_s, self._spec.value_ns = divmod(nanoseconds, 1_000_000_000)
        _set(self._timer, 0, self._address, None)

    def wait(self) -> tuple[bool, bool]:
        """Sleep until it rings; return whether the time had come, and whether the descriptor was readable."""
        timed = watched = False
        for descriptor, _ in self._poll.poll():
            if descriptor == self._timer:
                try:
                    os.read(self._timer, 8)
                    timed = True
                except BlockingIOError:
                    # It was set to another time meanwhile.
                    pass
            else:
                watched = True
        return timed, watched

    def close(self) -> None:
        """Close its descriptors; only when no thread waits for it or sets it any more."""
        self._poll.close()
        os.close(self._timer)
