"""``%mesh kill``: ranks are killed at once, and new ones start in their place."""

from __future__ import annotations

from collections.abc import Callable

from monarch._kernel_api import describe_ranks
from monarch_kernel.calls.record import CallRecord
from monarch_kernel.commands.heal_lines import new_lines
from monarch_kernel.grammar.arguments import Usage
from monarch_kernel.grammar.parsers import parse
from monarch_kernel.grammar.ranks import ranks_in_words
from monarch_kernel.meshes.activity import busy_ranks
from monarch_kernel.meshes.mesh import Mesh
from monarch_kernel.meshes.registry import NotebookMeshes
from monarch_kernel.meshes.variable_errors import variables

_NAMED = 8
"""Names of lost variables that are listed; the rest is counted."""


class Killing:
    """The command that kills ranks.

    Args:
        meshes: the meshes of the notebook.
        calls: returns the calls of the notebook.
    """

    def __init__(self, meshes: NotebookMeshes, calls: Callable[[], CallRecord]) -> None:
        self._meshes = meshes
        self._calls = calls

    def kill(self, words: list[str]) -> None:
        """Kill ranks at once and start new ones in their place."""
        parsed: list[str] = parse("kill", words).words
        mesh = self._meshes.get(parsed.pop(0) if parsed and parsed[0].isidentifier() else None)
        busy = busy_ranks(mesh, self._calls())
        ranks = ranks_in_words("kill", " ".join(parsed), len(mesh.procs)) if parsed else sorted(busy)
        if not ranks:
            raise Usage(f"%mesh kill: no rank of mesh {mesh.name!r} is busy; name the ranks, as in %mesh kill 0,2")
        print("\n".join(self.killed(mesh, ranks)))

    def killed(self, mesh: Mesh, ranks: list[int]) -> list[str]:
        """Kill ranks, start new ones, and describe it in lines."""
        busy, lost = busy_ranks(mesh, self._calls()), variables(mesh)
        new = mesh.kill(ranks)
        doing: dict[str, list[int]] = {}
        for rank in ranks:
            doing.setdefault(busy[rank].text() if rank in busy else "idle", []).append(rank)
        lines = [f"killed {describe_ranks(group)} of mesh {mesh.name!r} ({text})" for text, group in doing.items()]
        # New ranks have the definitions of cells.
        kept = {name for name, holders in variables(mesh).items() if set(ranks) <= set(holders)}
        names = [name for name, holders in lost.items() if name not in kept and set(holders) & set(ranks)]
        what = f"variables and actor state of {describe_ranks(ranks)}{': ' + _some(names) if names else ''}"
        return [*lines, f"lost: {what}", *new_lines(mesh, new, False)]


def _some(names: list[str]) -> str:
    """Return the first names, and how many there are besides."""
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")
