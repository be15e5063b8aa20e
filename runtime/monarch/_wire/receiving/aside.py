"""Printing to stderr without waiting: stderr may be a user's object, or its lock may be held by printing code."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from queue import Empty, SimpleQueue

from monarch._core.text.seldom import Seldom
from monarch._python.threads import spawn_thread

_LINGER = 0.5
"""Seconds for which the thread waits for more."""
_QUIET = 0.1
"""Seconds without another text after which it is told how often the last one came."""
# Its steps are in C, so that a __del__ in the middle of them may add to it.
_queue: SimpleQueue[str | Callable[[], None]] = SimpleQueue()
_lock = threading.RLock()
_recurring = Seldom()
"""Counts of the errors of work that is done again and again."""
# Under _lock: whether there is a thread, and how much is not printed yet.
_running = False
_pending = 0


def tell(text: str) -> None:
    """Print a text to stderr soon; from any thread, also the receiving one. Equal texts in a row are counted."""
    _put(text)


def tell_error(error: BaseException) -> None:
    """Print an error with its traceback soon, which may run user code; from any thread."""
    _put(lambda: traceback.print_exception(error))


def tell_recurring(error: BaseException) -> None:
    """Print an error of work that is done again and again: its traceback once, then a line at the tenth, the hundredth.

    Errors are equal if they have the same class and were raised at the same line. Any thread may call it.
    """
    kind, last = type(error), error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    where = f"{os.path.basename(last.tb_frame.f_code.co_filename)}:{last.tb_lineno}" if last is not None else ""
    count = _recurring.count(f"{kind.__module__}.{kind.__qualname__} {where}")
    if count == 1:
        tell_error(error)
    elif count:
        tell(f"monarch: internal error in process {os.getpid()}: {kind.__name__} ({where}) {count:,} times so far")


def flush(patience: float) -> None:
    """Wait a limited time until all is printed; not in the receiving thread."""
    deadline = time.monotonic() + patience
    while _pending and time.monotonic() < deadline:
        time.sleep(0.005)


def _put(item: str | Callable[[], None]) -> None:
    global _running, _pending
    _queue.put(item)
    with _lock:
        _pending += 1
        starts, _running = not _running, True
    if starts:
        try:
            spawn_thread("monarch-tells", _run)
        except Exception:
            # The system starts no thread, or user code has replaced what starts one; the next call retries.
            _running = False


def _run() -> None:
    global _running
    last, repeats = "", 0
    while True:
        try:
            item = _queue.get(timeout=_QUIET if repeats else _LINGER)
        except Empty:
            if repeats:
                _print_repeats(last, repeats)
                repeats = 0
                continue
            with _lock:
                if _queue.empty():
                    _running = False
                    return
            continue
        if item == last:
            repeats += 1
            if repeats > 1:
                # The first one is pending until their number is printed.
                _handled()
            continue
        if repeats:
            _print_repeats(last, repeats)
        last, repeats = item if isinstance(item, str) else "", 0
        _print(item)
        del item
        _handled()


def _print_repeats(text: str, count: int) -> None:
    _print(text if count == 1 else f"{text.splitlines()[0]} ({count:,} more times)")
    _handled()


def _print(item: str | Callable[[], None]) -> None:
    try:
        if isinstance(item, str):
            # In one write, since other threads print too.
            print(f"{item}\n", end="", file=sys.stderr, flush=True)
        else:
            item()
    except Exception:
        # stderr is closed or broken, so this cannot be reported.
        pass


def _handled() -> None:
    global _pending
    with _lock:
        _pending -= 1


def _renew() -> None:
    global _queue, _lock, _recurring, _running, _pending
    # A fork has only its own thread, and its parent prints the pending texts.
    _queue = SimpleQueue()
    _lock, _recurring, _running, _pending = threading.RLock(), Seldom(), False, 0


os.register_at_fork(after_in_child=_renew)
