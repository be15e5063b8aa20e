"""Telling on stderr without waiting: that may be an object of the user's, or its lock be held by code that prints."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from queue import Empty, SimpleQueue

_LINGER = 0.5
"""Seconds for which the thread waits for more."""
# Its steps are of C, so that a __del__ in the middle of them may add to it.
_queue: SimpleQueue[Callable[[], None]] = SimpleQueue()
_lock = threading.RLock()
# Under _lock: whether there is a thread, and how much it has not told yet.
_running = False
_pending = 0


def tell(text: str) -> None:
    """Print a text on stderr soon; from any thread, also the receiving one."""
    _put(lambda: print(text, file=sys.stderr, flush=True))


def tell_error(error: BaseException) -> None:
    """Print an error with its traceback, which may run code of the user; likewise."""
    _put(lambda: traceback.print_exception(error))


def flush(patience: float) -> None:
    """Wait some seconds at most until all is told; not in the receiving thread."""
    deadline = time.monotonic() + patience
    while _pending and time.monotonic() < deadline:
        time.sleep(0.005)


def _put(action: Callable[[], None]) -> None:
    global _running, _pending
    _queue.put(action)
    with _lock:
        _pending += 1
        starts, _running = not _running, True
    if starts:
        try:
            threading.Thread(target=_run, name="monarch-tells", daemon=True).start()
        except RuntimeError:
            # The system starts no thread; the next one that tells tries again.
            _running = False


def _run() -> None:
    global _running, _pending
    while True:
        try:
            action = _queue.get(timeout=_LINGER)
        except Empty:
            with _lock:
                if _queue.empty():
                    _running = False
                    return
            continue
        try:
            action()
        except Exception:
            # Nobody can be told that nothing can be told: stderr is closed, or broken.
            pass
        del action
        with _lock:
            _pending -= 1


def _renew() -> None:
    global _queue, _lock, _running, _pending
    # A fork has no thread but its own, and what its parent had to tell is the parent's.
    _queue, _lock, _running, _pending = SimpleQueue(), threading.RLock(), False, 0


os.register_at_fork(after_in_child=_renew)
