"""The slot for the function that opens a program's session, from a room above this one, and who hears of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

opener: Callable[[], object] | None = None
"""Opens the session and returns its node. ``monarch/__init__.py`` sets it before any other module is imported."""
on_opened: list[Callable[[Any], object]] = []
"""Called with the node of each session that opens, in the thread that opens it. Changed by the main thread only."""


def set_opener(function: Callable[[], object]) -> None:
    """Set the function that opens a session and returns its node."""
    global opener
    opener = function
