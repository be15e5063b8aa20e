"""Helper threads of a rank, for communication or copies: they may run on any core, while its own code has a share.

A rank's code is bound to its share of the cores, which may be one. Threads that its libraries start inherit that, and
then compete with it for this core while others idle: two ranks on two cores made half as many training steps.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator
from typing import Any, TypeVar

from monarch._python.threads import new_thread

R = TypeVar("R")

_cores: set[int] | None = None


def let_helpers_use(cores: set[int]) -> None:
    """Set the cores for helper threads of this process; by default, those of its code."""
    global _cores
    _cores = set(cores)


def helper_cores() -> int:
    """Return the number of cores for helper threads."""
    return len(_cores or os.sched_getaffinity(0))


def be_helper() -> None:
    """Make the calling thread a helper from now on, and the threads that it starts."""
    if _cores:
        # Cores may be removed while a process runs.
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, _cores)


@contextlib.contextmanager
def as_helper() -> Generator[None]:
    """Make it a helper for a while, and threads that are started meanwhile."""
    before = os.sched_getaffinity(0)
    be_helper()
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, before)


def in_helper(work: Callable[[], R]) -> R:
    """Call a function in a helper thread; return or raise its outcome."""
    if not _cores or _cores == os.sched_getaffinity(0):
        return work()
    outcome: list[Any] = []

    def run() -> None:
        be_helper()
        try:
            outcome.extend((work(), None))
        except BaseException as error:
            outcome.extend((None, error))

    helper = new_thread("monarch-helper", run)
    helper.start()
    helper.join()
    value, error = outcome
    if error is not None:
        raise error
    return value
