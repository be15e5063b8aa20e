"""What a rank's main thread is doing: asked while a cell runs."""

from __future__ import annotations

import signal
import sys
import threading
import time
from typing import NamedTuple

from monarch._actors import interrupts
from monarch._actors.functions import service
from monarch._actors.process import get_runtime

_MOMENT = 0.1
"""Seconds that Python code may take for one step; what takes longer is a C call."""


class Doing(NamedTuple):
    """What the main thread of a rank does."""

    where: str
    """File, line and function of the innermost Python frame."""
    line: int
    """Line of the cell, 0 if none of its frames is of a cell."""
    moves: bool
    """Whether Python code goes on; if not, it is inside a C call."""


@service("threaded")
def doing(name: str) -> Doing:
    """Looks at the main thread, from another one.

    Args:
        name: what the cell's frames call their file.
    """
    main = threading.main_thread().ident or 0
    before = interrupts.noticed
    signal.pthread_kill(main, interrupts.NOTICE)
    until = time.monotonic() + _MOMENT
    while interrupts.noticed == before and time.monotonic() < until:
        time.sleep(0.002)
    return _look(main, name, interrupts.noticed != before)


@service("threaded")
def doing_in_actor(name: str, key: str) -> Doing:
    """Looks at the thread of an actor, from another one.

    Args:
        name: what the cell's frames call their file.
        key: of the actor's mesh.
    """
    cell = get_runtime().actors.get(key)
    thread = cell.executor.interrupts if cell is not None else None
    if thread is None:
        return doing(name)
    # An interrupt comes between two steps of Python code, so inside a C call it is still to come.
    until = time.monotonic() + _MOMENT
    while thread.pending and time.monotonic() < until:
        time.sleep(0.002)
    return _look(thread.ident, name, not thread.pending)


def _look(thread: int, name: str, moves: bool) -> Doing:
    frame = sys._current_frames().get(thread)
    line, where = 0, ""
    while frame is not None:
        if not where:
            where = f"{frame.f_code.co_filename}:{frame.f_lineno}, in {frame.f_code.co_name}"
        if frame.f_code.co_filename == name:
            line = frame.f_lineno
            break
        frame = frame.f_back
    return Doing(where, line, moves)
