"""Calls that failed or were stopped: whether this thread lets go of the objects in their frames."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager

from monarch._actors import interrupts


class _Thread(threading.local):
    lets_go = False


_thread = _Thread()


@contextmanager
def letting_go() -> Generator[None]:
    """Note that the block drops the last references to these frames."""
    before, _thread.lets_go = _thread.lets_go, True
    try:
        yield
    finally:
        _thread.lets_go = before


def lets_go() -> bool:
    """Return whether an object that ends in this thread was left behind by a call that failed or was stopped."""
    # An interrupt that unwinds the frames of a call is known until the call ends; an error is not.
    return _thread.lets_go or threading.get_ident() in interrupts.raised
