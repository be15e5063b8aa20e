"""Selections of members of a mesh as text, such as ``0:2,*``; only parsed here."""

from __future__ import annotations

import re
from typing import Any

from monarch._core.shapes.extent import Frozen, put
from monarch.exceptions import ShapeError

_TOKEN = re.compile(r"\s*(\*|\?|[0-9]*:[0-9]*(?::[0-9]+)?|[0-9]+|[(),&|])\s*")


class Selection(Frozen):
    """Which members of a mesh to address: all, any one, or those of an expression.

    An expression has one term for each axis, separated by commas: ``*`` for all, ``?`` for any one, a coordinate, or a
    range such as ``0:4`` or ``0:8:2``. ``|`` unites selections, ``&`` intersects them, parentheses group.
    """

    __slots__ = ("_text",)

    _text: str

    @staticmethod
    def all() -> Selection:
        """Return the selection of all members."""
        return _made("*")

    @staticmethod
    def any() -> Selection:
        """Return the selection of any one member."""
        return _made("?")

    @staticmethod
    def from_string(text: str) -> Selection:
        """Return the selection of an expression.

        Raises:
            ShapeError: it is invalid.
        """
        tokens, rest = _tokens(text)
        if rest or _expression(tokens) or tokens:
            raise ShapeError(f"cannot parse selection {text!r}; expected terms such as '*', '?', '3' or '0:4:2'")
        return _made(text)

    def __str__(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return f"Selection({self._text!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _made, (self._text,)


def _made(text: str) -> Selection:
    selection = object.__new__(Selection)
    put(selection, "_text", text)
    return selection


def _tokens(text: str) -> tuple[list[str], str]:
    """Return the tokens of an expression in reverse, and what is no token."""
    found: list[str] = []
    at = 0
    while at < len(text) and (token := _TOKEN.match(text, at)):
        found.append(token[1])
        at = token.end()
    return found[::-1], text[at:]


def _expression(tokens: list[str]) -> bool:
    """Take an expression off the tokens; return whether it is invalid."""
    while True:
        token = tokens.pop() if tokens else ")"
        if token == "(":
            if _expression(tokens) or not tokens or tokens.pop() != ")":
                return True
        elif token in ("&", "|", ",", ")"):
            return True
        if not tokens or tokens[-1] not in ("&", "|", ","):
            return False
        tokens.pop()
