"""The meshes of the other kernels of this Jupyter server: copies of their state, which views only read."""

from __future__ import annotations

import os
from typing import NamedTuple

from monarch._kernel_api import Caption, MeshCopy, MeshModel, Programs, WatchedProgram, set_caption
from monarch_kernel.views.protocol import MeshSummary

_NAME, _SERVER = "JPY_SESSION_NAME", "JPY_PARENT_PID"
"""Environment variables of a kernel: the path of its notebook, and the process that has started it."""
RUNNING = ("running", "collective", "blocked", "paused")
"""States of ranks that have work."""


def own_caption() -> Caption:
    """Return the name of this kernel for others."""
    return Caption(os.path.basename(os.environ.get(_NAME, "")) or "notebook", os.environ.get(_SERVER, ""))


class Others:
    """The meshes of the other kernels. One thread looks; any may read."""

    def __init__(self) -> None:
        self._own = own_caption()
        set_caption(self._own)
        self._programs = Programs(self._is_of_this_server)

    def _is_of_this_server(self, program: WatchedProgram) -> bool:
        return bool(program.server) and program.server == self._own.server

    def look(self) -> None:
        """Ask all of them; waits for each, briefly."""
        self._programs.look()

    def copy_of(self, uid: str) -> MeshCopy | None:
        """Return the state of a mesh; None if no other kernel has it."""
        return self._programs.copy_of(uid)

    def has(self, pid: int, name: str) -> bool:
        """Return whether the process of a kernel has a mesh of this name."""
        return any(each.name == name for program, each in self._summaries() if program.pid == pid)

    def summaries(self) -> list[MeshSummary]:
        """Return their rows in the list of the panel."""
        return [each for _, each in self._summaries()]

    def _summaries(self) -> list[tuple[WatchedProgram, MeshSummary]]:
        running = self._programs.running
        return [(program, _summary(program, copy)) for program in running for copy in list(program.meshes.values())]


def _summary(program: WatchedProgram, copy: MeshCopy) -> MeshSummary:
    name, ranks, found = copy.read(lambda model: (model.name, len(model.ranks), counts(model)))
    owner = f"{program.title}, which does not answer" if program.trouble else program.title
    return MeshSummary(copy.uid, name, ranks, found.failed, found.running, owner=owner, paused=found.paused)


class Counts(NamedTuple):
    """How many ranks of a mesh are in some states."""

    failed: int = 0
    running: int = 0
    """Those that have work, paused ones too."""
    paused: int = 0


def counts(model: MeshModel) -> Counts:
    """Return how many ranks have failed, have work, and are paused."""
    states = [rank.state.value for rank in model.ranks]
    return Counts(states.count("failed"), sum(state in RUNNING for state in states), states.count("paused"))
