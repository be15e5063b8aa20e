"""Socket options that are read or set for each message: without pyzmq's checks, which cost more than the call."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import zmq


def _functions() -> tuple[Callable[..., int], Callable[..., int]]:
    """Return what reads and sets an option in libzmq; functions that fail where pyzmq has no such library."""
    try:
        from zmq.backend.cython import _zmq  # pyright: ignore[reportPrivateUsage]

        # They take less than a microsecond, so they keep the GIL.
        library = ctypes.PyDLL(_zmq.__file__)
        read, write = library.zmq_getsockopt, library.zmq_setsockopt
    except (ImportError, OSError, AttributeError):
        return (lambda *_: -1), (lambda *_: -1)
    read.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
    write.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t]
    return read, write


_get, _set = _functions()
_EVENTS, _RCVTIMEO = int(zmq.EVENTS), int(zmq.RCVTIMEO)
_SIZE = ctypes.sizeof(ctypes.c_int)


class QuickOptions:
    """Two options of one socket, for the thread that uses it, as long as it is open.

    Args:
        socket: its caller keeps it alive.
    """

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._handle = int(socket.underlying)
        self._value, self._length = ctypes.c_int(), ctypes.c_size_t(_SIZE)
        self._at, self._length_at = ctypes.addressof(self._value), ctypes.addressof(self._length)

    def has_no_events(self) -> bool:
        """Return whether there is nothing to receive."""
        if _get(self._handle, _EVENTS, self._at, self._length_at):
            # This reports the problem.
            return not self._socket.get(zmq.EVENTS)
        return not self._value.value

    def set_receive_timeout(self, milliseconds: int) -> None:
        """Make the next receive end after so long; -1 for never."""
        self._value.value = milliseconds
        if _set(self._handle, _RCVTIMEO, self._at, _SIZE):
            self._socket.set(zmq.RCVTIMEO, milliseconds)
