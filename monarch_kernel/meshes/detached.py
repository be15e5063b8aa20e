"""Meshes that outlive their notebook: ``%mesh up --keep``, ``%mesh list --all``, ``%mesh attach``, ``%mesh down``."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import msgspec

from monarch._kernel_api import (
    ActorMesh,
    DetachedMesh,
    HostMesh,
    Namespace,
    attach,
    duration_text,
    end,
    keep,
    parse_duration,
    records,
)
from monarch.exceptions import MonarchError
from monarch_kernel.editing.definitions import Defined
from monarch_kernel.magics.header import HeaderError
from monarch_kernel.meshes.recipe import Recipe
from monarch_kernel.meshes.registry import Mesh, Meshes


@dataclass
class DetachedRecipe(Recipe):
    """What a mesh is made of that outlives its notebook."""

    seconds: float = 0.0
    """How long it lives while no notebook has it."""
    kept: DetachedMesh | None = None

    def find_hosts(self, names: Mapping[str, Any]) -> tuple[HostMesh, Callable[[], object]]:
        """A host of its own on this machine, and what ends it."""
        if self.hosts:
            raise HeaderError(f"%mesh up --keep: a kept mesh is on this machine, so it takes no --hosts {self.hosts}")
        self.kept = keep(self.name, self.seconds)
        return self.kept.hosts, self.kept.end

    def says(self) -> str:
        """For the person who has started it."""
        return (
            f"mesh {self.name!r} is kept: when this kernel ends, in whatever way, or restarts, the mesh goes on for "
            f"{duration_text(self.seconds)}; %mesh attach {self.name} gets it back, %mesh down {self.name} ends it"
        )


@dataclass
class Book:
    """What one notebook leaves for the next."""

    recipe: Recipe
    definitions: list[Defined] = field(default_factory=list[Defined])


def _lost(mesh: Mesh) -> bool:
    """Whether the connection to a kept mesh of this notebook has broken, so that it may be attached again."""
    recipe = mesh.recipe
    return isinstance(recipe, DetachedRecipe) and recipe.kept is not None and not recipe.kept.attached


def detached_recipe(recipe: Recipe, duration: str) -> DetachedRecipe:
    """The same for a mesh that is kept for a duration as in ``2h``.

    Raises:
        HeaderError: it is no duration.
    """
    try:
        seconds = parse_duration(duration)
    except MonarchError as error:
        raise HeaderError(f"%mesh up --keep: {error}") from None
    return DetachedRecipe(**_plain(recipe), seconds=seconds)


def _plain(recipe: Recipe) -> dict[str, Any]:
    """What every recipe says."""
    return {each.name: getattr(recipe, each.name) for each in fields(Recipe)}


class Detaching:
    """The verbs for such meshes.

    Args:
        shell: of the notebook.
        meshes: of the notebook.
        down: ends a mesh of this notebook.
    """

    def __init__(self, shell: Any, meshes: Meshes, down: Callable[[list[str]], Any]) -> None:
        self._shell = shell
        self._meshes = meshes
        self._down = down

    def verbs(self) -> dict[str, Callable[[list[str]], Any]]:
        """By name."""
        return {"list": self.list, "attach": self.attach, "down": self.down}

    def watch(self) -> None:
        """Leaves after each cell what the next notebook needs to know of the meshes."""
        self._shell.events.register("post_run_cell", self._after_cell)

    def close(self) -> None:
        """Watches no more."""
        with contextlib.suppress(ValueError):
            self._shell.events.unregister("post_run_cell", self._after_cell)

    def list(self, words: list[str]) -> None:
        """Shows the meshes of this notebook; with ``--all`` those that are kept for this user as well."""
        if words not in ([], ["--all"]):
            raise HeaderError(f"%mesh list takes --all or nothing, and not {' '.join(words)!r}")
        for mesh in self._meshes.by_name.values():
            sizes = ", ".join(f"{label}={size}" for label, size in mesh.procs.sizes.items())
            used = ", in use" if mesh.name == self._meshes.used else ""
            print(f"mesh {mesh.name!r} of this notebook: {sizes}{used}")
        if not self._meshes.by_name:
            print("this notebook has no mesh")
        if not words:
            return
        kept = records()
        for record, state in kept:
            print(f"kept mesh {record.name!r}: {state}" if record is not None else f"a kept mesh: {state}")
        if not kept:
            print("no mesh is kept for this user; %mesh up NAME --keep 2h starts one")

    def attach(self, words: list[str]) -> None:
        """Gets a kept mesh back: its ranks with their variables, its actors, and what they have printed meanwhile."""
        if len(words) != 1:
            raise HeaderError("%mesh attach needs the name of a kept mesh; %mesh list --all shows which there are")
        name = words[0]
        before = self._meshes.by_name.get(name)
        if before is not None and not _lost(before):
            raise HeaderError(f"this notebook has a mesh {name!r} already; %mesh use {name} has cells go there")
        kept = attach(name)
        for problem in kept.problems:
            print(f"%mesh attach {name}: {problem}", file=sys.stderr)
        try:
            mesh = self._mesh_of(kept)
        except BaseException:
            kept.leave()
            raise
        self._meshes.add(mesh)
        sizes = ", ".join(f"{label}={size}" for label, size in mesh.procs.sizes.items())
        print(f"mesh {name!r} is back: {sizes}; it is kept for {duration_text(kept.seconds)} after this notebook")
        for actors in kept.actors:
            if actors != mesh.cells:
                print(f"  actors {actors._name!r}: {self._bind(actors)}")
        if kept.dropped:
            print(f"  {kept.dropped:,} bytes that were printed meanwhile had no room, those that came first")

    def down(self, words: list[str]) -> None:
        """Ends a mesh, also one that is kept and that no notebook has."""
        kept = {record.name for record, _ in records() if record is not None and record.alive()}
        if len(words) == 1 and words[0] in kept and words[0] not in self._meshes.by_name:
            end(words[0])
            print(f"mesh {words[0]!r} is down, and kept no more")
        else:
            self._down(words)

    def _mesh_of(self, kept: DetachedMesh) -> Mesh:
        """A mesh of this notebook, of what there is."""
        try:
            book = msgspec.json.decode(kept.book, type=Book)
        except msgspec.DecodeError:
            # A program that is no notebook has kept it, or one that died at the first cell.
            book = Book(Recipe(kept.name, {}))
        cells = [actors for actors in kept.actors if actors._state.cls is Namespace]
        if not cells and (kept.problems or not kept.procs):
            raise HeaderError(
                f"%mesh attach {kept.name}: "
                + ("its ranks have not said what they have; try again" if kept.problems else "it has no ranks yet")
            )
        recipe = DetachedRecipe(**_plain(book.recipe), seconds=kept.seconds, kept=kept)
        if cells:
            mine: Any = cells[0]
            procs = next(each for each in kept.procs if each._state.procs == mine._state.procs)
        else:
            # A program has made it, which needs no namespaces.
            procs = kept.procs[0]
            mine = procs.spawn(kept.name, Namespace, kept.name, recipe.device)
            mine.initialized.get()
        recipe.axes = recipe.axes or dict(procs.sizes)
        mesh = Mesh(recipe, procs, mine, kept.end)
        mesh.definitions.cells.extend(book.definitions)
        return mesh

    def _bind(self, actors: ActorMesh) -> str:
        """Gives actors a variable of their name, unless that is taken; says what became of them."""
        what = f"{actors._state.cls.__name__} on {len(actors)} ranks"
        name, names = actors._name, self._shell.user_ns
        if not name.isidentifier() or names.get(name, actors) != actors:
            return f"{what}, without a variable, as there is a {name!r} already"
        names[name] = actors
        return f"{what}, as the variable {name}"

    def _after_cell(self, _: Any) -> None:
        for mesh in list(self._meshes.by_name.values()):
            recipe = mesh.recipe
            if isinstance(recipe, DetachedRecipe) and recipe.kept is not None:
                book = msgspec.json.encode(Book(Recipe(**_plain(recipe)), mesh.definitions.cells))
                if recipe.kept.book != book:
                    recipe.kept.note(book)
