"""Threads that help a rank, with communication or copies: they may run on any core, where its own code has a share.

A rank's code is bound to its share of the cores, which may be one. Threads that its libraries start inherit that, and
then take turns with it on this core while others idle: two ranks on two cores made half as many training steps.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

R = TypeVar("R")

_cores: set[int] | None = None


def let_helpers_use(cores: set[int]) -> None:
    """Says on which cores helping threads of this process may run; without this, where its code may."""
    global _cores
    _cores = set(cores)


def helper_cores() -> int:
    """On how many cores helping threads may run."""
    return len(_cores or os.sched_getaffinity(0))


def be_helper() -> None:
    """The thread that calls this is a helping one from now on, and so are those that it starts."""
    if _cores:
        # Cores may be taken away while a process runs.
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, _cores)


@contextlib.contextmanager
def as_helper() -> Iterator[None]:
    """The same for a while, and for threads that are started meanwhile."""
    before = os.sched_getaffinity(0)
    be_helper()
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, before)


def in_helper(work: Callable[[], R]) -> R:
    """What a function returns, or raises, that runs in a helping thread."""
    if not _cores or _cores == os.sched_getaffinity(0):
        return work()
    found: list[Any] = []

    def run() -> None:
        be_helper()
        try:
            found.extend((work(), None))
        except BaseException as error:
            found.extend((None, error))

    helper = threading.Thread(target=run, name="monarch-helper", daemon=True)
    helper.start()
    helper.join()
    value, error = found
    if error is not None:
        raise error
    return value
