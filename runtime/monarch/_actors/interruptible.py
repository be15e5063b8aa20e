"""A ``time.sleep`` in which an interrupt of an actor's thread arrives.

Python raises an interrupt in a thread other than the main one between two lines of Python, so never in the middle of
``time.sleep(60)``. In ranks, the threads of actors sleep in short steps.
"""

from __future__ import annotations

import time
from threading import get_ident

_STEP = 0.05
"""Seconds of a step."""
_sleep = time.sleep
_threads: set[int] = set()
"""Those of actors. Single operations, each by its own thread."""


def begin() -> None:
    """Sleep in steps in this thread from now on."""
    _threads.add(get_ident())


def end() -> None:
    """Do not sleep in steps in this thread any longer."""
    _threads.discard(get_ident())


def install() -> None:
    """Take the place of ``time.sleep`` in this process."""
    time.sleep = sleep


def sleep(seconds: float, /) -> None:
    """Sleep for some seconds."""
    if get_ident() not in _threads or not seconds > _STEP:
        _sleep(seconds)
        return
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        _sleep(min(left, _STEP))


# So that it is pickled by the name that programs call it by.
sleep.__module__ = "time"
