"""Ops are not cut in the middle, since ranks would differ in what they have computed; a function of the user may be."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import count
from typing import Any

from monarch._actors.running import current

_numbers = count(1)
functions: dict[int, int] = {}
"""A number for the function of the user that a thread runs, by the id of the thread. Single operations by it."""


def shield() -> AbstractContextManager[Any]:
    """Return a block that an interrupt of the running call does not cut."""
    executor = _executor()
    return executor.protected() if executor is not None else nullcontext()


@contextmanager
def of_user() -> Generator[None]:
    """Let a Stop interrupt a block within a shielded one: it runs a function of the user."""
    executor = _executor()
    if executor is None:
        yield
        return
    ident = threading.get_ident()
    try:
        with executor.user_code():
            functions[ident] = next(_numbers)
            yield
    finally:
        functions.pop(ident, None)


def _executor() -> Any:
    here = current.get()
    return here[0].executor if here is not None else None
