"""``%mesh up``, ``restart``, ``use`` and ``sync``, and the table of ``%mesh`` alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from monarch._kernel_api import axes_text, describe_ranks, duration_text
from monarch.exceptions import ArgumentError, MonarchError, SupervisionError
from monarch_kernel.commands.config import up_words
from monarch_kernel.commands.table import bundle_of as tables
from monarch_kernel.commands.tensors import tensors_bundle
from monarch_kernel.commands.up_options import recipe_of
from monarch_kernel.commands.warnings import sharing_of, warnings_of
from monarch_kernel.compat import display
from monarch_kernel.grammar.header import HeaderError
from monarch_kernel.grammar.parsers import parse
from monarch_kernel.meshes.deaths import naming_deaths
from monarch_kernel.meshes.detached import DetachedRecipe
from monarch_kernel.meshes.mesh import Mesh
from monarch_kernel.meshes.preempting import check_rule
from monarch_kernel.meshes.recipe import Recipe
from monarch_kernel.meshes.registry import NotebookMeshes
from monarch_kernel.output.progress import ProgressLine
from monarch_kernel.output.streams import Streams

_OPTIONS = {"axes": "size", "options": "--opt", "seconds": "--keep"}
"""By field of a recipe, the option of ``%mesh up``, where they have other names."""


class StartCommands:
    """The commands that start, choose and show meshes.

    Args:
        shell: the shell of the notebook.
        meshes: the meshes of the notebook.
        streams: returns the streams that show the output of ranks.
    """

    def __init__(self, shell: Any, meshes: NotebookMeshes, streams: Callable[[], Streams]) -> None:
        self._shell = shell
        self._meshes = meshes
        self._streams = streams
        self._told: set[str] = set()
        """Notes that were shown once."""

    def commands(self) -> dict[str, Callable[[list[str]], Any]]:
        """Return the action of each command."""
        return {
            "up": self.up,
            "sync": self.sync,
            "table": self.table,
            "use": self.use,
            "restart": self.restart,
        }

    def up(self, words: list[str]) -> None:
        """Start a mesh."""
        recipe = recipe_of([*up_words(self._meshes.settings, words), *words])
        if recipe.name in (*self._meshes.by_name, *self._meshes.coming()):
            print(self._again(recipe))
            return
        check_rule(recipe.on_preempt, self._shell.user_ns)
        self._up(recipe, "is up", begins=True)

    def _again(self, recipe: Recipe) -> str:
        """Keep a running mesh if the same is wanted, so that all cells of a notebook can run again; say so.

        Raises:
            HeaderError: another mesh of this name is running, or ranks of it have failed.
        """
        mesh = self._meshes.get(recipe.name)
        sizes = axes_text(mesh.procs.extent)
        differing = mesh.recipe.differing(recipe)
        if differing == ["axes"]:
            raise HeaderError(
                f"mesh {mesh.name!r} is already running, with {sizes}; change its size with %mesh resize {mesh.name} "
                f"{' '.join(f'{axis}={size}' for axis, size in recipe.axes.items())}, end it with %mesh down "
                f"{mesh.name}, or use another name"
            )
        if differing:
            options = ", ".join(_OPTIONS.get(each, f"--{each.replace('_', '-')}") for each in differing)
            raise HeaderError(
                f"mesh {mesh.name!r} is already running, with {sizes}, and differs in {options}; end it with "
                f"%mesh down {mesh.name}, or use another name"
            )
        if dead := mesh.dead():
            has, them = ("have", "them") if dead[1:] else ("has", "it")
            raise HeaderError(
                f"mesh {mesh.name!r} is already running, but {describe_ranks(dead)} {has} failed; replace {them} with "
                f"%mesh heal {mesh.name}"
            )
        now = "; cells now run on it" if self._meshes.used != mesh.name else ""
        self._meshes.use(mesh.name)
        return (
            f"mesh {mesh.name!r} is already up: {sizes}; its variables are kept (%mesh restart {mesh.name} clears "
            f"them){now}"
        )

    def _up(self, recipe: Recipe, what: str, begins: bool = False) -> None:
        progress = ProgressLine(self._shell)
        progress.show(f"starting mesh {recipe.name!r}")
        tell = self._tell()

        def step(line: str, keep: bool) -> None:
            if keep:
                tell(line)
            else:
                progress.show(f"starting mesh {recipe.name!r}: {line} ({progress.elapsed:.0f} s)")

        mesh = self._meshes.up(recipe, self._shell.user_ns, progress.wait, step)
        self._ready(mesh, what, progress, begins)
        try:
            self.sync_code(mesh)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(
                f"mesh {mesh.name!r} is up, but its hosts lack some Python files; the next cell copies them first"
            ) from None
        for warning in [*warnings_of(recipe), *sharing_of(mesh)]:
            print(f"note: {warning}")

    def sync(self, words: list[str]) -> None:
        """Copy changed Python files of the working directory to the hosts."""
        mesh = self._meshes.get(parse("sync", words).name)
        with naming_deaths(mesh):
            print(mesh.sync_code(again=True).text())

    def sync_code(self, mesh: Mesh) -> None:
        """Copy changed Python files to hosts elsewhere before ranks run code; tell why if that fails."""
        if not mesh.elsewhere:
            return
        try:
            with naming_deaths(mesh):
                mesh.sync_code()
        except (ArgumentError, MonarchError) as error:
            if isinstance(error, SupervisionError) and len(mesh.dead()) == len(mesh.procs):
                # The cell says so, too.
                return
            told = f"{mesh.name}: {error}"
            if told not in self._told:
                self._told.add(told)
                print(f"note: the Python files of this folder were not copied to the hosts: {error}")

    def _ready(self, mesh: Mesh, what: str, progress: ProgressLine, begins: bool = False) -> None:
        sizes = ", ".join(f"{label}={size}" for label, size in mesh.procs.sizes.items())
        others = "; cells now run on it" if begins and len(self._meshes.by_name) > 1 else ""
        progress.end(f"mesh {mesh.name!r} {what}: {sizes}, in {progress.elapsed:.2f} s{others}")
        if self._shell.user_ns.get(mesh.name) is not mesh.procs:
            print(f"note: the variable {mesh.name!r} was there before and stays; magics find the mesh by its name")
        if isinstance(mesh.recipe, DetachedRecipe):
            print(mesh.recipe.says())

    def table(self, words: list[str]) -> None:
        """Show the meshes and their ranks."""
        coming = self._meshes.coming()
        for name in coming:
            print(f"mesh {name!r} is being restarted")
        held = tensors_bundle(self._shell.user_ns)
        if not self._meshes.by_name and not coming:
            print("no mesh is running; start one with %mesh up")
        if held is not None:
            display(held)
        if self._meshes.by_name:
            display(tables(list(self._meshes.by_name.values()), self._streams().calls, self._meshes.used))
            for mesh in list(self._meshes.by_name.values()):
                left = mesh.recipe.left()
                if left is not None:
                    print(f"mesh {mesh.name!r}: the host allocation ends in {duration_text(left)}")

    def use(self, words: list[str]) -> None:
        """Make a mesh the one that cells run on if they name none."""
        print(f"cells now run on mesh {self._meshes.use(parse('use', words).name).name!r}")

    def down(self, words: list[str]) -> None:
        """End meshes of this notebook; the command also ends detached ones."""
        names: list[str | None] = parse("down", words).names or [None]
        for position, name in enumerate(names):
            before = self._meshes.used
            try:
                ended, used = self._meshes.down(name, self._tell()).name, self._meshes.used
            except KeyboardInterrupt as error:
                others = "".join(f"; mesh {each!r} was not ended" for each in names[position + 1 :])
                raise KeyboardInterrupt(f"{error}{others}") from None
            print(f"mesh {ended!r} is down" + (f"; cells now run on mesh {used!r}" if used and used != before else ""))

    def restart(self, words: list[str]) -> None:
        """End a mesh and start it again, empty."""
        name = self._meshes.get(parse("restart", words).name).name
        progress = ProgressLine(self._shell)
        progress.show(f"restarting mesh {name!r}")
        mesh = self._meshes.restart(name, self._shell.user_ns, self._tell())
        self._ready(mesh, "restarted (variables cleared)", progress)

    def _tell(self) -> Callable[[str], None]:
        """Return a function that shows a line in the current cell, even after its end."""
        return self._streams().place().write
