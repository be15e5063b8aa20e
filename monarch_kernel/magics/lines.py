"""The verbs of ``%mesh``: meshes start and end, variables go to ranks and come back."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable
from typing import Any

from monarch.actor import Restart
from monarch.config import CHECK_COLLECTIVES
from monarch_kernel.magics.header import OPTIONS, HeaderError
from monarch_kernel.meshes.detached import DetachedRecipe, detached_recipe
from monarch_kernel.meshes.recipe import DEVICES, Recipe, roles_of, usual_axes
from monarch_kernel.meshes.registry import Mesh, Meshes
from monarch_kernel.output.progress import Progress
from monarch_kernel.output.streams import Streams

USAGE = """\
%mesh up [NAME] [--procs N | --gpus N] [--hosts N] [--env K=V] [--device cpu|cuda]
                                   start a mesh, and use it; without a number it takes what the machine has.
                                   The notebook has it as a variable, too, unless that is taken: mesh.resize(...)
    [--restart [N]] [--spares N]   replace ranks that die, N times a minute; keep processes that wait for their places
    [--roles train=4,load=2:cpu]   ranks that differ; %%mesh NAME[load] runs a cell on those of a role
    [--silence S]                  seconds of silence after which a rank is shown as unresponsive, a host as lost
    [--check-collectives]          compare shapes and dtypes of ranks before each collective; for debugging, it is slow
    [--keep 2h]                    the mesh stays for that long after this kernel
%mesh list [--all]                 the meshes of this notebook, and those that are kept for this user
%mesh attach NAME                  get a kept mesh back, with its variables, its actors, and what it has printed
%mesh                              the meshes and their ranks
%mesh use NAME                     cells without a name go there
%mesh down [NAME]                  end a mesh
%mesh restart [NAME]               end it and start an empty one
%mesh heal [NAME] [--bare]         put new ranks in the place of those that have died, with what cells have defined
%mesh heal [NAME] --copy-from R|peer [x y]
                                   and with variables of a rank that lives, or of any: these, or all that can be copied
%mesh definitions [NAME] [drop N.. | clear]
                                   what new ranks are given; %%mesh --define adds a whole cell, --once nothing of it
%mesh resize [NAME] AXIS=N         make the mesh larger or smaller; ranks that stay keep everything
    [--hosts WHICH [--key FILE]]   hosts to grow onto, as for %mesh up; for heal those that take the place of lost ones
%mesh checkpoint PATH [x y] [--wait]
                                   write variables of all ranks to disk, beside the cells that follow
%mesh restore PATH [x y]           bring them back, on a mesh of any size, in this kernel or a new one
%mesh push a b                     copy variables to all ranks
%mesh pull x [--rank R] [--as y]   bring a variable here
%mesh log [--save FILE]            all that ranks have printed, shown or written to a file
%mesh run [--on MESH[SLICE]] script.py ARGS
                                   run a program that was written for torchrun on the ranks
%mesh update NAME                  give living actors the class that the notebook has now
%mesh reload MODULE                the same for an edited file, everywhere
%%mesh [MESH][SLICE] [options]     run the cell on ranks, as in %%mesh [0,3] or %%mesh m[gpus=0:4]
%%mesh ACTORS[SLICE] [options]     run the cell inside actors, with self
%%mesh spawn NAME[(ARGUMENTS)] [--on MESH[SLICE]]
                                   make a mesh of actors of the class in the cell
"""


_LOG_SHOWN = 16 << 20
"""Characters of the log that are shown."""


class Usage(HeaderError):
    """A ``%mesh`` line that cannot be understood."""


class Parser(argparse.ArgumentParser):
    """Says what is wrong by an exception; its words begin with what was typed."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, add_help=False, allow_abbrev=False)

    def error(self, message: str) -> Any:
        raise Usage(f"{self.prog}: {message}; %mesh help lists what there is")


