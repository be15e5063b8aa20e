"""The one runtime of this process: that of a rank, or that of a program, which is made when it is first needed."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from monarch._actors.runtime import Runtime

_lock = threading.RLock()
_runtime: Runtime | None = None
_start: Callable[[], Runtime] | None = None


def get_runtime() -> Runtime:
    """The runtime of this process."""
    runtime = _runtime
    if runtime is None or _is_over(runtime):
        with _lock:
            if _runtime is None or _is_over(_runtime):
                assert _start is not None
                set_runtime(_start())
            assert _runtime is not None
            return _runtime
    return runtime


def _is_over(runtime: Runtime) -> bool:
    """Whether a program may have another one; a rank that ends does not begin a session in its last moments."""
    return runtime.closed and runtime.config is None


def has_runtime() -> bool:
    """Whether there is one already."""
    return _runtime is not None and not _runtime.closed


def set_runtime(runtime: Runtime | None) -> None:
    """Makes it the one of this process."""
    global _runtime
    _runtime = runtime


def _after_fork() -> None:
    """A fork of this process has no part in its session: neither its sockets nor its threads are there."""
    global _runtime, _lock
    _lock = threading.RLock()
    if _runtime is not None:
        # Kept, so that nothing of it is closed or freed, which would reach into the parent's sockets.
        _left_behind.append(_runtime)
        _runtime = None


_left_behind: list[Runtime] = []
os.register_at_fork(after_in_child=_after_fork)


def set_starter(start: Callable[[], Runtime]) -> None:
    """Says how a program's runtime is made."""
    global _start
    _start = start
