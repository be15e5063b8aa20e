"""Connecting to addresses without reverse DNS lookups.

torch's stores look up the name of each address that they connect to, only to log it. They connect to ``127.0.0.1`` as
``::ffff:127.0.0.1``, which no hosts file names, so each rank sends a DNS query. Without a reachable name server, that
takes 5 to 10 s: on a laptop without a network, in a container, or if 64 ranks ask at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import ipaddress
import threading
from collections.abc import Generator
from pathlib import Path

import torch

_INITIALIZED = 1
"""RES_INIT, one of a resolver's option bits."""
_ERROR = 2
"""torch's log level without warnings."""


class _ResolverState(ctypes.Structure):
    """The beginning of glibc's ``struct __res_state`` (resolv.h); each thread has its own."""

    _fields_ = [
        ("retrans", ctypes.c_int),
        ("retry", ctypes.c_int),
        ("options", ctypes.c_ulong),
        ("server_count", ctypes.c_int),
    ]


@contextlib.contextmanager
def no_name_lookups(address: str) -> Generator[None]:
    """Suppress DNS queries of this thread meanwhile, if the address needs none.

    Args:
        address: the target; a host name has to be looked up, so for it nothing changes.
    """
    state = resolver_state() if _is_numeric(address) and _log_level() is not None else None
    if state is None:
        yield
        return
    server_count, state.server_count = state.server_count, 0
    try:
        with _warnings.off():
            yield
    finally:
        state.server_count = server_count


def resolver_state() -> _ResolverState | None:
    """Return this thread's state of the C library's resolver; None without glibc."""
    library = ctypes.CDLL(None)
    try:
        initialize, state = library.__res_init, library.__res_state
    except AttributeError:
        return None
    state.restype = ctypes.POINTER(_ResolverState)
    found: _ResolverState = state().contents
    # Before its first lookup a thread has no state to change.
    if not found.options & _INITIALIZED and initialize() != 0:
        return None
    return found


def _is_numeric(address: str) -> bool:
    try:
        ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    return True


@functools.cache
def _log_level() -> ctypes.c_int | None:
    """Return the log level variable of torch's C++ code; None if this build does not export it."""
    try:
        library = Path(torch.__file__).parent / "lib" / "libc10.so"
        return ctypes.c_int.in_dll(ctypes.CDLL(str(library)), "FLAGS_caffe2_log_level")
    except (OSError, ValueError):
        return None


class _Warnings:
    """torch's warnings about each failed lookup. They are off while any thread wants them off."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0  # Guarded by _lock.
        self._before = 0  # Guarded by _lock.

    @contextlib.contextmanager
    def off(self) -> Generator[None]:
        level = _log_level()
        assert level is not None
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._before, level.value = level.value, max(level.value, _ERROR)
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._users == 0:
                    level.value = self._before


_warnings = _Warnings()
