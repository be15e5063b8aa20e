"""Meshes that outlive their notebook: ``%mesh up --keep``, ``%mesh list --all``, ``%mesh attach``, ``%mesh down``."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import msgspec

from monarch._kernel_api import (
    ActorMesh,
    DetachedMesh,
    Namespace,
    attach,
    describe_ranks,
    duration_text,
    end,
    has_attached,
    leave,
    records,
    state_of,
)
from monarch_kernel.grammar.header import HeaderError
from monarch_kernel.grammar.parsers import parse
from monarch_kernel.meshes.activity import vitals_of
from monarch_kernel.meshes.detached import DetachedRecipe, Notes, fields_of, is_lost
from monarch_kernel.meshes.mesh import Mesh
from monarch_kernel.meshes.recipe import Recipe
from monarch_kernel.meshes.registry import NotebookMeshes


class Detaching:
    """The commands for detached meshes.

    Args:
        shell: the shell of the notebook.
        meshes: the meshes of the notebook.
        down: ends a mesh of this notebook.
        tell: returns a function that shows a line in the current cell, even after its end.
    """

    def __init__(
        self,
        shell: Any,
        meshes: NotebookMeshes,
        down: Callable[[list[str]], Any],
        tell: Callable[[], Callable[[str], None]],
    ) -> None:
        self._shell = shell
        self._tell = tell
        self._meshes = meshes
        self._down = down

    def commands(self) -> dict[str, Callable[[list[str]], Any]]:
        """Return the action of each command."""
        return {"list": self.list, "attach": self.attach, "down": self.down}

    def watch(self) -> None:
        """After each cell, record what the next notebook needs to know of the meshes."""
        self._shell.events.register("post_run_cell", self._after_cell)

    def close(self) -> None:
        """Stop recording."""
        with contextlib.suppress(ValueError):
            self._shell.events.unregister("post_run_cell", self._after_cell)

    def list(self, words: list[str]) -> None:
        """List the meshes of this notebook; with ``--all`` also the detached meshes of this user."""
        every = parse("list", words).all
        for mesh in self._meshes.by_name.values():
            sizes = ", ".join(f"{label}={size}" for label, size in mesh.procs.sizes.items())
            used = ", in use" if mesh.name == self._meshes.used else ""
            kept = (
                isinstance(mesh.recipe, DetachedRecipe)
                and f", kept for {duration_text(mesh.recipe.seconds)} after the notebook ends"
            )
            print(f"mesh {mesh.name!r} of this notebook: {sizes}{used}{kept or ''}")
        if not self._meshes.by_name:
            print("this notebook has no meshes")
        if not every:
            return
        known = [
            (record, state)
            for record, state in records()
            if record is None or record.name not in self._meshes.by_name or is_lost(self._meshes.by_name[record.name])
        ]
        for record, state in known:
            print(f"detached mesh {record.name!r}: {state}" if record is not None else f"a detached mesh: {state}")
        if not known:
            print("this user has no other detached meshes; start one with %mesh up NAME --keep 2h")

    def attach(self, words: list[str]) -> None:
        """Attach a detached mesh: its ranks with their variables, its actors, and their output since."""
        name = parse("attach", words).name
        before = self._meshes.by_name.get(name)
        if before is not None and not is_lost(before):
            raise HeaderError(f"this notebook already has a mesh {name!r}; run cells on it with %mesh use {name}")
        try:
            detached, mesh = self._take(name)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(
                f"mesh {name!r} was not attached; it stays detached and keeps its variables; %mesh attach "
                f"{name} attaches it, %mesh down {name} ends it"
            ) from None
        self._meshes.add(mesh)
        now = "; cells now run on it" if len(self._meshes.by_name) > 1 else ""
        sizes = ", ".join(f"{label}={size}" for label, size in mesh.procs.sizes.items())
        print(f"attached mesh {name!r}: {sizes}; it outlives this notebook by {duration_text(detached.seconds)}{now}")
        for actors in detached.actors:
            if actors != mesh.cells:
                print(f"  actors {state_of(actors).name!r}: {self._bind(actors)}")
        running = [rank for rank, vitals in vitals_of(mesh).items() if vitals.place]
        if running:
            print(
                f"  {describe_ranks(running)} {'is' if len(running) == 1 else 'are'} still in a cell of the earlier "
                f"notebook; new cells wait for it, and stopping a waiting cell ends it too"
            )
        if detached.lost_tensors:
            print(
                f"  {detached.lost_tensors} distributed tensors of the earlier notebook are lost and their memory "
                f"is freed; to keep them, use monarch.save and monarch.load (the ranks still have their variables)"
            )
        if detached.dropped:
            print(f"  the first {detached.dropped:,} bytes printed while detached were dropped (buffer full)")

    def _take(self, name: str) -> tuple[DetachedMesh, Mesh]:
        """Attach a detached mesh, and make it a mesh of this notebook; it is left again if that fails."""
        tell, before = self._tell(), has_attached(name)
        try:
            detached = attach(name, tell=lambda line, _: tell(f"mesh {name!r}: {line}"))
            for problem in detached.problems:
                print(f"%mesh attach {name}: {problem}", file=sys.stderr)
            mesh = self._mesh_of(detached)
            used = state_of(mesh.procs).procs.hosts
            if any(host.id in used for host in detached.missing):
                advice = (
                    f"if a lost host comes back, restart this kernel and attach again to recover its ranks; otherwise "
                    f"%mesh heal {name} replaces its ranks, or %mesh resize {name} removes lost hosts"
                )
                print(f"%mesh attach {name}: {advice}", file=sys.stderr)
            elif detached.missing:
                print(f"%mesh attach {name}: no rank of the mesh is running", file=sys.stderr)
            return detached, mesh
        except BaseException:
            # By its name: an interrupt may come as the call above returns. A program may have it for itself.
            if not before:
                leave(name)
            raise

    def down(self, words: list[str]) -> None:
        """End a mesh, or a detached mesh that no notebook is attached to."""
        arguments = parse("down", words)
        if arguments.all and arguments.names:
            raise HeaderError("%mesh down: give either mesh names or --all, not both")
        if arguments.all and not self._meshes.by_name:
            print("no mesh is running")
            return
        names: list[str] = list(self._meshes.by_name) if arguments.all else arguments.names
        detached = {record.name for record, _ in records() if record is not None and record.alive()}
        for name in names:
            if name not in detached:
                # Before any mesh is ended.
                self._meshes.get(name)
        for name in names:
            if name in detached and name not in self._meshes.by_name:
                end(name)
                print(f"mesh {name!r} is down")
            else:
                self._down([name])
        if not names:
            self._down([])

    def _mesh_of(self, detached: DetachedMesh) -> Mesh:
        """Make a detached mesh a mesh of this notebook."""
        try:
            notes = msgspec.json.decode(detached.notes, type=Notes)
        except msgspec.DecodeError:
            # A program detached it, or a notebook that died in its first cell.
            hosts = str(detached.on_count or "")
            notes = Notes(Recipe(detached.name, {}, hosts=hosts, on=detached.on, options=detached.options))
        cells = [actors for actors in detached.actors if state_of(actors).cls is Namespace]
        if not cells and (detached.problems or not detached.procs):
            raise HeaderError(
                f"%mesh attach {detached.name}: "
                + ("its ranks did not report their actors; try again" if detached.problems else "it has no ranks yet")
            )
        recipe = DetachedRecipe(**fields_of(notes.recipe), seconds=detached.seconds, detached=detached)
        if cells:
            namespaces: Any = cells[0]
            procs = next(each for each in detached.procs if state_of(each).procs == state_of(cells[0]).procs)
        else:
            # A program made it, without namespaces.
            procs = detached.procs[0]
            namespaces = procs.spawn(detached.name, Namespace, detached.name, recipe.device)
            namespaces.initialized.get()
        recipe.take_over(detached)
        recipe.axes = recipe.axes or dict(list(procs.sizes.items())[state_of(procs).procs.host_axes :])
        mesh = Mesh(recipe, procs, namespaces, detached.end)
        mesh.definitions.cells.extend(notes.definitions)
        return mesh

    def _bind(self, actors: ActorMesh) -> str:
        """Bind actors to a variable of their name unless it is taken; describe the result."""
        what = f"{state_of(actors).cls.__name__} on {len(actors)} ranks"
        name, names = state_of(actors).name, self._shell.user_ns
        if not name.isidentifier():
            return f"{what}, not bound to a variable: {name!r} is not a Python identifier"
        if names.get(name, actors) != actors:
            return f"{what}, not bound to a variable: the notebook already has a variable {name!r}"
        names[name] = actors
        return f"{what}, as the variable {name}"

    def _after_cell(self, _: Any) -> None:
        for mesh in list(self._meshes.by_name.values()):
            recipe = mesh.recipe
            if isinstance(recipe, DetachedRecipe) and recipe.detached is not None:
                notes = msgspec.json.encode(Notes(Recipe(**fields_of(recipe)), mesh.definitions.cells))
                if recipe.detached.notes != notes:
                    recipe.detached.note(notes)
