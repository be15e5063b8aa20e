"""Socket options that are read or set for each message: without pyzmq's checks, which cost more than the call."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any

import zmq
from zmq.backend import zmq_poll


def pending_in(socket: zmq.Socket[bytes]) -> Callable[[], list[tuple[Any, int]]]:
    """Return a function that returns an empty list if there is nothing to receive; for the thread that uses the socket.

    It is not a Python function: at each message to an idle process its code is cold, and others take up to twice as
    long.
    """
    return partial(zmq_poll, [(socket, int(zmq.POLLIN))], 0)


def _function() -> Callable[..., int]:
    """Return what sets an option in libzmq; a function that fails where pyzmq has no such library."""
    try:
        from zmq.backend.cython import _zmq  # pyright: ignore[reportPrivateUsage]

        # It takes less than a microsecond, so it keeps the GIL.
        write = ctypes.PyDLL(_zmq.__file__).zmq_setsockopt
    except (ImportError, OSError, AttributeError):
        return lambda *_: -1
    write.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t]
    return write


_set = _function()
_RCVTIMEO = int(zmq.RCVTIMEO)
_SIZE = ctypes.sizeof(ctypes.c_int)


class TimeLimit:
    """The timeout of receiving from one socket, for the thread that uses it, as long as it is open.

    Args:
        socket: its caller keeps it alive.
    """

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._handle = int(socket.underlying)
        self._value = ctypes.c_int()
        self._at = ctypes.addressof(self._value)

    def set(self, milliseconds: int) -> None:
        """Make the next receive end after so long; -1 for never."""
        self._value.value = milliseconds
        if _set(self._handle, _RCVTIMEO, self._at, _SIZE):
            # This reports the problem.
            self._socket.set(zmq.RCVTIMEO, milliseconds)