class Verbs:
    """What ``%mesh VERB`` does.

    Args:
        shell: of the notebook.
        meshes: of the notebook.
        streams: gives where the output of ranks goes.
    """

    def __init__(self, shell: Any, meshes: Meshes, streams: Callable[[], Streams]) -> None:
        self._shell = shell
        self._meshes = meshes
        self._streams = streams
        self.more: dict[str, Callable[[list[str]], Any]] = {}
        """Verbs that others have added."""

    def names(self) -> list[str]:
        """All verbs."""
        return sorted([*(name[3:] for name in dir(self) if name.startswith("do_")), *self.more])

    def run(self, line: str) -> Any:
        """Does what a line says."""
        try:
            words = shlex.split(line)
        except ValueError as error:
            raise Usage(f"cannot understand {line.strip()!r}: {error}") from None
        verb = words.pop(0) if words else "table"
        action = self.more.get(verb) or getattr(self, f"do_{verb}", None)
        if action is None:
            raise Usage(f"there is no %mesh {verb}; there are:\n{USAGE}")
        return action(words)

    def do_help(self, words: list[str]) -> None:
        """Lists what there is."""
        print(USAGE)
        print("Options of %%mesh:")
        for option, meaning in OPTIONS.items():
            print(f"  {option:14} {meaning}")

    def do_up(self, words: list[str]) -> None:
        """Starts a mesh."""
        parser = Parser("%mesh up")
        parser.add_argument("name", nargs="?", default="mesh")
        parser.add_argument("--procs", type=int)
        parser.add_argument("--gpus", type=int)
        parser.add_argument("--hosts", default="")
        parser.add_argument("--key", default="")
        parser.add_argument("--env", action="append", default=[])
        parser.add_argument("--device", default="", choices=("", *DEVICES))
        parser.add_argument("--restart", nargs="?", const="on-failure")
        parser.add_argument("--spares", type=int, default=0)
        parser.add_argument("--roles", default="")
        parser.add_argument("--keep", default="")
        parser.add_argument("--silence", type=float)
        parser.add_argument("--check-collectives", action="store_true")
        given = parser.parse_args(words)
        if given.procs is not None and given.gpus is not None:
            raise Usage("%mesh up: give either --procs or --gpus")
        if not given.name.isidentifier():
            raise Usage(f"%mesh up: a mesh is named as a variable is, and {given.name!r} is no such name")
        for axis in ("procs", "gpus"):
            if getattr(given, axis) is not None and getattr(given, axis) < 1:
                raise Usage(f"%mesh up: --{axis} takes a number of at least 1")
        axes = {axis: getattr(given, axis) for axis in ("procs", "gpus") if getattr(given, axis) is not None}
        env: dict[str, str] = {}
        for pair in given.env:
            key, equals, value = pair.partition("=")
            if not equals or not key:
                raise Usage(f"%mesh up: --env takes K=V, and not {pair!r}")
            env[key] = value
        if given.check_collectives:
            env[CHECK_COLLECTIVES.variable] = "1"
        if given.spares < 0:
            raise Usage("%mesh up: --spares takes a number that is not negative")
        restart = given.restart if given.restart != "on-failure" else str(Restart().most)
        if restart is not None and not restart.isdecimal():
            raise Usage(f"%mesh up: --restart takes how often in a minute, or on-failure, and not {restart!r}")
        roles = roles_of(given.roles)
        if roles and axes:
            raise Usage("%mesh up: --roles says how many ranks there are, so --procs and --gpus do not go with it")
        axes = axes or ({} if roles else usual_axes(given.device))
        recipe = Recipe(given.name, axes, env, given.hosts, given.key, given.device)
        recipe.restart, recipe.spares, recipe.roles = int(restart or 0), given.spares, roles
        recipe.silence = given.silence
        self._up(detached_recipe(recipe, given.keep) if given.keep else recipe, "is up")

    def _up(self, recipe: Recipe, what: str) -> None:
        progress = Progress()
        progress.show(f"starting mesh {recipe.name!r}")
        self._ready(self._meshes.up(recipe, self._shell.user_ns, progress.wait), what, progress)

    def _ready(self, mesh: Mesh, what: str, progress: Progress) -> None:
        sizes = ", ".join(f"{label}={size}" for label, size in mesh.procs.sizes.items())
        progress.end(f"mesh {mesh.name!r} {what}: {sizes}, in {progress.elapsed:.2f} s")
        if isinstance(mesh.recipe, DetachedRecipe):
            print(mesh.recipe.says())

    def do_table(self, words: list[str]) -> None:
        """Shows the meshes and their ranks."""
        coming = self._meshes.coming()
        for name in coming:
            print(f"mesh {name!r} is being restarted")
        if not self._meshes.by_name:
            if not coming:
                print("there is no mesh; start one by %mesh up")
            return
        for mesh in self._meshes.by_name.values():
            mesh.look()
            used = " (in use)" if mesh.name == self._meshes.used else ""
            print(f"mesh {mesh.name!r}{used}")
            print(mesh.procs.to_table())
            for actors in mesh.actors():
                print(f"  actors {actors._name!r}: {actors._state.cls.__name__} on {len(actors)} of its ranks")

    def do_use(self, words: list[str]) -> None:
        """Chooses the mesh of cells that name none."""
        if len(words) != 1:
            raise Usage("%mesh use needs the name of a mesh")
        print(f"cells run on mesh {self._meshes.use(words[0]).name!r} now")

    def do_down(self, words: list[str]) -> None:
        """Ends a mesh."""
        print(f"mesh {self._meshes.down(_one(words, 'down')).name!r} is down")

    def do_restart(self, words: list[str]) -> None:
        """Ends a mesh and starts it anew."""
        name = self._meshes.get(_one(words, "restart")).name
        progress = Progress()
        progress.show(f"restarting mesh {name!r}")
        mesh = self._meshes.restart(name, self._shell.user_ns, self._tell())
        self._ready(mesh, "is up again, with empty namespaces", progress)

    def _tell(self) -> Callable[[str], None]:
        """Shows a line in the cell that runs now, also when it has ended."""
        return self._streams().place().write

    def do_push(self, words: list[str]) -> None:
        """Copies variables of the notebook to all ranks."""
        if not words:
            raise Usage("%mesh push needs the names of variables")
        missing = [word for word in words if word not in self._shell.user_ns]
        if missing:
            raise Usage(f"the notebook has no variable {missing[0]!r}")
        mesh = self._meshes.get(None)
        mesh.cells.push.call({word: self._shell.user_ns[word] for word in words}).get()

    def do_pull(self, words: list[str]) -> None:
        """Brings a variable of the ranks into the notebook."""
        parser = Parser("%mesh pull")
        parser.add_argument("name")
        parser.add_argument("--rank", type=int)
        parser.add_argument("--as", dest="target")
        given = parser.parse_args(words)
        mesh = self._meshes.get(None)
        if given.rank is not None:
            if not 0 <= given.rank < len(mesh.cells):
                raise Usage(f"there is no rank {given.rank}; mesh {mesh.name!r} has ranks 0 to {len(mesh.cells) - 1}")
            value = mesh.cells._member(given.rank).pull.call_one(given.name).get()
        else:
            value = mesh.cells.pull.call(given.name).get()
        self._shell.user_ns[given.target or given.name] = value

    def do_log(self, words: list[str]) -> None:
        """Shows what ranks have printed: all of it, or the end if it is very much."""
        parser = Parser("%mesh log")
        parser.add_argument("--save", default="")
        path = parser.parse_args(words).save
        if path:
            with open(path, "w", encoding="utf-8", errors="surrogatepass") as file:
                file.writelines(self._streams().log.read())
            return
        for piece in self._streams().log.tail(_LOG_SHOWN):
            sys.stdout.write(piece)


def _one(words: list[str], verb: str) -> str | None:
    """The one name that may follow a verb."""
    if len(words) > 1:
        raise Usage(f"%mesh {verb} takes the name of one mesh, and not {' '.join(words)!r}")
    return words[0] if words else None
