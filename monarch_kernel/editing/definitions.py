"""What the cells of a mesh have defined: a rank that is replaced gets it again, without running anything else."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import NamedTuple

_KINDS = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_MOST = 1000
"""Cells that are kept; of more, those that ran first are forgotten."""


class Defined(NamedTuple):
    """The definitions of one cell."""

    name: str
    """What tracebacks call the cell."""
    text: str
    """Its imports, functions and classes, each on the lines where it was; or all of it, if the person has said so."""
    ranks: frozenset[int]
    """Where it ran."""
    everywhere: bool = False
    """Whether that were all ranks there were, so that one that comes later is to have it too."""


class Definitions:
    """Those of all cells of a mesh, in the order in which they ran."""

    def __init__(self) -> None:
        self._cells: list[Defined] = []

    @property
    def cells(self) -> list[Defined]:
        """All of them."""
        return self._cells

    def drop(self, number: int) -> Defined:
        """Forgets one, by its place in the list. IndexError if there is none."""
        return self._cells.pop(number)

    def clear(self) -> None:
        """Forgets all."""
        self._cells.clear()

    def record(self, name: str, source: str, ranks: Sequence[int], total: int = 0, whole: bool = False) -> None:
        """Takes note of a cell that has run well on some ranks.

        Args:
            name: what tracebacks call it.
            source: its text.
            ranks: where it ran.
            total: how many ranks there are.
            whole: whether all of it is to be run again, and not only what it defines.
        """
        text = source if whole else definitions_of(source)
        if text:
            # The same text again, as when a person runs all cells, is not to be run twice.
            self._cells = [each for each in self._cells if each.text != text or not each.ranks <= set(ranks)]
            self._cells.append(Defined(name, text, frozenset(ranks), len(set(ranks)) == total))
            del self._cells[:-_MOST]

    def of(self, rank: int) -> list[Defined]:
        """Those that a rank had; or is to have, if it came later."""
        return [each for each in self._cells if rank in each.ranks or each.everywhere]

    def __len__(self) -> int:
        return len(self._cells)


def names_in(text: str) -> list[str]:
    """What a text of definitions defines, for people."""
    found: list[str] = []
    for node in ast.parse(text).body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            found.extend((each.asname or each.name).partition(".")[0] for each in node.names)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.append(node.name)
    return list(dict.fromkeys(found))


def definitions_of(source: str) -> str:
    """The imports, functions and classes of a cell at its top level, with all else blank; empty if it has none."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return ""
    lines = source.split("\n")
    kept = [""] * len(lines)
    found = False
    for node in tree.body:
        if isinstance(node, _KINDS):
            first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))])
            # Something else may stand on the same line, behind a semicolon.
            if first == node.end_lineno:
                kept[first - 1] = "; ".join(
                    part for part in (kept[first - 1], ast.get_source_segment(source, node) or "") if part
                )
            else:
                kept[first - 1 : node.end_lineno] = lines[first - 1 : node.end_lineno]
            found = True
    return "\n".join(kept).rstrip() if found else ""
