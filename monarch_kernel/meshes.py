"""The meshes of a notebook, by name."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Mapping
from typing import Any

from monarch._actors.actormesh import ActorMesh
from monarch._actors.process import get_runtime
from monarch._actors.procmesh import ProcMesh
from monarch._actors.replace import replace
from monarch._cells.namespace import Namespace
from monarch.exceptions import DeviceMeshError, MonarchError
from monarch_kernel.header import Header, HeaderError, ranks_of
from monarch_kernel.recipe import Recipe
from monarch_kernel.running import Run

Stage = Callable[[str, Any], None]
"""Is told what begins, and the future that it ends with."""


class NoMesh(MonarchError):
    """There is no mesh, or none of that name."""


class Mesh:
    """A mesh that was started by ``%mesh up``: its processes, and the namespace on each."""

    def __init__(self, recipe: Recipe, procs: ProcMesh, cells: ActorMesh, release: Callable[[], object]) -> None:
        self.recipe = recipe
        self.name = recipe.name
        self.procs = procs
        self.cells = cells
        self.release = release
        """Gives the hosts back."""
        self.grouped = False
        """Whether its ranks have a process group that works."""
        self._rendezvous = ""
        """The file in which the ranks of the process group have found each other; they use it as long as it lives."""
        self.unfinished: list[Run] = []
        """Cells that were stopped while ranks were inside C calls, which they leave when those return."""

    def finishing(self) -> list[int]:
        """The ranks that are still inside a C call of a cell that was stopped."""
        self.unfinished = [run for run in self.unfinished if not run.done]
        return sorted({rank for run in self.unfinished for rank, _ in run.missing()})

    def form_group(self) -> None:
        """Makes the process group of the mesh, on all of its ranks together."""
        if not self.grouped:
            # In the session's folder, which goes with the session.
            self._forget_rendezvous()
            self._rendezvous = os.path.join(get_runtime().folder, f"rendezvous-{secrets.token_hex(4)}")
            cells: Any = self.cells
            cells.form_group.call(self._rendezvous).get()
            self.grouped = True

    def _forget_rendezvous(self) -> None:
        if self._rendezvous:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._rendezvous)
            self._rendezvous = ""

    def actors(self) -> list[ActorMesh]:
        """The meshes of actors that live in its processes, besides the namespaces."""
        found = list(get_runtime().meshes.values())
        return [
            mesh
            for mesh in found
            if mesh._state.procs == self.procs._state.procs and mesh._stopped is None and mesh != self.cells
        ]

    def replace(self, ranks: list[int]) -> None:
        """Puts new processes in the place of some ranks; namespaces and actors are there as they were at first."""
        made = replace(self.procs, ranks, [self.cells, *self.actors()])
        for each in made:
            each.get(20)
        self.grouped = False

    def end(self) -> None:
        """Ends its processes, and gives the hosts back."""
        try:
            self.procs.stop().get(15)
        finally:
            self._forget_rendezvous()
            self.release()

    def choose(self, header: Header) -> list[ActorMesh]:
        """The ranks that a cell is for, as views of the namespaces."""
        return choose(self.cells, header)


def choose(actors: ActorMesh, header: Header) -> list[ActorMesh]:
    """The actors that a cell is for: one view, or one of each if they make no regular view."""
    if header.axes is not None:
        return [actors.slice(**header.axes)]
    if header.ranks is None:
        return [actors]
    chosen = ranks_of(header.ranks, len(actors))
    if chosen == list(range(len(actors))):
        return [actors]
    return [actors._member(rank) for rank in chosen]


class Meshes:
    """All meshes of the notebook, and the one that is in use."""

    def __init__(self) -> None:
        self.by_name: dict[str, Mesh] = {}
        self.used: str | None = None

    def up(self, recipe: Recipe, names: Mapping[str, Any], stage: Stage) -> Mesh:
        """Starts a mesh, waits until it is there, and makes it the one in use.

        Args:
            recipe: what it is made of.
            names: the variables of the notebook.
            stage: is told of each stage.
        """
        name = recipe.name
        if name in self.by_name:
            raise HeaderError(f"there is a mesh {name!r} already; take it down first by %mesh down {name}")
        hosts, release = recipe.find_hosts(names)
        mesh: Mesh | None = None
        try:
            procs = hosts.spawn_procs(recipe.axes, name=name, env=recipe.variables() or None)
            cells: Any = procs.spawn(name, Namespace, name, recipe.device)
            mesh = Mesh(recipe, procs, cells, release)
            stage("ranks run", procs.initialized)
            stage("namespaces are ready", cells.initialized)
        except BaseException:
            # Nothing is left behind of what did not come to be.
            with contextlib.suppress(MonarchError):
                mesh.end() if mesh is not None else release()
            raise
        self.by_name[name] = mesh
        self.used = name
        return mesh

    def get(self, name: str | None) -> Mesh:
        """A mesh by its name; the one in use if none is given."""
        wanted = name or self.used
        if wanted is None:
            raise NoMesh("there is no mesh yet; start one by %mesh up, or %mesh up --procs 4")
        if wanted not in self.by_name:
            there = ", ".join(self.by_name) or "none"
            raise NoMesh(f"there is no mesh {wanted!r}; there are: {there}")
        return self.by_name[wanted]

    def use(self, name: str) -> Mesh:
        """Makes a mesh the one in use."""
        mesh = self.get(name)
        self.used = name
        return mesh

    def down(self, name: str | None) -> Mesh:
        """Ends a mesh."""
        mesh = self.get(name)
        del self.by_name[mesh.name]
        if self.used == mesh.name:
            self.used = next(iter(self.by_name), None)
        mesh.end()
        return mesh


def with_hint(error: DeviceMeshError, name: str) -> DeviceMeshError:
    """An error of a mesh that has lost ranks, with the magics that help."""
    hint = f"%mesh restart {name} starts it anew, empty; %%mesh {name}[RANKS] runs a cell on the others"
    return type(error)(f"{error}\n{hint}", mesh=error.mesh, ranks=error.ranks, results=error.results)
