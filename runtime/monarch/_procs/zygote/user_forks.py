"""Children that user code forks from a process of ours: they are not ranks, and end where that code does."""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from contextlib import suppress

_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(__file__))) + os.sep

is_child = False
"""Whether user code forked this process from one of ours. Set before any other thread can run."""


def watch_forks(*handled: int) -> None:
    """Detect forks of this process from now on.

    Args:
        handled: signals with handlers of ours; a fork resets them to their defaults.
    """
    os.register_at_fork(after_in_child=lambda: _begin(handled))


def _begin(handled: tuple[int, ...]) -> None:
    global is_child
    is_child = True
    if threading.current_thread() is threading.main_thread():
        # Our handler would raise in the child; and a program that it starts would ignore what it ignores.
        for number in handled:
            signal.signal(number, signal.SIG_DFL)


def leave_if_forked(error: BaseException | None = None) -> None:
    """End this process if it is such a child, since its parent continues from here.

    Args:
        error: raised by user code; its traceback is printed, since the parent does not have it.
    """
    if not is_child:
        return
    code = 0 if error is None else 1
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    elif error is not None:
        with suppress(Exception):
            _print(error)
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(code & 0xFF)


def _print(error: BaseException) -> None:
    """Print a traceback on stderr, without the frames of this package that called the user's code."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_PACKAGE):
        trace = trace.tb_next
    traceback.print_exception(type(error), error, trace or error.__traceback__)
