"""A program that hangs on four ranks, and the text that explains it."""

from __future__ import annotations

from typing import NamedTuple


class Hang(NamedTuple):
    """A body of a cell that has imported ``time`` in its first line, and parts of the text that explains it."""

    name: str
    body: str
    said: tuple[str, ...]
    """Ranks, line and cause."""
    imports: bool = False
    """Whether its first seconds are those of imports."""
