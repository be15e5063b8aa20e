"""The names that a mesh gives to the cells of a rank: a cell may replace them, and ``del`` brings them back."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

_NOTED = {"rank", "world_size", "mesh", "point", "dist", "display"}
"""Names whose replacement is reported; programs replace ``device`` and ``torch`` as a matter of course."""


class OwnNames:
    """Names with their values in the namespace of cells.

    Args:
        variables: the namespace.
    """

    def __init__(self, variables: dict[str, Any]) -> None:
        self._variables = variables
        self._values: dict[str, Any] = {}
        self._reported: set[str] = set()

    def set(self, **values: Any) -> None:
        """Give names their values, except those that a cell has replaced."""
        for name, value in values.items():
            if name not in self._values or self.has(name):
                self._variables[name] = value
            self._values[name] = value

    def has(self, name: str) -> bool:
        """Return whether a name has the value that the mesh gave it."""
        if name not in self._values or name not in self._variables:
            return False
        own, now = self._values[name], self._variables[name]
        return own is now or (type(own) is int and type(now) is int and own == now)

    def accept(self, names: Iterable[str]) -> None:
        """Report no replacement of these names."""
        self._reported.update(names)

    def settle(self) -> None:
        """After a cell, bring back deleted names and report replaced ones, each once."""
        for name, value in self._values.items():
            self._variables.setdefault(name, value)
        replaced = [each for each in sorted(_NOTED & self._values.keys() - self._reported) if not self.has(each)]
        self._reported.update(replaced)
        if replaced:
            names = ", ".join(replaced)
            print(
                f"monarch: this cell has replaced {names} of the mesh; del {names} brings back its own", file=sys.stderr
            )
