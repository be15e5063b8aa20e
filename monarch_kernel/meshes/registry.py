"""The meshes of a notebook, by name."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from monarch._kernel_api import (
    CellVariables,
    Future,
    Namespace,
    ProcMesh,
    Promise,
    current_node,
    state_of,
    to_its_end,
)
from monarch.exceptions import DeviceMeshError, MonarchError, SpawnError
from monarch_kernel.grammar.suggest import did_you_mean
from monarch_kernel.meshes.mesh import Mesh
from monarch_kernel.meshes.recipe import Recipe, Step
from monarch_kernel.meshes.unstopped import NotBegun, unstopped

Stage = Callable[[str, Any], None]
"""Called with the name of each stage and the future that ends it."""


class NoMeshError(MonarchError):
    """No mesh is running, or none of that name."""


class NotebookMeshes:
    """All meshes of the notebook, and the one in use.

    Args:
        variables: the variables of the notebook; each mesh gets one of its name, unless the user has one already.
    """

    def __init__(self, variables: dict[str, Any] | None = None) -> None:
        self.by_name: dict[str, Mesh] = {}
        """The meshes. Single operations by the thread that runs cells, and by that of an end or restart."""
        self.on_replaced: Callable[[Mesh, int], object] = lambda mesh, rank: None
        """Called with each rank that gets a new process, in the thread that starts it."""
        self.silent: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
        """Hides the output of calls made inside, for meshes added later."""
        self.on_added: Callable[[Mesh], object] = lambda mesh: None
        """Called with each new mesh, in the thread that starts it."""
        self.used: str | None = None
        """The name of the one in use. Written by the same threads."""
        self.settings: dict[str, str] = {}
        """Defaults of the notebook, by key of ``%mesh config``; thread that runs cells only."""
        self._variables = variables if variables is not None else {}
        self._changing: dict[str, Future[Mesh]] = {}
        """Restarts in progress, by name; added by the main thread, removed by the thread of the restart."""

    def add(self, mesh: Mesh) -> bool:
        """Add a mesh, and make it the one in use; return whether its name was free for a variable."""
        self.by_name[mesh.name] = mesh
        mesh.on_replaced, mesh.silent = self.on_replaced, self.silent
        self.on_added(mesh)
        self.used = mesh.name
        known = self._variables.get(mesh.name)
        free = mesh.name not in self._variables or (isinstance(known, ProcMesh) and known.name == mesh.name)
        if free:
            self._variables[mesh.name] = mesh.procs
        return free

    def up(self, recipe: Recipe, names: Mapping[str, Any], stage: Stage, step: Step | None = None) -> Mesh:
        """Start a mesh, wait until it is up, and make it the one in use.

        Args:
            recipe: the recipe of the mesh.
            names: the variables of the notebook.
            stage: called at each stage.
            step: shows the wait for hosts of a launcher.
        """
        name = recipe.name
        try:
            hosts, release = recipe.find_hosts(names, step)
        except KeyboardInterrupt as error:
            raise KeyboardInterrupt(str(error) or _stopped(recipe)) from None
        mesh: Mesh | None = None
        try:
            procs = recipe.spawn(hosts)
            cells: Any = procs.spawn(name, Namespace, name, recipe.device)
            mesh = Mesh(recipe, procs, cells, release)
            stage("starting ranks", procs.initialized)
            stage("initializing ranks", cells.initialized)
        except BaseException as error:
            # Clean up what was started; a second interrupt ends only the wait for that.
            outcome = _ended(name, mesh.end if mesh is not None else release)
            if isinstance(error, KeyboardInterrupt):
                raise KeyboardInterrupt(outcome or _stopped(recipe, "its processes have been ended")) from None
            if isinstance(error, DeviceMeshError) and error.advice:
                # A start that is refused will be refused again, unless something is changed.
                again = not isinstance(error, SpawnError)
                _advise(
                    error, outcome or _stopped(recipe, "its other processes have been ended" if again else "", again)
                )
            raise
        self.add(mesh)
        return mesh

    def restart(self, name: str | None, names: Mapping[str, Any], told: Callable[[str], None]) -> Mesh:
        """End a mesh and start it again, empty; an interrupt ends only the wait for it.

        Args:
            name: the name of the mesh; None for the one in use.
            names: the variables of the notebook.
            told: called with the outcome, if the wait was interrupted.

        Raises:
            KeyboardInterrupt: the wait was interrupted; the restart continues, if it had begun.
        """
        mesh, used = self.get(name), self.used
        # An interrupt may come at any point: known before it begins, the restart can be waited for in any case.
        change: Promise[Mesh] = Promise(current_node(), f"the restart of mesh {mesh.name!r}")
        try:
            self._changing[mesh.name] = change
            return unstopped(f"restart of {mesh.name}", lambda: self._restart(mesh, used, names), change)
        except NotBegun:
            self._changing.pop(mesh.name, None)
            raise KeyboardInterrupt(f"mesh {mesh.name!r} was not restarted; its variables are unchanged") from None
        except KeyboardInterrupt:
            change.add_done_callback(lambda _: told(_outcome(mesh.name, change)))
            raise KeyboardInterrupt(
                f"the restart of mesh {mesh.name!r} continues; its variables are lost, and cells wait until it is up"
            ) from None

    def _restart(self, mesh: Mesh, used: str | None, names: Mapping[str, Any]) -> Mesh:
        try:
            self._end(mesh)
            new = self.up(mesh.recipe, names, lambda _, future: (future.get(), None)[1])
            # The mesh in use stays the same.
            self.used = used if used in self.by_name else new.name
            new.restarted = mesh.replaced.last_cell
            return new
        finally:
            self._changing.pop(mesh.name, None)

    def coming(self) -> list[str]:
        """Return the meshes that are still being restarted."""
        return [name for name, change in list(self._changing.items()) if not change.done and name not in self.by_name]

    def get(self, name: str | None, actors: Callable[[], Sequence[str]] = tuple) -> Mesh:
        """Return a mesh by its name, or the one in use; wait for one that is being restarted.

        Args:
            name: the name of the mesh; None for the one in use.
            actors: returns names that would have done as well, for the error.
        """
        wanted = name or self.used or next(iter(self._changing), None)
        change = self._changing.get(wanted or "")
        if change is not None and not change.done and wanted not in self.by_name:
            print(f"waiting for mesh {wanted!r}, which is being restarted", file=sys.stderr)
            return change.get()
        if wanted is None:
            raise NoMeshError("no mesh is running; start one with %mesh up --procs 4")
        if wanted not in self.by_name:
            known = actors()
            others = f"; actors: {', '.join(known)}" if known else ""
            guess = did_you_mean(wanted, [*self.by_name, *known])
            if wanted == "spawn":
                guess = "; to spawn actors, write %%mesh spawn NAME"
            raise NoMeshError(f"no mesh named {wanted!r}; running: {', '.join(self.by_name) or 'none'}{others}{guess}")
        return self.by_name[wanted]

    def in_order(self) -> list[Mesh]:
        """Return the meshes, the one in use first."""
        return sorted(self.by_name.values(), key=lambda mesh: mesh.name != self.used)

    def use(self, name: str) -> Mesh:
        """Make a mesh the one in use."""
        mesh = self.get(name)
        self.used = name
        # It may have been deleted.
        self._variables.setdefault(mesh.name, mesh.procs)
        return mesh

    def down(self, name: str | None, told: Callable[[str], object] = print) -> Mesh:
        """End a mesh; an interrupt ends only the wait for its end.

        Args:
            name: the name of the mesh; None for the one in use.
            told: called with the error, if the wait was interrupted and the end fails.

        Raises:
            KeyboardInterrupt: the wait was interrupted; the mesh ends, if that had begun.
        """
        mesh = self.get(name)
        ended: Promise[None] = Promise(current_node(), f"the end of mesh {mesh.name!r}")
        try:
            unstopped(f"end of {mesh.name}", lambda: self._end(mesh), ended)
        except NotBegun:
            raise KeyboardInterrupt(f"mesh {mesh.name!r} was not ended, and keeps running") from None
        except KeyboardInterrupt:
            ended.add_done_callback(lambda _: _tell_failed_end(mesh.name, ended, told))
            raise KeyboardInterrupt(f"mesh {mesh.name!r} is ending; its ranks may still run for some seconds") from None
        return mesh

    def _end(self, mesh: Mesh) -> None:
        """End a mesh, in the thread of its end or restart; another one may end it at the same time."""
        if self.by_name.pop(mesh.name, None) is None:
            return
        if self.used == mesh.name:
            self.used = next(iter(self.by_name), None)
        if self._variables.get(mesh.name) is mesh.procs:
            del self._variables[mesh.name]
        current_node().part(CellVariables).by_uid.pop(state_of(mesh.procs).procs.uid, None)
        mesh.end()


def _tell_failed_end(name: str, ended: Future[None], told: Callable[[str], object]) -> None:
    error = ended.exception()
    if error is not None:
        told(f"the end of mesh {name!r} failed: {error}")


def _outcome(name: str, change: Future[Mesh]) -> str:
    """Describe the outcome of a restart."""
    error = change.exception()
    return (
        f"mesh {name!r} restarted (variables cleared)"
        if error is None
        else f"the restart of mesh {name!r} failed: {error}"
    )


def _advise(error: DeviceMeshError, todo: str) -> None:
    """Replace the advice of an error and drop the notes below it: both are for a mesh that goes on."""
    before, match, _ = error.message.rpartition(error.advice)
    error.message = (before if match else f"{error.message}\n") + todo
    error.args, error.advice = (error.message,), todo


def _ended(name: str, end: Callable[[], object]) -> str:
    """End what was started of a mesh; return how that differs from the end that was meant, empty if it does not."""
    try:
        to_its_end(current_node(), f"end of {name}", end)
    except KeyboardInterrupt:
        return f"mesh {name!r} was not started; its processes are still ending"
    except MonarchError as error:
        return f"mesh {name!r} was not started; ending its processes failed: {error}"
    return ""


def _stopped(recipe: Recipe, more: str = "", again: bool = True) -> str:
    """Say that a start has ended early, what became of what it had asked for, and how to start again."""
    parts = [f"mesh {recipe.name!r} was not started", more, recipe.given_back()]
    return "; ".join(part for part in [*parts, "run the line again to start it" if again else ""] if part)
