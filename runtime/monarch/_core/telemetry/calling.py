"""The titles of calls in the events of a mesh."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar

calling: ContextVar[tuple[str, int]] = ContextVar("monarch_calling", default=("", 0))
"""The title of the calls that this code makes, as in ``cell [3]``, and the number of the notebook cell that makes them.
Empty for the name of the endpoint; 0 for none."""


@contextmanager
def called(title: str) -> Generator[None]:
    """Give the calls of a block this title."""
    token = calling.set((title, calling.get()[1]))
    try:
        yield
    finally:
        calling.reset(token)
