"""The names that cells have defined in the namespace of a rank."""

from __future__ import annotations

from typing import Any

given: set[str] = set()
"""The names that were there before any cell; filled once, before the first one."""
_MADE = {"_exit_code", "get_ipython"}


def user_names(variables: dict[str, Any]) -> list[str]:
    """Return the names that cells have defined, sorted."""
    hidden = given | _MADE
    # A list at once, since a cell may define others meanwhile.
    return sorted(name for name in list(variables) if name not in hidden and not name.startswith("_"))
