"""The definitions of a mesh's cells, which new ranks run without the rest of the cells."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import NamedTuple

from monarch_kernel.source.cell import CellSource

_KINDS = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_SETTINGS = ("cd", "env", "matplotlib", "set_env")
"""Line magics that new ranks run too."""
_MOST = 1000
"""Cells that are kept; the oldest are dropped."""


class Defined(NamedTuple):
    """The definitions of one cell."""

    name: str
    """The name of the cell in tracebacks."""
    text: str
    """Its imports, functions and classes, each on its original lines; or the whole cell, for ``--define``."""
    ranks: frozenset[int]
    """Where it ran."""
    everywhere: bool = False
    """Whether it ran on all ranks, so that later ranks get it too."""
    shown: str = ""
    """The cell as typed, for tracebacks, if it has magics."""


class Definitions:
    """The definitions of all cells of a mesh, in the order of their runs."""

    def __init__(self) -> None:
        self._cells: list[Defined] = []

    @property
    def cells(self) -> list[Defined]:
        """All definitions."""
        return self._cells

    def drop(self, number: int) -> Defined:
        """Drop one, by its position. Raises IndexError for an invalid position."""
        return self._cells.pop(number)

    def clear(self) -> None:
        """Drop all."""
        self._cells.clear()

    def record(
        self,
        name: str,
        source: CellSource,
        ranks: Sequence[int],
        total: int = 0,
        whole: bool = False,
        above: int | None = None,
    ) -> None:
        """Record a cell that ran on some ranks.

        Args:
            name: the name of the cell in tracebacks.
            source: its text and code.
            ranks: where it ran.
            total: number of ranks of the mesh.
            whole: whether new ranks run the whole cell, not only its definitions.
            above: the line that these ranks have reached, if they have not run all of it.
        """
        text = source.code if whole else definitions_of(source.definitions, above)
        if text:
            # The same text again, as after "run all cells", must not run twice.
            self._cells = [each for each in self._cells if each.text != text or not each.ranks <= set(ranks)]
            self._cells.append(Defined(name, text, frozenset(ranks), len(set(ranks)) == total, source.shown))
            del self._cells[:-_MOST]

    def of(self, rank: int) -> list[Defined]:
        """Return the definitions that a rank had, or that a new rank gets."""
        return [each for each in self._cells if rank in each.ranks or each.everywhere]

    def __len__(self) -> int:
        return len(self._cells)


def names_in(text: str) -> list[str]:
    """Return the names that a text of definitions defines."""
    names: list[str] = []
    for node in ast.parse(text).body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names.extend((each.asname or each.name).partition(".")[0] for each in node.names)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.append(node.name)
    return list(dict.fromkeys(names))


def definitions_of(source: str, above: int | None = None) -> str:
    """Return the top-level imports, functions, classes, ``%cd`` and ``%env`` of a cell, all else blank, or nothing.

    Args:
        source: the cell.
        above: return those that end above this line; None for all.
    """
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return ""
    lines = source.split("\n")
    kept = [""] * len(lines)
    any_kept = False
    for node in tree.body:
        if above is not None and (node.end_lineno or 0) >= above:
            break
        if isinstance(node, _KINDS) or _is_setting(node):
            first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))])
            # A semicolon may separate it from other code on the line.
            if first == node.end_lineno:
                kept[first - 1] = "; ".join(
                    part for part in (kept[first - 1], ast.get_source_segment(source, node) or "") if part
                )
            else:
                kept[first - 1 : node.end_lineno] = lines[first - 1 : node.end_lineno]
            any_kept = True
    return "\n".join(kept).rstrip() if any_kept else ""


def _is_setting(node: ast.stmt) -> bool:
    """Return whether a statement is a magic that changes its process as a whole."""
    call = node.value if isinstance(node, ast.Expr) else None
    return (
        isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr == "run_line_magic"
        and isinstance(call.args[0], ast.Constant)
        and call.args[0].value in _SETTINGS
    )
