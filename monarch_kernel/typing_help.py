"""Help while typing in a ``%%mesh`` cell: names come from the ranks, mesh names and options from here."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from IPython.core.completer import CompletionContext, SimpleCompletion, context_matcher

from monarch._actors.services import ask
from monarch.exceptions import CallTimeoutError, MonarchError
from monarch_kernel.header import OPTIONS, HeaderError, parse
from monarch_kernel.magics import MeshMagics

PATIENCE = 0.4
"""Seconds to wait for a rank; who types gets help at once or none."""
_TOKEN = re.compile(r"[A-Za-z_][A-Za-z_0-9.]*$")
_WORD = re.compile(r"[\w\-]*$")
_LINE_VERBS = ("up", "use", "down", "restart", "push", "pull", "log", "help")


class Place(NamedTuple):
    """Where the cursor is in a ``%%mesh`` cell."""

    header: str
    """The first line, without the magic."""
    body: str | None
    """The text of the cell up to the cursor; None while it is on the first line."""


def place_of(code: str, cursor: int) -> Place | None:
    """Where a cursor is, None if the cell is no ``%%mesh`` cell."""
    first, newline, _ = code.partition("\n")
    if not first.startswith("%%mesh"):
        return None
    if cursor <= len(first):
        return Place(first[6:cursor], None)
    return Place(first[6:], code[len(first) + len(newline) : cursor])


class TypingHelp:
    """Answers what an editor asks about a cell."""

    def __init__(self, magics: MeshMagics) -> None:
        self._magics = magics

    def complete(self, code: str, cursor: int) -> tuple[list[str], int] | None:
        """What may stand at the cursor, and from where it replaces the text; None if this is no ``%%mesh`` cell."""
        place = place_of(code, cursor)
        if place is None:
            return None
        if place.body is None:
            word = _WORD.search(place.header)
            text = word[0] if word else ""
            names = [*self._magics.meshes.by_name, *OPTIONS]
            return [name for name in names if name.startswith(text)], cursor - len(text)
        found = self._ask(place.header, "complete", place.body)
        token = _TOKEN.search(place.body)
        return (found or []), cursor - len(token[0] if token else "")

    def inspect(self, code: str, cursor: int) -> str | None:
        """Signature and docstring of the name at the cursor; None if there is none, or this is no such cell."""
        place = place_of(code, cursor)
        if place is None or place.body is None:
            return None
        rest = re.match(r"\w*", code[cursor:])
        body = place.body.rstrip("(") + (rest[0] if rest else "")
        token = _TOKEN.search(body)
        return self._ask(place.header, "inspect", token[0]) if token else None

    def _ask(self, header: str, service: str, text: str) -> Any:
        """Asks the first rank that the cell is for, which answers also while it runs another cell."""
        try:
            given = parse(header)
            mesh = self._magics.meshes.get(given.name)
            return ask(mesh.choose(given)[0]._member(0), service, text).get(PATIENCE)[0]
        except (CallTimeoutError, MonarchError, HeaderError):
            return None


def install(shell: Any, magics: MeshMagics) -> TypingHelp:
    """Has the shell's completer ask the ranks in ``%%mesh`` cells."""
    helper = TypingHelp(magics)

    @context_matcher()
    def monarch_matcher(context: CompletionContext) -> Any:
        code = context.full_text
        lines = code.split("\n")
        cursor = sum(len(line) + 1 for line in lines[: context.cursor_line]) + context.cursor_position
        found = helper.complete(code, cursor)
        if found is None:
            return {"completions": []}
        names, start = found
        return {
            "completions": [SimpleCompletion(text=name, type="monarch") for name in names],
            "matched_fragment": code[start:cursor],
            # The notebook's own names mean nothing on a rank.
            "suppress": True,
        }

    shell.Completer.custom_matchers.append(monarch_matcher)
    return helper
