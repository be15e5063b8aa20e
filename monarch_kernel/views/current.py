"""The views of the IPython shells that have the magics, for widgets that are made without naming them."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from monarch_kernel.views.views import Views

_by_shell: WeakKeyDictionary[Any, Views] = WeakKeyDictionary()
"""Main thread only."""


def set_views(shell: Any, views: Views | None) -> None:
    """Set the views of a shell; None removes them."""
    if views is None:
        _by_shell.pop(shell, None)
    else:
        _by_shell[shell] = views


def views_of(shell: Any) -> Views | None:
    """Return the views of a shell; None without the magics."""
    return _by_shell.get(shell)
