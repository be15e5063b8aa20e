"""The names that a mesh gives to the cells of a rank: a cell may replace them, and ``del`` brings them back."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable
from typing import Any

_BACK = f"__import__({__name__!r}, None, None, ['bring_back']).bring_back()"
"""The code that follows a ``del`` of a name of the mesh."""
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
        _of_cells.append(self)

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

    def value_of(self, name: str) -> Any:
        """Return the value that the mesh gave a name; None if it gave none."""
        return self._values.get(name)

    def accept(self, names: Iterable[str]) -> None:
        """Report no replacement of these names."""
        self._reported.update(names)

    def change_of(self, source: str) -> ast.NodeTransformer | None:
        """Return what changes a cell so that a ``del`` brings back names at once; None if it deletes nothing."""
        return _Deletions(self._values) if "del" in source else None

    def bring_back(self) -> None:
        """Give deleted names the values that the mesh gave them."""
        for name, value in self._values.items():
            self._variables.setdefault(name, value)

    def settle(self) -> None:
        """After a cell, bring back deleted names and report replaced ones, each once."""
        self.bring_back()
        replaced = [each for each in sorted(_NOTED & self._values.keys() - self._reported) if not self.has(each)]
        self._reported.update(replaced)
        if replaced:
            names = ", ".join(replaced)
            print(f"monarch: this cell has overwritten {names} of the mesh; 'del {names}' undoes it", file=sys.stderr)


_of_cells: list[OwnNames] = []
"""Those of the namespace of this process."""


def bring_back() -> None:
    """Bring back deleted names in the middle of a cell."""
    for names in _of_cells:
        names.bring_back()


def own_value(name: str) -> Any:
    """Return the value that the mesh gave a name, whatever cells have made of it; None if it gave none."""
    return next((names.value_of(name) for names in _of_cells), None)


class _Deletions(ast.NodeTransformer):
    """Puts a call below each ``del`` of a name of the mesh, save in functions and classes.

    Args:
        names: the names of the mesh.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = set(names)

    def visit_Delete(self, node: ast.Delete) -> ast.AST | list[ast.AST]:
        deleted = {each.id for target in node.targets for each in ast.walk(target) if isinstance(each, ast.Name)}
        if self._names.isdisjoint(deleted):
            return node
        (call,) = ast.parse(_BACK).body
        for each in ast.walk(call):
            # Its line in tracebacks is that of the deletion.
            ast.copy_location(each, node)
        return [node, call]

    def _skip(self, node: ast.AST) -> ast.AST:
        return node

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = visit_Lambda = _skip
