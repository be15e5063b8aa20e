"""How a program opens its session when it first needs one: a slot, since what opens it stands above all rooms here."""

from __future__ import annotations

from collections.abc import Callable

opener: Callable[[], object] | None = None
"""Opens the session and returns its node. The package ``monarch`` sets it, so it is there before any module of it."""


def set_opener(function: Callable[[], object]) -> None:
    """Set what opens a session."""
    global opener
    opener = function
