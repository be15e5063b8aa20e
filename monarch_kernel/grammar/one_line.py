"""``%mesh CODE``: one line of code on the ranks, as in a ``%%mesh`` cell."""

from __future__ import annotations

import ast
from collections.abc import Collection
from difflib import get_close_matches

from monarch_kernel.grammar.help import OTHERS

_SHORT = 2
"""Most letters of a name that is never taken for a mistyped command."""
_GIVEN = {"device", "dist", "mesh", "point", "rank", "torch", "world_size"}
"""Names that every rank has; no mistyped commands either."""


def is_code(line: str, commands: Collection[str]) -> bool:
    """Return whether the text after ``%mesh`` is code rather than a command, right or mistyped."""
    text = line.strip()
    word = text.split(maxsplit=1)[0] if text else ""
    if not word or word in commands or text in OTHERS or word.startswith("-") or word.endswith("?"):
        return False
    if text.startswith("!"):
        return True
    try:
        compile(text, "<line>", "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    except (SyntaxError, ValueError):
        return False
    if len(text) <= _SHORT or text in _GIVEN:
        return True
    return not text.isidentifier() or not get_close_matches(text, commands, 1)
