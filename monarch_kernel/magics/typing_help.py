"""Help while typing in ``%mesh`` lines and ``%%mesh`` cells: names from the ranks, commands and options from here."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

from IPython.core.completer import CompletionContext, SimpleCompletion

from monarch._kernel_api import (
    ActorMesh,
    ask,
    complete_here,
    inspect_here,
    is_actor_mesh,
    member_at,
    state_of,
    targets_of,
)
from monarch.exceptions import CallTimeoutError, MonarchError
from monarch_kernel.compat import matcher
from monarch_kernel.grammar.header import HeaderError
from monarch_kernel.grammar.help import bundle_of, bundle_of_cells
from monarch_kernel.grammar.line_words import Typed, rest_of_word, typed
from monarch_kernel.grammar.parsers import PARSERS
from monarch_kernel.grammar.typed_lines import arrange
from monarch_kernel.grammar.wanted import wanted
from monarch_kernel.magics.candidates import Candidates
from monarch_kernel.magics.header_words import words_of_header
from monarch_kernel.magics.mesh import MeshMagics
from monarch_kernel.meshes.choosing import choose
from monarch_kernel.meshes.mesh import Mesh

PATIENCE = 0.4
"""Seconds to wait for a rank: help that comes later is of no use."""
R = TypeVar("R")
_TOKEN = re.compile(r"[A-Za-z_][A-Za-z_0-9.]*$")
_CELL = re.compile(r"(?:[ \t]*(?:#.*)?\n|%%(?!mesh\b).*\n)*(?P<magic>%%mesh)(?!\w)")
"""A cell, perhaps below comments, or within ``%%time`` or ``%%capture``."""
_LINE = re.compile(r"\s*(?:[\w\s,]+=\s*)?%mesh(?P<rest>[ \t].*)?")
"""A line, perhaps with an assignment of its value."""


class CursorPosition(NamedTuple):
    """The position of the cursor in a ``%%mesh`` cell."""

    header: str
    """The first line, without the magic."""
    body: str | None
    """The text of the cell up to the cursor; None while it is on the first line."""


class Completion(NamedTuple):
    """The texts that fit at the cursor, and the part of the cell that each replaces."""

    texts: list[str]
    start: int
    end: int


def place_of(code: str, cursor: int) -> CursorPosition | None:
    """Return the place of a cursor; None if the cell is no ``%%mesh`` cell."""
    match = _CELL.match(code)
    if match is None or cursor < match.end():
        return None
    header, newline, body = code[match.end() : cursor].partition("\n")
    return CursorPosition(header, body if newline else None)


def line_of(code: str, cursor: int) -> str | None:
    """Return the text between ``%mesh`` and the cursor, with the space; None on other lines."""
    match = _LINE.fullmatch(code[:cursor].rpartition("\n")[2])
    return match["rest"] or "" if match is not None else None


class TypingHelp:
    """Answers to the questions of an editor about a cell."""

    def __init__(self, magics: MeshMagics) -> None:
        self._magics = magics
        self._candidates = Candidates(magics)
        self.matcher: Any = None
        """The matcher of the shell's completer."""

    def complete(self, code: str, cursor: int) -> Completion | None:
        """Return the texts that fit at the cursor; None where the names of the notebook do."""
        place = place_of(code, cursor)
        if place is None:
            line = line_of(code, cursor)
            if line:
                return self._of_line(line, code, cursor)
            header = self._header_of(code, cursor)
            return self._of_code(header, code[:cursor], cursor) if header is not None else None
        if place.body is not None:
            return self._of_code(place.header, place.body, cursor)
        if not place.header:
            return None
        words, raw = words_of_header(self._magics, place.header)
        return _beginning_with(raw, words, code, cursor)

    def _header_of(self, code: str, cursor: int) -> str | None:
        """Return the header of a plain cell in automatic mode; None for other cells, and on lines of other magics."""
        line = code[:cursor].rpartition("\n")[2].lstrip()
        return None if line.startswith(("%", "!", "?")) else self._magics.auto.header_of(code)

    def _of_line(self, line: str, code: str, cursor: int) -> Completion:
        """Complete a ``%mesh`` line: a command, its arguments, or code."""
        words = typed(line)
        if words.before and words.before[0] in PARSERS:
            return self._of_verb(words, code, cursor)
        if not words.before:
            found = _beginning_with(words.raw, self._first_words(words.raw), code, cursor)
            if found.texts or not words.raw or words.raw.startswith("-"):
                return found
        return self._of_code("", line.lstrip(), cursor)

    def _first_words(self, raw: str) -> list[str]:
        """Return the commands, and the variables of ranks once something is typed."""
        meshes = self._candidates.in_use() if raw.isidentifier() else []
        return [*sorted(PARSERS), *(name for mesh in meshes for name in self._candidates.remote(mesh))]

    def _of_verb(self, line: Typed, code: str, cursor: int) -> Completion:
        """Complete the arguments of a command."""
        before = line.before[1:]
        want = wanted(PARSERS[line.before[0]], before, line.word)
        here = Typed(before, line.raw if want.typed == line.word else want.typed)
        names = [name for offer in want.offers for name in self._candidates.words(offer, here)]
        return _beginning_with(here.raw, names or want.options, code, cursor, True)

    def _of_code(self, header: str, body: str, cursor: int) -> Completion:
        """Complete code by the names of a rank."""
        token = _TOKEN.search(body)
        names = self._ask(header, complete_here, body) or []
        return Completion(names, cursor - len(token[0] if token else ""), cursor)

    def inspect(self, code: str, cursor: int) -> dict[str, str] | None:
        """Return help on the name at the cursor as a MIME bundle: from a rank, or on the magic and its commands."""
        place = place_of(code, cursor)
        cell = _CELL.match(code)
        if cell is not None and (place.body is None if place is not None else cursor >= cell.start("magic")):
            return bundle_of_cells()
        header = self._header_of(code, cursor) if cell is None else None
        if header is not None and line_of(code, cursor) is None:
            return self._inspect_code(header, code[:cursor], code, cursor)
        if place is None or place.body is None:
            return self._inspect_line(code, cursor)
        return self._inspect_code(place.header, place.body, code, cursor)

    def _inspect_line(self, code: str, cursor: int) -> dict[str, str] | None:
        """Return help on the command of a ``%mesh`` line, or on a name in its code."""
        start = code.rfind("\n", 0, cursor) + 1
        whole = code[start:].partition("\n")[0]
        match = _LINE.fullmatch(whole)
        if match is None or cursor - start < whole.index("%mesh"):
            return None
        words = (match["rest"] or "").split()
        before = line_of(code, cursor)
        if not words or before is None:
            return bundle_of(None)
        if words[0] in PARSERS:
            return bundle_of(words[0])
        return self._inspect_code("", before.lstrip(), code, cursor) if before.strip() else bundle_of(None)

    def _inspect_code(self, header: str, body: str, code: str, cursor: int) -> dict[str, str] | None:
        rest = re.match(r"\w*", code[cursor:])
        token = _TOKEN.search(body.rstrip("(") + (rest[0] if rest else ""))
        text = self._ask(header, inspect_here, token[0]) if token else None
        return {"text/plain": text} if text is not None else None

    def _ask(self, header: str, service: Callable[[str, str], R], text: str) -> R | None:
        """Ask the first live rank of the cell, which answers even while it runs another cell."""
        try:
            parsed = self._magics.header(header)
            mesh, actors = self._addressed(parsed.name)
            if actors is None:
                return None
            first = _first_alive(choose(actors, parsed))
            key = "" if mesh is not None else state_of(first).key
            return ask(first, service, text, key).get(PATIENCE)[0]
        except (CallTimeoutError, MonarchError, HeaderError):
            return None

    def _addressed(self, name: str | None) -> tuple[Mesh | None, ActorMesh | None]:
        """Return the mesh of a name and its namespaces, or None and actors; do not wait for a mesh that restarts."""
        meshes = self._magics.meshes
        mesh = meshes.by_name.get(name or meshes.used or "")
        if mesh is not None:
            return mesh, mesh.cells
        actors = self._magics.shell.user_ns.get(name)
        return None, actors if is_actor_mesh(actors) else None


def _first_alive(views: list[ActorMesh]) -> ActorMesh:
    members = [member_at(view, position) for view in views for position in range(len(view))]
    return next((each for each in members if targets_of(each).peers[0].dead is None), members[0])


def _beginning_with(raw: str, names: Iterable[str], code: str, cursor: int, argument: bool = False) -> Completion:
    """Complete a word; what follows it up to its end is replaced too, but not the next word."""
    texts = list(dict.fromkeys(name for name in names if name.startswith(raw)))
    return Completion(texts, cursor - len(raw), cursor + rest_of_word(raw, code[cursor:], argument))


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
        return {
            "completions": [SimpleCompletion(text=text, type="mesh") for text in completion.texts],
            "matched_fragment": code[completion.start : cursor],
            # The notebook's own names mean nothing on a rank.
            "suppress": True,
        }

    helper.matcher = monarch_matcher
    if arrange not in shell.input_transformers_cleanup:
        shell.input_transformers_cleanup.append(arrange)
    shell.Completer.custom_matchers.append(monarch_matcher)
    return helper
