"""Children that code of the user forks from a process of ours: they are no ranks, and end where that code does."""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import suppress

_child = False
"""Whether this process was forked from one of ours by code of the user. Set before any other thread can run."""


def watch_forks(*handled: int) -> None:
    """From now on, a fork of this process knows that it is one.

    Args:
        handled: signals that this process handles in its own way; a fork does what is usual.
    """
    os.register_at_fork(after_in_child=lambda: _begin(handled))


def _begin(handled: tuple[int, ...]) -> None:
    global _child
    _child = True
    if threading.current_thread() is threading.main_thread():
        # A handler of ours would raise in the child; and a program that it starts would ignore what it ignores.
        for number in handled:
            signal.signal(number, signal.SIG_DFL)


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
