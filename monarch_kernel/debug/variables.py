"""``%mesh vars``: the variables of the selected frame, on paused, running and idle ranks."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from monarch._kernel_api import (
    MOST_VARIABLES,
    Frame,
    Position,
    Variable,
    ask_ranks,
    describe_ranks,
    is_tuple,
    request,
    state_of,
    variables_at,
)
from monarch_kernel.commands.who import HEADERS, PATIENCE, table_of, tables_bundle
from monarch_kernel.commands.who_lines import lines_of
from monarch_kernel.compat import display
from monarch_kernel.debug.grouped import grouped
from monarch_kernel.debug.pausing import Pausing
from monarch_kernel.debug.places import innermost
from monarch_kernel.grammar.arguments import Usage
from monarch_kernel.grammar.parsers import parse
from monarch_kernel.meshes.mesh import Mesh
from monarch_kernel.meshes.registry import NotebookMeshes

_RANKS = re.compile(r"\[.*|[\d,:-]+")


class VariablesCommand:
    """The command that lists the variables of a frame.

    Args:
        meshes: the meshes of the notebook.
        pausing: the commands beside it, which find the ranks that are meant.
    """

    def __init__(self, meshes: NotebookMeshes, pausing: Pausing) -> None:
        self._meshes = meshes
        self._pausing = pausing

    def commands(self) -> dict[str, Callable[[list[str]], None]]:
        """Return the command by name."""
        return {"vars": self.vars}

    def vars(self, words: list[str]) -> None:
        """Show the variables of the selected frame, as a table."""
        place: list[str] = []
        patterns: list[str] = list(parse("vars", words).words)
        if patterns and patterns[0].partition("[")[0] in self._meshes.by_name:
            place.append(patterns.pop(0))
        if patterns and _RANKS.fullmatch(patterns[0]):
            place.append(patterns.pop(0))
        mesh, ranks = self._pausing.named("vars", place)
        asked = request(variables_at, mesh.frame, patterns)
        display(_shown(mesh, ask_ranks(state_of(mesh.procs).procs, ranks, asked, PATIENCE), patterns))


def _shown(mesh: Mesh, answers: dict[int, Any], patterns: list[str]) -> dict[str, str]:
    silent = {rank: str(answer) for rank, answer in answers.items() if not is_tuple(answer)}
    silent |= {rank: answer[0] for rank, answer in answers.items() if is_tuple(answer) and answer[1] < 0}
    found = {rank: answers[rank] for rank in sorted(answers.keys() - silent.keys())}
    rows = lines_of({rank: [Variable(*each) for each in some] for rank, (_, _, some) in found.items()}, MOST_VARIABLES)
    places = grouped((rank, _line(where)) for rank, (where, _, _) in found.items())
    title = "; ".join(f"{describe_ranks(ranks)} of mesh {mesh.name!r}: {where}" for where, ranks in places[:_PLACES])
    title += f"; and {len(places) - _PLACES} other places" if len(places) > _PLACES else ""
    notes = [f"{describe_ranks(ranks)}: {text}" for text, ranks in grouped(sorted(silent.items()))]
    total = max((count for _, count, _ in found.values()), default=0)
    if total > MOST_VARIABLES:
        notes.append(f"showing the first {MOST_VARIABLES} of {total:,} variables; name others, as in %mesh vars w*")
    if not rows and found:
        if patterns:
            raise Usage(f"%mesh vars: no variable matches {' or '.join(map(repr, patterns))}; %mesh vars lists all")
        notes.insert(0, f"no variables ({title})")
    table = table_of(HEADERS, [list(row) for row in rows], title)
    return tables_bundle([table] if table is not None else [], notes)


def _line(where: tuple[str, int, str, str] | str) -> str:
    return innermost(Position("", [Frame(*where)])).removeprefix(" at ") if is_tuple(where) else _NOWHERE


_NOWHERE = "no code is running; variables of cells"
_PLACES = 3
"""Lines of code that the title names."""
