"""``%mesh who``: the variables of cells on the ranks, where ranks differ, and the actors there."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from monarch._kernel_api import (
    MOST_VARIABLES,
    Failure,
    RankListing,
    Variable,
    ask_soon,
    current_node,
    describe_ranks,
    html_table,
    is_tuple,
    request,
    split_proc,
    state_of,
    text_table,
    variables_here,
)
from monarch_kernel.calls.record import CallRecord
from monarch_kernel.commands.who_actors import HEADERS as ACTORS
from monarch_kernel.commands.who_actors import actors_on
from monarch_kernel.commands.who_lines import UNKNOWN, lines_of
from monarch_kernel.compat import display
from monarch_kernel.grammar.arguments import Usage
from monarch_kernel.grammar.header import Header
from monarch_kernel.grammar.header import parse as parse_header
from monarch_kernel.grammar.parsers import parse
from monarch_kernel.grammar.suggest import did_you_mean
from monarch_kernel.meshes.activity import busy_ranks, dead_text
from monarch_kernel.meshes.choosing import choose, ranks_in
from monarch_kernel.meshes.mesh import Mesh
from monarch_kernel.meshes.registry import NotebookMeshes
from monarch_kernel.meshes.variable_errors import variables

PATIENCE = 2.0
"""Seconds for all ranks to answer; only one inside C code that holds the GIL takes longer."""
HEADERS = ("name", "type", "value", "bytes", "ranks", "contents")
_PLACE = re.compile(r"(?P<name>\w*)\s*\[[^\]]*\](?!\S)")


class Asked(NamedTuple):
    """The answers of the ranks of a mesh."""

    mesh: Mesh
    ranks: list[int]
    answers: dict[int, RankListing]
    refused: dict[int, str]
    """The errors of ranks that could not list their variables."""


class Who:
    """The command that lists variables.

    Args:
        meshes: the meshes of the notebook.
        calls: returns the calls of the notebook.
    """

    def __init__(self, meshes: NotebookMeshes, calls: Callable[[], CallRecord]) -> None:
        self._meshes = meshes
        self._calls = calls

    def who(self, words: list[str]) -> None:
        """Show the variables of cells on ranks, as a table."""
        arguments = parse("who", words)
        place, patterns = self._split([*filter(None, [arguments.place]), *arguments.patterns])
        header = parse_header(place)
        mesh = self._meshes.get(header.name)
        asked = _ask(mesh, header, patterns)
        notes = [*_silent(asked, self._calls()), *_undefined(asked), *_more(asked)]
        rows = lines_of({rank: each.variables for rank, each in asked.answers.items()}, MOST_VARIABLES)
        if any(row.contents == UNKNOWN for row in rows):
            notes.append("not compared: %mesh diff NAME compares the contents, also of models and objects")
        actors = actors_on(mesh, asked.ranks, patterns)
        if not rows and asked.answers and not (actors and patterns):
            notes.insert(0, _nothing(asked, patterns))
        tables = [table_of(HEADERS, [list(row) for row in rows], _title(asked)), table_of(ACTORS, actors, "")]
        display(tables_bundle([each for each in tables if each is not None], notes))

    def _split(self, words: list[str]) -> tuple[str, list[str]]:
        """Return the mesh and slice as in a header, and the patterns."""
        text = " ".join(words)
        place = _PLACE.match(text)
        if place is not None and (not place["name"] or place["name"] in self._meshes.by_name):
            return place[0], text[place.end() :].split()
        named = bool(words) and words[0] in self._meshes.by_name
        return (words[0], words[1:]) if named else ("", words)


def _ask(mesh: Mesh, header: Header, patterns: list[str]) -> Asked:
    """Ask the live ranks, also those that run a cell."""
    ranks = sorted(ranks_in(choose(mesh.cells, header)))
    procs, node = state_of(mesh.procs).procs, current_node()
    living = [proc for proc in map(procs.proc, ranks) if node.peers.get(proc).dead is None]
    replies = ask_soon(living, request(variables_here, patterns), PATIENCE)
    answers = {split_proc(proc)[1]: each for proc, each in replies.items() if is_tuple(each)}
    listings = {rank: RankListing(total, [Variable(*each) for each in some]) for rank, (total, some) in answers.items()}
    refused = {split_proc(proc)[1]: each.text for proc, each in replies.items() if isinstance(each, Failure)}
    return Asked(mesh, ranks, listings, refused)


def _nothing(asked: Asked, patterns: list[str]) -> str:
    """Return the reason for an empty table.

    Raises:
        Usage: no variable matches the patterns.
    """
    where = describe_ranks(asked.ranks)
    if not patterns:
        return f"cells have defined no variables on {where}"
    known = variables(asked.mesh)
    guess = next(filter(None, (did_you_mean(each.strip("*?"), known) for each in patterns)), "")
    asked_for = " or ".join(map(repr, patterns))
    raise Usage(f"%mesh who: no variable on {where} matches {asked_for}{guess or '; %mesh who lists all'}")


def _silent(asked: Asked, calls: CallRecord) -> list[str]:
    """Return lines about ranks that are dead, that did not answer, or whose variables may be changing."""
    busy = busy_ranks(asked.mesh, calls)
    ranks_of: dict[tuple[str, str], list[int]] = {}
    for rank in asked.ranks:
        dead, doing = dead_text(asked.mesh, rank), busy[rank].text() if rank in busy else ""
        if dead:
            advice = asked.mesh.hosts.instead_of_heal(asked.mesh.name) or "%mesh heal replaces dead ranks"
            ranks_of.setdefault((dead, f"; {advice}"), []).append(rank)
        elif rank not in asked.answers:
            answer = asked.refused.get(rank, f"no answer within {PATIENCE:g} s")
            ranks_of.setdefault((f"{answer} ({doing})" if doing else answer, ""), []).append(rank)
        elif doing:
            ranks_of.setdefault((doing, "; values may change"), []).append(rank)
    return [f"{describe_ranks(ranks)}: {text}{end}" for (text, end), ranks in ranks_of.items()]


def _undefined(asked: Asked) -> list[str]:
    """Return lines about new ranks without the definitions of the cells so far."""
    ranks_of: dict[int, list[int]] = {}
    for rank, cells in asked.mesh.undefined(asked.ranks).items():
        ranks_of.setdefault(cells, []).append(rank)
    return [
        f"{describe_ranks(ranks)}: restarted; the next cell first runs the definitions of {cells} "
        f"cell{'s' if cells > 1 else ''} there"
        for cells, ranks in ranks_of.items()
    ]


def _more(asked: Asked) -> list[str]:
    total = max((each.total for each in asked.answers.values()), default=0)
    if total <= MOST_VARIABLES:
        return []
    return [f"showing the first {MOST_VARIABLES} of {total:,} variables; name others, as in %mesh who w*"]


def _title(asked: Asked) -> str:
    return f"variables on {describe_ranks(asked.ranks)} of mesh {asked.mesh.name!r}"


def table_of(headers: Sequence[str], rows: list[list[object]], title: str) -> tuple[str, str] | None:
    """Return a table as text and as HTML, without a last column that is empty; None without rows."""
    shown = [at for at in range(len(headers)) if at < len(headers) - 1 or any(row[at] for row in rows)]
    names, cells = [headers[at] for at in shown], [[row[at] for at in shown] for row in rows]
    text = "\n".join([*filter(None, [title]), text_table(names, cells, len(cells))])
    return (text, html_table(names, cells, len(cells), title=title)) if rows else None


def tables_bundle(tables: list[tuple[str, str]], notes: list[str]) -> dict[str, str]:
    """Return tables with lines below."""
    below = "".join(f"<div style='opacity:.8'>{html.escape(each)}</div>" for each in notes)
    text = "\n".join([*(plain for plain, _ in tables), *notes])
    return {"text/plain": text, "text/html": "".join(page for _, page in tables) + below}
