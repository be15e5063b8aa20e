"""Marks of the current line of a cell, in case its process dies there."""

from __future__ import annotations

import ast
import builtins
import re
from typing import Any

from monarch._core.kinds import is_list
from monarch._node.current import current_node
from monarch._procs.rank.cell_marker import Mark

_NAME = "__mark__"
_CELL = re.compile(r"cell \[(\d+)\]")
_mark: Mark | None = None


def marked(tree: ast.Module, name: str) -> ast.Module:
    """Return the code of a cell with a note of the line before each of its statements.

    Within loops only before statements with a call, which costs more than the note does; and not within functions,
    which may run elsewhere, or be compiled.

    Args:
        tree: the code; it is changed.
        name: the name of the cell, as in ``cell [3]``; another is not marked.
    """
    found = _CELL.fullmatch(name)
    if found is None:
        return tree
    mark = prepare()
    mark.begin()
    # A cell may clear its namespace.
    builtins.__dict__[_NAME] = mark.slot
    marker = _Marker(Mark.at(int(found[1]), 0))
    tree.body = marker.block(tree.body, False)
    return tree


def prepare() -> Mark:
    """Return the file for the notes of this process."""
    global _mark
    if _mark is None:
        node = current_node()
        _mark = Mark(node.folder, node.proc)
    return _mark


def unmark() -> None:
    """Clear the mark at the end of a cell."""
    if _mark is not None:
        _mark.slot[0] = 0


def _is_text(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


class _Marker:
    def __init__(self, base: int) -> None:
        self._base = base

    def block(self, body: list[Any], loop: bool) -> list[Any]:
        """Statements of one block, each with its note."""
        made: list[Any] = []
        for number, statement in enumerate(body):
            if (number == 0 and _is_text(statement)) or (
                isinstance(statement, ast.ImportFrom) and statement.module == "__future__"
            ):
                # Nothing may come before these, and only a text that is the first before those.
                made.append(statement)
                continue
            compound = isinstance(statement, (ast.For, ast.AsyncFor, ast.While))
            if not loop or compound or any(isinstance(node, ast.Call) for node in ast.walk(statement)):
                made.append(self._note(statement))
            made.append(self._inner(statement, loop or compound))
        return made

    def _inner(self, statement: Any, loop: bool) -> Any:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            return statement
        for part in ("body", "orelse", "finalbody"):
            inner = getattr(statement, part, None)
            if is_list(inner) and inner:
                setattr(statement, part, self.block(inner, loop))
        for part in ("handlers", "cases"):
            for branch in getattr(statement, part, ()):
                branch.body = self.block(branch.body, loop)
        return statement

    def _note(self, statement: Any) -> ast.stmt:
        line, column = statement.lineno, statement.col_offset
        # A note takes no room, so that a traceback that ends here still shows the statement.
        at = {"lineno": line, "col_offset": column, "end_lineno": line, "end_col_offset": column}
        target = ast.Subscript(ast.Name(_NAME, ast.Load(), **at), ast.Constant(0, **at), ast.Store(), **at)
        return ast.Assign([target], ast.Constant(self._base + line, **at), **at)
