"""``%mesh help``: text of 80 columns for a terminal, tables for a notebook."""

from __future__ import annotations

import html
import textwrap
from collections.abc import Iterable
from difflib import get_close_matches

from monarch_kernel.grammar.arguments import WIDTH, Usage, label
from monarch_kernel.grammar.header import OPTIONS
from monarch_kernel.grammar.parsers import PARSERS, SECTIONS
from monarch_kernel.grammar.suggest import did_you_mean

Row = tuple[str, str]
"""A command or option, and its meaning."""
_COLUMN = 28
_LEAD = "%mesh help COMMAND shows the arguments of a command."
CELLS: list[Row] = [
    ("%%mesh [MESH][SLICE]", "run the cell on ranks, as in %%mesh m[gpus=0:4]"),
    ("%mesh CODE", "run one line on all ranks: %mesh x, y = %mesh x"),
    ("%%mesh ACTORS[SLICE]", "run the cell inside actors, with self"),
    ("%%mesh spawn NAME[(ARGS)]", "spawn actors of the cell's class"),
    ("  --on MESH[SLICE]", "on these ranks; all of the mesh in use if omitted"),
    ("  --new", "stop live actors of that name first"),
]


def bundle_of(command: str | None) -> dict[str, str]:
    """Return the help for a command, or for all, as a MIME bundle.

    Raises:
        Usage: no command has this name.
    """
    if command is None:
        tables = _overview()
        return {"text/plain": f"{_LEAD}\n\n{_text(tables)}", "text/html": f"<p>{_code(_LEAD)}</p>{_html(tables)}"}
    if command in ("spawn", "cells"):
        return bundle_of_cells()
    parser = PARSERS.get(command)
    if parser is None:
        raise Usage(unknown(command))
    rows = [(label(each), str(each.help) % {}) for each in parser.arguments]
    usage = " ".join(parser.format_usage().removeprefix("usage: ").split())
    head = f"<p><code>{html.escape(usage)}</code></p><p>{html.escape(str(parser.description))}</p>"
    foot = f"<p>{html.escape(parser.epilog)}</p>" if parser.epilog else ""
    return {"text/plain": parser.format_help().rstrip(), "text/html": head + _html({"": rows}) + foot}


OTHERS = {
    "status": "%mesh alone shows the meshes and their ranks",
    "stop": "%mesh down ends a mesh, %mesh kill replaces ranks, and the Stop button stops a cell",
    "start": "%mesh up starts a mesh",
}
"""Commands of other programs, with what does that here."""


def bundle_of_cells() -> dict[str, str]:
    """Return the help for the first line of a ``%%mesh`` cell as a MIME bundle."""
    tables = {"Cells": CELLS, "Options of cells": list(OPTIONS.items())}
    return {"text/plain": _text(tables), "text/html": _html(tables)}


def unknown(command: str, line: str = "") -> str:
    """Return the error for a command that does not exist.

    Args:
        command: the word after ``%mesh``.
        line: all that follows ``%mesh``, which may be meant as code.
    """
    if line.lstrip().startswith("["):
        return f"%mesh {line.strip()}: ranks belong in the first line of a cell, as in %%mesh [0]"
    if command in OTHERS:
        return f"unknown command {command!r} after %mesh; {OTHERS[command]}"
    close = get_close_matches(command, [*PARSERS, *OTHERS], 1)
    if close and close[0] in OTHERS:
        return f"unknown command {command!r} after %mesh; {OTHERS[close[0]]}"
    guess = did_you_mean(command, PARSERS)
    if guess:
        return f"unknown command {command!r} after %mesh{guess}"
    if len(line.split()) > 1:
        return f"%mesh {line.strip()}: neither a command of %mesh nor valid Python; %mesh help lists the commands"
    return f"unknown command {command!r} after %mesh: expected one of {', '.join(PARSERS)}; %mesh help explains them"


def _overview() -> dict[str, list[Row]]:
    commands = {title: [(each.synopsis(), each.summary) for each in parsers] for title, parsers in SECTIONS.items()}
    return {**commands, "Cells": CELLS, "Options of cells": list(OPTIONS.items())}


def _text(tables: dict[str, list[Row]]) -> str:
    return "\n\n".join("\n".join([title, *_lines(rows)]) for title, rows in tables.items())


def _lines(rows: Iterable[Row]) -> Iterable[str]:
    for typed, meaning in rows:
        first, *more = textwrap.wrap(meaning, WIDTH - _COLUMN - 2)
        if len(typed) < _COLUMN:
            yield f"  {typed:{_COLUMN}}{first}"
        else:
            yield from (f"  {typed}", " " * (_COLUMN + 2) + first)
        yield from (" " * (_COLUMN + 2) + line for line in more)


def _html(tables: dict[str, list[Row]]) -> str:
    left = "style='text-align:left'"
    body = ""
    for title, rows in tables.items():
        body += f"<tr><th colspan='2' {left}>{html.escape(title)}</th></tr>" if title else ""
        for typed, meaning in rows:
            body += f"<tr><td {left}><code>{html.escape(typed)}</code></td><td {left}>{html.escape(meaning)}</td></tr>"
    return f"<table>{body}</table>"


def _code(text: str) -> str:
    return html.escape(text).replace("%mesh help COMMAND", "<code>%mesh help COMMAND</code>")
