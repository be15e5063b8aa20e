"""The slot for the function that opens a program's session; the function is in a room above this one."""

from __future__ import annotations

from collections.abc import Callable

opener: Callable[[], object] | None = None
"""Opens the session and returns its node. ``monarch/__init__.py`` sets it before any other module is imported."""


def set_opener(function: Callable[[], object]) -> None:
    """Set the function that opens a session and returns its node."""
    global opener
    opener = function
