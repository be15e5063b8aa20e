"""Options of a socket that are read or set for each message: without pyzmq's checks, which cost more than the call."""

from __future__ import annotations

import ctypes

import zmq
from zmq.backend.cython import _zmq

# They take less than a microsecond, so they keep the GIL.
_library = ctypes.PyDLL(_zmq.__file__)
_get, _set = _library.zmq_getsockopt, _library.zmq_setsockopt
_get.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
_set.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t]
_EVENTS, _RCVTIMEO = int(zmq.EVENTS), int(zmq.RCVTIMEO)
_SIZE = ctypes.sizeof(ctypes.c_int)


class QuickOptions:
    """Two options of one socket, for the thread that uses it, as long as it is open.

    Args:
        socket: stays the owner of what is used here.
    """

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._handle = int(socket.underlying)
        self._value, self._length = ctypes.c_int(), ctypes.c_size_t(_SIZE)
        self._at, self._length_at = ctypes.addressof(self._value), ctypes.addressof(self._length)

    def has_events(self) -> bool:
        """Whether there is something to receive."""
        if _get(self._handle, _EVENTS, self._at, self._length_at):
            # It says what is wrong.
            return bool(self._socket.get(zmq.EVENTS))
        return bool(self._value.value)

    def set_receive_timeout(self, milliseconds: int) -> None:
        """Have the next receive end after so long; -1 for never."""
        self._value.value = milliseconds
        if _set(self._handle, _RCVTIMEO, self._at, _SIZE):
            self._socket.set(zmq.RCVTIMEO, milliseconds)
