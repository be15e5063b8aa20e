"""The names that cells have defined in the namespace of a rank."""

from __future__ import annotations

from typing import Any

given: set[str] = set()
"""The names that were there before any cell; filled once, before the first one."""
_MADE = {"_exit_code", "get_ipython"}


def user_names(variables: dict[str, Any]) -> list[str]:
    """Return the names that cells have defined, sorted."""
    return sorted(name for name in variables if name not in given | _MADE and not name.startswith("_"))
