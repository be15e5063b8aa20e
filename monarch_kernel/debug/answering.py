"""The commands of prompts on the ranks of a notebook's mesh, whose selected frame is that of the ``%mesh`` commands."""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterable

from monarch._kernel_api import Answering, Position, state_of, stops
from monarch_kernel.debug.places import placed
from monarch_kernel.debug.waiting import PauseWait
from monarch_kernel.meshes.mesh import Mesh


class MeshAnswering(Answering):
    """Answers commands about ranks of a mesh.

    Args:
        mesh: the mesh.
    """

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(stops())
        self.mesh = mesh

    @property
    def level(self) -> int:
        """The selected frame of the mesh."""
        return self.mesh.frame

    @level.setter
    def level(self, level: int) -> None:
        self.mesh.frame = level

    def procs(self, ranks: Iterable[int]) -> list[str]:
        """Return the processes of ranks."""
        procs = state_of(self.mesh.procs).procs
        return [procs.proc(rank) for rank in ranks]

    def placed(self, position: Position) -> Position:
        """Return a position with the numbers of cells."""
        return placed(position)

    def source_of(self, file: str) -> list[str]:
        """Return the lines of a cell that only the notebook has."""
        return linecache.getlines(file)

    def until(self, is_over: Callable[[], bool], seconds: float) -> None:
        """Wait until something is so, which a change among the stopped ranks tells."""
        PauseWait(is_over).wait(seconds)
