"""Ranks that ``--restart`` has replaced: said at the restart, and again before the next cell that runs there."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from threading import Lock

from monarch._kernel_api import copyable_here, current_node, describe_ranks, in_thread, state_of
from monarch_kernel.meshes.mesh import Mesh
from monarch_kernel.meshes.registry import NotebookMeshes
from monarch_kernel.meshes.replaced import in_order
from monarch_kernel.meshes.variable_errors import variables


class Restarts:
    """Announces replaced ranks.

    Args:
        meshes: the meshes of the notebook.
        tell: returns a function that shows a line in the current cell, even after its end.
    """

    def __init__(self, meshes: NotebookMeshes, tell: Callable[[], Callable[[str], None]]) -> None:
        self._meshes = meshes
        self._tell = tell
        self._lock = Lock()
        self._new: dict[str, set[int]] = {}
        """By mesh, ranks not announced yet. Lock: ``_lock``."""
        self._untold: dict[str, set[int]] = {}
        """By mesh, ranks on which no cell has run since. Lock: ``_lock``."""
        meshes.on_replaced = self._replaced

    def _replaced(self, mesh: Mesh, rank: int) -> None:
        if mesh.asked or not mesh.recipe.restart:
            # The command or the Stop that replaces it says so.
            return
        with self._lock:
            self._new.setdefault(mesh.name, set()).add(rank)
            self._untold.setdefault(mesh.name, set()).add(rank)
        in_thread(current_node(), "restarted", lambda: self._announce(mesh))

    def _announce(self, mesh: Mesh) -> None:
        names = variables(mesh, copyable_here)
        with self._lock:
            ranks = self._new.pop(mesh.name, set())
        if ranks:
            self._tell()(sentence(mesh, ranks, names))

    def remind(self, mesh: Mesh, ranks: Callable[[], Collection[int]]) -> None:
        """Before a cell, say once which of its ranks were restarted since the last.

        Args:
            mesh: the mesh of the cell.
            ranks: returns its ranks; called if some of the mesh were restarted.
        """
        if not self._untold.get(mesh.name):
            return
        due = set(ranks())
        with self._lock:
            untold = self._untold.get(mesh.name, set())
            due &= untold
            untold -= due
        if due:
            print(sentence(mesh, due, variables(mesh, copyable_here)), file=sys.stderr)


def sentence(mesh: Mesh, ranks: Collection[int], names: dict[str, list[int]]) -> str:
    """Say what restarted ranks lack.

    Args:
        mesh: the mesh of the ranks.
        ranks: at least one.
        names: the variables of cells that can be copied, with the ranks that have each.
    """
    others = [name for name, holders in names.items() if not set(ranks) <= set(holders)]
    holders = sorted({rank for name in others for rank in names[name]}.difference(ranks))
    cells = in_order(mesh.replaced.after.get(rank, "") for rank in ranks)
    but = " but the definitions of cells" if any(mesh.definitions.of(rank) for rank in ranks) else ""
    text = (
        f"{describe_ranks(ranks)} of mesh {mesh.name!r} {'was' if len(ranks) == 1 else 'were'} restarted"
        f"{' after ' + cells if cells else ''} and lost all variables{but}"
    )
    actors = ", ".join(state_of(each).name for each in mesh.users_actors_on(ranks))
    if actors:
        text += f", and actors their state ({actors})"
    if not holders:
        return text
    return f"{text} (other ranks have {', '.join(others[:12])}); %mesh heal --copy-from {holders[0]} copies them"
