"""The one runtime of this process: that of a rank, or that of a program, which is made when it is first needed."""

from __future__ import annotations

import threading
from collections.abc import Callable

from monarch._actors.runtime import Runtime

_lock = threading.RLock()
_runtime: Runtime | None = None
_start: Callable[[], Runtime] | None = None


def get_runtime() -> Runtime:
    """The runtime of this process."""
    runtime = _runtime
    if runtime is None or runtime.closed:
        with _lock:
            if _runtime is None or _runtime.closed:
                assert _start is not None
                set_runtime(_start())
            assert _runtime is not None
            return _runtime
    return runtime


def has_runtime() -> bool:
    """Whether there is one already."""
    return _runtime is not None and not _runtime.closed


def set_runtime(runtime: Runtime | None) -> None:
    """Makes it the one of this process."""
    global _runtime
    _runtime = runtime


def set_starter(start: Callable[[], Runtime]) -> None:
    """Says how a program's runtime is made."""
    global _start
    _start = start
