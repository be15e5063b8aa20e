"""The actions of the ``%mesh`` verbs: meshes start and end, variables go to ranks and come back."""

from __future__ import annotations

import shlex
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterator
from itertools import chain
from typing import Any

from monarch._kernel_api import describe_ranks, duration_text, member_at, parse_ranks
from monarch.exceptions import ArgumentError, MonarchError
from monarch_kernel.compat import display
from monarch_kernel.editing.pushed import Pushed
from monarch_kernel.grammar.help import bundle_of, unknown
from monarch_kernel.grammar.line_words import without_comment
from monarch_kernel.grammar.parsers import Usage, parse
from monarch_kernel.grammar.short_forms import asks_for_help, help_words
from monarch_kernel.grammar.suggest import did_you_mean
from monarch_kernel.meshes.deaths import naming_deaths
from monarch_kernel.meshes.detached import DetachedRecipe
from monarch_kernel.meshes.recipe import Recipe
from monarch_kernel.meshes.registry import Mesh, Meshes
from monarch_kernel.meshes.remote_names import one_line
from monarch_kernel.output.log import ending
from monarch_kernel.output.progress import Progress
from monarch_kernel.output.streams import Streams
from monarch_kernel.verbs.config import up_words
from monarch_kernel.verbs.table import bundle_of as tables
from monarch_kernel.verbs.tensors import tensors_bundle
from monarch_kernel.verbs.up import recipe_of
from monarch_kernel.verbs.warnings import sharing_of, warnings_of

_LOG_SHOWN = 256 << 10
"""Characters of the log that are shown if no --tail asks for more."""
_LOG_MOST = 16 << 20
"""Characters of the log that are shown at most."""


def _nothing(ranks: Collection[int], cell: int | None) -> str:
    """Return why a log is empty."""
    whose = f"{describe_ranks(ranks) if ranks else 'ranks'} {'has' if len(ranks) == 1 else 'have'}"
    return f"{whose} printed nothing{'' if cell is None else f' in cell [{cell}]'}\n"


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
        self.pushed = Pushed(shell, meshes)
        self._told: set[str] = set()
        """Notes that were shown once."""
        self.raw: dict[str, Callable[[str], Any]] = {}
        """Verbs that take the text after them as it is typed, since it is code."""

    def names(self) -> list[str]:
        """Return all verbs."""
        return sorted({*(name[3:] for name in dir(self) if name.startswith("do_")), *self.more, *self.raw})

    def run(self, line: str) -> Any:
        """Run one ``%mesh`` line."""
        verb, _, text = line.strip().partition(" ")
        if verb in self.raw and text.strip() not in ("--help", "-h"):
            return self.raw[verb](text)
        line = without_comment(line)
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
        recipe = recipe_of([*up_words(self._meshes.settings, words), *words])
        self._meshes.check_free(recipe.name)
        self._up(recipe, "is up")

    def _up(self, recipe: Recipe, what: str) -> None:
        progress = Progress(self._shell)
        progress.show(f"starting mesh {recipe.name!r}")
        tell = self._tell()

        def step(line: str, keep: bool) -> None:
            if keep:
                tell(line)
            else:
                progress.show(f"starting mesh {recipe.name!r}: {line} ({progress.elapsed:.0f} s)")

        mesh = self._meshes.up(recipe, self._shell.user_ns, progress.wait, step)
        self._ready(mesh, what, progress)
        self.sync_code(mesh)
        for warning in [*warnings_of(recipe), *sharing_of(mesh)]:
            print(f"note: {warning}")

    def do_sync(self, words: list[str]) -> None:
        """Copy changed Python files of the working directory to the hosts."""
        mesh = self._meshes.get(parse("sync", words).name)
        with naming_deaths(mesh):
            print(mesh.sync_code(again=True).text())

    def sync_code(self, mesh: Mesh) -> None:
        """Copy changed Python files to hosts elsewhere before ranks run code; tell why if that fails."""
        if not mesh.elsewhere:
            return
        try:
            mesh.sync_code()
        except (ArgumentError, MonarchError) as error:
            told = f"{mesh.name}: {error}"
            if told not in self._told:
                self._told.add(told)
                print(f"note: the Python files of this folder were not copied to the hosts: {error}")

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
        held = tensors_bundle(self._shell.user_ns)
        if not self._meshes.by_name and not coming and held is None:
            print("no mesh is running; start one with %mesh up")
        if held is not None:
            display(held)
        if self._meshes.by_name:
            display(tables(list(self._meshes.by_name.values()), self._streams().calls, self._meshes.used))
            for mesh in list(self._meshes.by_name.values()):
                left = mesh.recipe.left()
                if left is not None:
                    print(f"mesh {mesh.name!r}: the allocation of the hosts ends in {duration_text(left)}")

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
        self._ready(mesh, "restarted (variables cleared)", progress)

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
        self.pushed.note(mesh, names)

    def do_pull(self, words: list[str]) -> None:
        """Copy variables of the ranks to the notebook."""
        arguments = parse("pull", words)
        if arguments.target and len(arguments.names) > 1:
            raise Usage(f"%mesh pull: --as names one variable, not {len(arguments.names)}; pull them one by one")
        mesh = self._meshes.get(None)
        if arguments.rank is not None and not 0 <= arguments.rank < len(mesh.cells):
            raise Usage(
                f"%mesh pull: no rank {arguments.rank}; mesh {mesh.name!r} has ranks 0 to {len(mesh.cells) - 1}"
            )
        with naming_deaths(mesh):
            if arguments.rank is not None:
                one = member_at(mesh.cells, arguments.rank)
                calls = [one.pull.call_one(name) for name in arguments.names]
            else:
                calls = [mesh.cells.pull.call(name) for name in arguments.names]
            values: list[Any] = []
            for name, call in zip(arguments.names, calls, strict=True):
                with one_line(mesh, "%mesh pull", name):
                    values.append(call.get())
        targets = [arguments.target] if arguments.target else arguments.names
        self._shell.user_ns.update(zip(targets, values, strict=True))

    def do_log(self, words: list[str]) -> None:
        """Show the output of the ranks, or its end if it is very long."""
        options = parse("log", words)
        if options.tail is not None and options.tail < 1:
            raise Usage(f"%mesh log: --tail: expected at least 1, got {options.tail}")
        try:
            ranks = frozenset(parse_ranks(options.rank))
        except MonarchError as error:
            raise Usage(f"%mesh log: --rank: {error}") from None
        log = self._streams().log
        lines: Iterator[str] = log.lines(ranks, options.cell)
        if options.tail is not None:
            lines = iter(deque(lines, options.tail))
        if options.save:
            with open(options.save, "w", encoding="utf-8", errors="surrogatepass") as file:
                file.writelines(lines)
            return
        first = next(lines, None)
        if first is None:
            most = max((len(mesh.cells) for mesh in self._meshes.in_order()), default=0)
            absent = [rank for rank in sorted(ranks) if rank >= most]
            if most and absent:
                raise Usage(f"%mesh log: --rank: no mesh has {describe_ranks(absent)}; the last rank is {most - 1}")
            sys.stderr.write(_nothing(ranks, options.cell))
            return
        lines = chain([first], lines)
        for piece in ending(lines, _LOG_SHOWN if options.tail is None else _LOG_MOST):
            sys.stdout.write(piece)
