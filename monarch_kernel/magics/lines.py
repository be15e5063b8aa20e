"""The verbs of ``%mesh``: meshes start and end, variables go to ranks and come back."""

from __future__ import annotations

import shlex
import sys
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from monarch._kernel_api import member_at
from monarch.actor import Restart
from monarch.config import CHECK_COLLECTIVES, ISOLATE_GPUS
from monarch_kernel.compat import display
from monarch_kernel.magics.help import bundle_of, unknown
from monarch_kernel.magics.remote_names import one_line
from monarch_kernel.magics.short_forms import asks_for_help, help_words
from monarch_kernel.magics.suggest import did_you_mean
from monarch_kernel.magics.verbs import Usage, parse
from monarch_kernel.meshes.deaths import naming_deaths
from monarch_kernel.meshes.detached import DetachedRecipe, detached_recipe
from monarch_kernel.meshes.recipe import Recipe, roles_of, usual_axes
from monarch_kernel.meshes.registry import Mesh, Meshes
from monarch_kernel.meshes.table import bundle_of as tables
from monarch_kernel.meshes.warnings import sharing_of, warnings_of
from monarch_kernel.output.log import ending
from monarch_kernel.output.progress import Progress
from monarch_kernel.output.streams import Streams

_LOG_SHOWN = 256 << 10
"""Characters of the log that are shown if no --tail asks for more."""
_LOG_MOST = 16 << 20
"""Characters of the log that are shown at most."""


