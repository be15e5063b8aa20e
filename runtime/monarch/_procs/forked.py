"""Children that code of the user forks from a process of ours: they are no ranks, and end where that code does."""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import suppress

_child = False
"""Whether this process was forked from one of ours by code of the user. Set before any other thread can run."""


def watch_forks(*ignored: int) -> None:
    """From now on, a fork of this process knows that it is one, and has the usual handlers of signals.

    Args:
        ignored: signals besides SIGINT that this process handles for itself, which a fork ignores.
    """
    os.register_at_fork(after_in_child=lambda: _begin(ignored))


def _begin(ignored: tuple[int, ...]) -> None:
    global _child
    _child = True
    if threading.current_thread() is threading.main_thread():
        # A handler of ours would raise in the child, and a program that it starts would ignore what it ignores.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)


def leave_if_forked(error: BaseException | None = None) -> None:
    """Ends this process if it is such a child, since its parent goes on with what comes now.

    Args:
        error: what the code of the user has raised; its traceback is written by the parent, if that raises it too.
    """
    if not _child:
        return
    code = 0 if error is None else 1
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(code & 0xFF)
