"""A one-shot alarm that a thread sleeps on: the kernel's timer wakes it, so to set it wakes nobody."""

from __future__ import annotations

import ctypes
import os
import time


class _Spec(ctypes.Structure):
    _fields_ = (
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("value_s", ctypes.c_long),
        ("value_ns", ctypes.c_long),
    )


# The call takes less than a microsecond, so it keeps the GIL: to let go of it would cost more.
_set = ctypes.PyDLL(None).timerfd_settime
_set.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
_create = ctypes.CDLL(None, use_errno=True).timerfd_create
_NEVER = _Spec(0, 0, 0, 0)
_NEVER_AT = ctypes.addressof(_NEVER)


class Alarm:
    """An alarm on a timerfd; one thread waits for it.

    Raises:
        OSError: the process has no file descriptor left.
    """

    def __init__(self) -> None:
        self._fd: int = _create(time.CLOCK_MONOTONIC, os.O_CLOEXEC)
        if self._fd < 0:
            number = ctypes.get_errno()
            raise OSError(number, f"cannot make a timer: {os.strerror(number)}")
        self._seconds = 0.0
        self._spec = _Spec(0, 0, 0, 1)
        self._address = ctypes.addressof(self._spec)

    def set(self, seconds: float) -> None:
        """Have it ring in some seconds, and not when it was to ring before. The caller sees to one call at a time."""
        if seconds != self._seconds:
            self._seconds = seconds
            self._spec.value_s, self._spec.value_ns = divmod(max(1, int(seconds * 1e9)), 1_000_000_000)
        _set(self._fd, 0, self._address, None)

    def clear(self) -> None:
        """Have it not ring."""
        _set(self._fd, 0, _NEVER_AT, None)

    def wait(self) -> None:
        """Sleep until it rings."""
        os.read(self._fd, 8)

    def close(self) -> None:
        """Free its descriptor; only when no thread waits for it or sets it any more."""
        os.close(self._fd)
