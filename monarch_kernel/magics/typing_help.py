"""Help while typing in a ``%%mesh`` cell: names come from the ranks, mesh names and options from here."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from IPython.core.completer import CompletionContext, SimpleCompletion

from monarch._kernel_api import ask, complete_here, inspect_here, member_at, state_of
from monarch.exceptions import CallTimeoutError, MonarchError
from monarch_kernel.compat import matcher
from monarch_kernel.magics.header import OPTIONS, HeaderError, parse
from monarch_kernel.magics.mesh import MeshMagics
from monarch_kernel.meshes.registry import choose

PATIENCE = 0.4
"""Seconds to wait for a rank: help that comes later is of no use."""
R = TypeVar("R")
_TOKEN = re.compile(r"[A-Za-z_][A-Za-z_0-9.]*$")
_WORD = re.compile(r"[\w\-]*$")
_VERB = re.compile(r"\s*%mesh[ \t]+(\w*)$")
_OF_MESH = re.compile(r"\s*%mesh[ \t]+(?:use|down|restart)[ \t]+(\w*)$")
_OF_ACTORS = re.compile(r"\s*%mesh[ \t]+update[ \t]+(\w*)$")


class Place(NamedTuple):
    """The position of the cursor in a ``%%mesh`` cell."""

    header: str
    """The first line, without the magic."""
    body: str | None
    """The text of the cell up to the cursor; None while it is on the first line."""


def place_of(code: str, cursor: int) -> Place | None:
    """Return the place of a cursor; None if the cell is no ``%%mesh`` cell."""
    first, newline, _ = code.partition("\n")
    if not first.startswith("%%mesh"):
        return None
    if cursor <= len(first):
        return Place(first[6:cursor], None)
    return Place(first[6:], code[len(first) + len(newline) : cursor])


class TypingHelp:
    """Answers to the questions of an editor about a cell."""

    def __init__(self, magics: MeshMagics) -> None:
        self._magics = magics
        self.matcher: Any = None
        """The matcher of the shell's completer."""

    def complete(self, code: str, cursor: int) -> tuple[list[str], int] | None:
        """Return the names that fit at the cursor, and the start of the text they replace; None in other cells."""
        place = place_of(code, cursor)
        if place is None:
            return self._of_line(code[:cursor].rpartition("\n")[2], cursor)
        if place.body is None:
            word = _WORD.search(place.header)
            names = [*self._magics.meshes.by_name, *self._magics.actor_names(), "spawn", *OPTIONS]
            return _beginning_with(word[0] if word else "", names, cursor)
        names = self._ask(place.header, complete_here, place.body)
        token = _TOKEN.search(place.body)
        return (names or []), cursor - len(token[0] if token else "")

    def _of_line(self, line: str, cursor: int) -> tuple[list[str], int] | None:
        """Return the same for a ``%mesh`` line."""
        for pattern, names in (
            (_VERB, self._magics.verbs()),
            (_OF_MESH, list(self._magics.meshes.by_name)),
            (_OF_ACTORS, self._magics.actor_names()),
        ):
            match = pattern.match(line)
            if match is not None:
                return _beginning_with(match[1], names, cursor)
        return None

    def inspect(self, code: str, cursor: int) -> str | None:
        """Return the signature and docstring of the name at the cursor, or None."""
        place = place_of(code, cursor)
        if place is None or place.body is None:
            return None
        rest = re.match(r"\w*", code[cursor:])
        body = place.body.rstrip("(") + (rest[0] if rest else "")
        token = _TOKEN.search(body)
        return self._ask(place.header, inspect_here, token[0]) if token else None

    def _ask(self, header: str, service: Callable[[str, str], R], text: str) -> R | None:
        """Ask the first rank of the cell, which answers even while it runs another cell."""
        try:
            parsed = parse(header)
            mesh, actors = self._magics.addressed(parsed.name)
            first = member_at(choose(actors, parsed)[0], 0)
            key = "" if mesh is not None else state_of(first).key
            return ask(first, service, text, key).get(PATIENCE)[0]
        except (CallTimeoutError, MonarchError, HeaderError):
            return None


def _beginning_with(text: str, names: list[str], cursor: int) -> tuple[list[str], int]:
    return [name for name in names if name.startswith(text)], cursor - len(text)


def install(shell: Any, magics: MeshMagics) -> TypingHelp:
    """Make the shell's completer ask the ranks in ``%%mesh`` cells."""
    helper = TypingHelp(magics)

    @matcher
    def monarch_matcher(context: CompletionContext) -> Any:
        code = context.full_text
        lines = code.split("\n")
        cursor = sum(len(line) + 1 for line in lines[: context.cursor_line]) + context.cursor_position
        completion = helper.complete(code, cursor)
        if completion is None:
            return {"completions": []}
        names, start = completion
        return {
            "completions": [SimpleCompletion(text=name, type="mesh") for name in names],
            "matched_fragment": code[start:cursor],
            # The notebook's own names mean nothing on a rank.
            "suppress": True,
        }

    helper.matcher = monarch_matcher
    shell.Completer.custom_matchers.append(monarch_matcher)
    return helper
