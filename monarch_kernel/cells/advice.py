"""Errors as a notebook words them: magics instead of Python calls, and cells instead of temporary files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from monarch._kernel_api import Advice, ProcMesh, current_node, describe_ranks, state_of, verdicts_of
from monarch_kernel.cells.hints import magic
from monarch_kernel.compat import cell_number
from monarch_kernel.grammar.ranks import slice_text
from monarch_kernel.meshes.mesh import Mesh
from monarch_kernel.meshes.registry import NotebookMeshes

_FILE = re.compile(r"(?P<file>[^\s\"'(]*ipykernel_\d+/\d+\.py|<ipython-input-[^>]+>)(?::(?P<line>\d+))?")


class NotebookAdvice(Advice):
    """The advice of a notebook.

    Args:
        shell: the shell of the notebook.
        meshes: the meshes of the notebook.
    """

    def __init__(self, shell: Any, meshes: NotebookMeshes) -> None:
        self._shell = shell
        self._meshes = meshes

    def after_deaths(self, uid: str, dead: Sequence[int], alive: Sequence[int]) -> str:
        """Return the magics that help."""
        mesh = self._of(uid)
        if mesh is None:
            return super().after_deaths(uid, dead, alive)
        # Until the verdict there may be a restart; one that is over may be read of later.
        restarts = verdicts_of(current_node()).is_open(uid) or not set(dead) & set(mesh.dead())
        return self._after_deaths(mesh, dead, alive, restarts)

    def _after_deaths(self, mesh: Mesh, dead: Sequence[int], alive: Sequence[int], restarts: bool) -> str:
        them = "it" if len(dead) == 1 else "them"
        heal = f"{magic('heal', mesh, self._meshes)} replaces {describe_ranks(dead)}"
        name = mesh.name if mesh.name != self._meshes.used else ""
        fewer = mesh.hosts.instead_of_heal(name)
        if fewer:
            heal = f"no host is free for {describe_ranks(dead)}: {fewer}"
        elif mesh.recipe.restart and not restarts:
            heal += ", since --restart may replace no more ranks just now"
        elif mesh.recipe.restart and not mesh.hosts.lost():
            heal = f"--restart replaces {describe_ranks(dead)}, which lose{'s' if len(dead) == 1 else ''} all variables"
        if not alive:
            return heal
        # Their cell has ended too.
        left = f"{describe_ranks(alive)} {'is' if len(alive) == 1 else 'are'} alive"
        return f"{left}; {heal}; %%mesh {name}[{slice_text(alive)}] runs a cell without {them}"

    def after_failure_of(self, procs: ProcMesh, ranks: Sequence[int]) -> str:
        """Return what to do after deaths that no restart follows; empty if cells do not run on the mesh.

        Args:
            procs: the processes, all or some.
            ranks: the dead ranks.
        """
        mesh = self._of(state_of(procs).procs.uid)
        if mesh is None:
            return ""
        dead = mesh.dead()
        alive = [rank for rank in range(len(mesh.procs)) if rank not in dead]
        return self._after_deaths(mesh, dead, alive, False) if set(ranks) <= set(dead) else ""

    def after_failure(self, uid: str) -> str:
        """Return the magic that recreates failed actors."""
        mesh = self._of(uid)
        if mesh is None:
            return super().after_failure(uid)
        what = "--restart" if mesh.recipe.restart else magic("heal", mesh, self._meshes)
        return f"{what} recreates failed actors; their state is lost"

    def after_stop(self) -> str:
        """Return the magic that starts a mesh."""
        return "start a new mesh with %mesh up"

    def _of(self, uid: str) -> Mesh | None:
        return next((each for each in self._meshes.in_order() if state_of(each.procs).procs.uid == uid), None)

    def placed(self, text: str) -> str:
        """Return a text with ``cell [7]`` for the file of a cell."""
        return _FILE.sub(self._place, text)

    def _place(self, match: re.Match[str]) -> str:
        number = cell_number(self._shell, match["file"])
        if number is None:
            return match[0]
        return f"cell [{number}]" + (f" line {match['line']}" if match["line"] else "")
