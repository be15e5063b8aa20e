"""Work in a thread that a Stop does not end: it ends only the wait for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from monarch._kernel_api import Promise, current_node, in_thread
from monarch.exceptions import MonarchError

T = TypeVar("T")


class NotBegun(KeyboardInterrupt):
    """The wait was interrupted before the work had begun, which now never begins."""


def unstopped(what: str, work: Callable[[], T], result: Promise[T]) -> T:
    """Do some work in a thread, and return its result.

    Args:
        what: the work as a noun, such as ``restart of a``.
        work: run in the thread.
        result: completed by it.

    Raises:
        NotBegun: the wait was interrupted, and the work prevented.
        KeyboardInterrupt: the wait was interrupted; the work goes on, and completes the result.
    """
    begun = threading.Lock()

    def begin() -> T:
        if not begun.acquire(blocking=False):
            raise MonarchError(f"the {what} was interrupted before it began")
        return work()

    try:
        return in_thread(current_node(), what, begin, result).get()
    except KeyboardInterrupt:
        if begun.acquire(blocking=False):
            raise NotBegun(f"the {what} was interrupted before it began") from None
        raise
