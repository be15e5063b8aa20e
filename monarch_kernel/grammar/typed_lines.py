"""Lines as people type them, in the form that IPython reads: ``%mesh COMMAND?``, ``%%mesh[0]``, ``x = %mesh CODE``."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from typing import Any

from monarch_kernel.grammar.help import bundle_of, bundle_of_cells
from monarch_kernel.grammar.parsers import PARSERS
from monarch_kernel.grammar.short_forms import HELP

_ASKED = re.compile(rf"(\s*%mesh[ \t]+(?:{'|'.join(PARSERS)})\b.*?)[ \t]*\?+(\s*)")
VALUE = "--value "
"""Begins a line whose value is assigned, and so not shown."""
_LINE = "run_line_magic('mesh'"
"""Part of the code that IPython puts in the place of a ``%mesh`` line."""
_HEADER = re.compile(r"%%mesh(?=[\s\[]|$)")


def arrange(lines: list[str]) -> list[str]:
    """Return the lines of a cell in the form that IPython reads.

    A space precedes the brackets of ``%%mesh[0]`` and the question mark of ``%mesh COMMAND?``, which IPython would take
    for parts of names. Comments above ``%%mesh`` go. A ``%%mesh --help`` without code asks as ``%mesh help`` does.
    """
    above = header_at(lines)
    if above is None:
        if lines and lines[0].startswith("%%"):
            return lines
        return [_ASKED.sub(r"\1 ?\2", line) if _ASKED.fullmatch(line) else line for line in lines]
    head, *body = lines[above:]
    if not "".join(body).strip() and any(word in HELP for word in head.split()[1:]):
        return ["%mesh help\n"]
    return [_HEADER.sub("%%mesh ", head) if head.startswith("%%mesh[") else head, *body]


def header_at(lines: list[str]) -> int | None:
    """Return the position of the ``%%mesh`` line of a cell, below empty lines and comments; None for other cells."""
    at = next((at for at, line in enumerate(lines) if line.strip() and not line.lstrip().startswith("#")), None)
    return at if at is not None and _HEADER.match(lines[at]) else None


class Assigned(ast.NodeTransformer):
    """Marks the ``%mesh`` lines of a cell that stand on the right of an assignment.

    Args:
        transformers: those of the shell. It is one of them only for a cell with such a line, since IPython walks all of
            a cell for them.
    """

    def __init__(self, transformers: list[Any]) -> None:
        self._transformers = transformers

    def look(self, lines: list[str]) -> list[str]:
        """Take part in the reading of a cell, of which IPython has read the lines, if it has a line of ``%mesh``."""
        self.close()
        if any(_LINE in line for line in lines):
            self._transformers.append(self)
        return lines

    def close(self) -> None:
        """Take no part any more."""
        if self in self._transformers:
            self._transformers.remove(self)

    def visit(self, node: ast.AST) -> ast.AST:
        """Visit a statement; expressions have no assignments of lines, and most nodes of a cell are in them."""
        return node if isinstance(node, ast.expr) else super().visit(node)

    def visit_Assign(self, node: ast.Assign) -> ast.Assign:
        """Mark the line of an assignment, if there is one."""
        match node.value:
            # This is what IPython makes of the line.
            case ast.Call(
                func=ast.Attribute(attr="run_line_magic"), args=[ast.Constant("mesh"), ast.Constant() as line]
            ):
                line.value = f"{VALUE}{line.value}"
            case _:
                pass
        return node


def explain(line: Callable[..., Any], cell: Callable[..., Any]) -> None:
    """Let IPython show the commands for the line magic, and the options for the cell magic."""
    line.__doc__ = f"{line.__doc__}\n\n{bundle_of(None)['text/plain']}"
    cell.__doc__ = f"{cell.__doc__}\n\n{bundle_of_cells()['text/plain']}"