class Verbs:
    """The actions behind ``%mesh VERB``.

    Args:
        shell: of the notebook.
        meshes: of the notebook.
        streams: returns the streams that show the output of ranks.
    """

    def __init__(self, shell: Any, meshes: Meshes, streams: Callable[[], Streams]) -> None:
        self._shell = shell
        self._meshes = meshes
        self._streams = streams
        self.more: dict[str, Callable[[list[str]], Any]] = {}
        """Verbs that other modules add."""

    def names(self) -> list[str]:
        """Return all verbs."""
        return sorted({*(name[3:] for name in dir(self) if name.startswith("do_")), *self.more})

    def run(self, line: str) -> Any:
        """Run one ``%mesh`` line."""
        try:
            words = shlex.split(line)
        except ValueError as error:
            raise Usage(f"cannot understand {line.strip()!r}: {error}") from None
        if asks_for_help(words):
            words = ["help", *help_words(words)]
        verb = words.pop(0) if words else "table"
        action = self.more.get(verb) or getattr(self, f"do_{verb}", None)
        if action is None:
            raise Usage(unknown(verb, line))
        return action(words)

    def do_help(self, words: list[str]) -> None:
        """Show all verbs, or the arguments of one."""
        display(bundle_of(parse("help", words).verb))

    def do_up(self, words: list[str]) -> None:
        """Start a mesh."""
        arguments = parse("up", words)
        if arguments.name.isdecimal() and arguments.procs is None and arguments.gpus is None and not arguments.roles:
            arguments.name, arguments.procs = "mesh", int(arguments.name)
        if arguments.procs is not None and arguments.gpus is not None:
            raise Usage("%mesh up: give either --procs or --gpus, not both")
        if not arguments.name.isidentifier():
            raise Usage(f"%mesh up: invalid mesh name {arguments.name!r}: must be a Python identifier")
        for axis in ("procs", "gpus"):
            if getattr(arguments, axis) is not None and getattr(arguments, axis) < 1:
                raise Usage(f"%mesh up: --{axis}: expected at least 1, got {getattr(arguments, axis)}")
        axes = {axis: getattr(arguments, axis) for axis in ("procs", "gpus") if getattr(arguments, axis) is not None}
        env: dict[str, str] = {}
        for pair in arguments.env:
            key, equals, value = pair.partition("=")
            if not equals or not key:
                raise Usage(f"%mesh up: --env: expected K=V, got {pair!r}")
            env[key] = value
        if arguments.check_collectives:
            env[CHECK_COLLECTIVES.variable] = "1"
        if arguments.isolate_gpus:
            env[ISOLATE_GPUS.variable] = "1"
        if arguments.spares < 0:
            raise Usage(f"%mesh up: --spares: expected at least 0, got {arguments.spares}")
        restart = arguments.restart if arguments.restart != "on-failure" else str(Restart().most)
        if restart is not None and not restart.isdecimal():
            raise Usage(f"%mesh up: --restart: expected restarts per minute, or on-failure, got {restart!r}")
        roles = roles_of(arguments.roles)
        if roles and axes:
            raise Usage("%mesh up: --roles sets the number of ranks; omit --procs and --gpus")
        axes = axes or ({} if roles else usual_axes(arguments.device))
        recipe = Recipe(arguments.name, axes, env, arguments.hosts, arguments.key, arguments.device)
        recipe.restart, recipe.spares, recipe.roles = int(restart or 0), arguments.spares, roles
        recipe.silence = arguments.silence
        self._up(detached_recipe(recipe, arguments.keep) if arguments.keep else recipe, "is up")

    def _up(self, recipe: Recipe, what: str) -> None:
        progress = Progress(self._shell)
        progress.show(f"starting mesh {recipe.name!r}")
        mesh = self._meshes.up(recipe, self._shell.user_ns, progress.wait)
        self._ready(mesh, what, progress)
        for warning in [*warnings_of(recipe), *sharing_of(mesh)]:
            print(f"note: {warning}")

    def _ready(self, mesh: Mesh, what: str, progress: Progress) -> None:
        sizes = ", ".join(f"{label}={size}" for label, size in mesh.procs.sizes.items())
        progress.end(f"mesh {mesh.name!r} {what}: {sizes}, in {progress.elapsed:.2f} s")
        if isinstance(mesh.recipe, DetachedRecipe):
            print(mesh.recipe.says())

    def do_table(self, words: list[str]) -> None:
        """Show the meshes and their ranks."""
        coming = self._meshes.coming()
        for name in coming:
            print(f"mesh {name!r} is being restarted")
        if not self._meshes.by_name:
            if not coming:
                print("no mesh is running; start one with %mesh up")
            return
        if self._meshes.by_name:
            display(tables(list(self._meshes.by_name.values()), self._streams().calls, self._meshes.used))

    def do_use(self, words: list[str]) -> None:
        """Make a mesh the one that cells run on if they name none."""
        print(f"cells now run on mesh {self._meshes.use(parse('use', words).name).name!r}")

    def do_down(self, words: list[str]) -> None:
        """End meshes."""
        for name in parse("down", words).names or [None]:
            print(f"mesh {self._meshes.down(name).name!r} is down")

    def do_restart(self, words: list[str]) -> None:
        """End a mesh and start it again, empty."""
        name = self._meshes.get(parse("restart", words).name).name
        progress = Progress(self._shell)
        progress.show(f"restarting mesh {name!r}")
        mesh = self._meshes.restart(name, self._shell.user_ns, self._tell())
        self._ready(mesh, "is up again, with empty namespaces", progress)

    def _tell(self) -> Callable[[str], None]:
        """Return a function that shows a line in the current cell, even after its end."""
        return self._streams().place().write

    def do_push(self, words: list[str]) -> None:
        """Copy variables of the notebook to all ranks."""
        names = parse("push", words).names
        missing = [name for name in names if name not in self._shell.user_ns]
        if missing:
            guess = did_you_mean(missing[0], [name for name in self._shell.user_ns if not name.startswith("_")])
            raise Usage(f"%mesh push: the notebook has no variable {missing[0]!r}{guess}")
        mesh = self._meshes.get(None)
        with naming_deaths(mesh), one_line(mesh, "%mesh push"):
            mesh.cells.push.call({name: self._shell.user_ns[name] for name in names}).get()

    def do_pull(self, words: list[str]) -> None:
        """Copy a variable of the ranks to the notebook."""
        arguments = parse("pull", words)
        mesh = self._meshes.get(None)
        if arguments.rank is not None and not 0 <= arguments.rank < len(mesh.cells):
            raise Usage(
                f"%mesh pull: no rank {arguments.rank}; mesh {mesh.name!r} has ranks 0 to {len(mesh.cells) - 1}"
            )
        with naming_deaths(mesh), one_line(mesh, "%mesh pull"):
            if arguments.rank is not None:
                value = member_at(mesh.cells, arguments.rank).pull.call_one(arguments.name).get()
            else:
                value = mesh.cells.pull.call(arguments.name).get()
        self._shell.user_ns[arguments.target or arguments.name] = value

    def do_log(self, words: list[str]) -> None:
        """Show the output of the ranks, or its end if it is very long."""
        options = parse("log", words)
        if options.tail is not None and options.tail < 1:
            raise Usage(f"%mesh log: --tail: expected at least 1, got {options.tail}")
        log = self._streams().log
        lines: Iterable[str] = log.lines(options.rank, options.cell)
        if options.tail is not None:
            lines = deque(lines, options.tail)
        if options.save:
            with open(options.save, "w", encoding="utf-8", errors="surrogatepass") as file:
                file.writelines(lines)
            return
        for piece in ending(lines, _LOG_SHOWN if options.tail is None else _LOG_MOST):
            sys.stdout.write(piece)
