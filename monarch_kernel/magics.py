"""``%mesh`` and ``%%mesh``: the notebook's words for meshes."""

from __future__ import annotations

import argparse
import ast
import shlex
import signal
import sys
import time
from typing import Any

from IPython.core.magic import Magics, cell_magic, line_magic, magics_class  # pyright: ignore[reportUnknownVariableType]

from monarch._actors.actormesh import ActorMesh
from monarch._actors.channel import Channel
from monarch._actors.process import get_runtime
from monarch._cells.execute import CellResult
from monarch._core.extent import Extent
from monarch._core.ranks import describe_ranks
from monarch._core.valuemesh import Deferred, ValueMesh
from monarch.exceptions import DeviceMeshError
from monarch_kernel.handle import Handle
from monarch_kernel.header import OPTIONS, Header, HeaderError, parse
from monarch_kernel.meshes import Mesh, Meshes, choose, usual_axes, with_hint
from monarch_kernel.render import MeshCellError, bundle_of_results, tagged
from monarch_kernel.running import Run
from monarch_kernel.stop import Stopped, climb
from monarch_kernel.streams import Streams

USAGE = """\
%mesh up [NAME] [--procs N | --gpus N] [--env K=V]   start a mesh, and use it
%mesh                                                the meshes and their ranks
%mesh use NAME                                       cells without a name go there
%mesh down [NAME]                                    end a mesh
%mesh restart [NAME]                                 end it and start it anew, empty
%mesh push a b                                       copy variables to all ranks
%mesh pull x [--rank R] [--as y]                     bring a variable here
%mesh log                                            all that ranks have printed
%%mesh [MESH][SLICE] [options]                       run the cell on ranks, as in %%mesh [0,3] or %%mesh m[gpus=0:4]
"""


class Usage(HeaderError):
    """A ``%mesh`` line that cannot be understood."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise Usage(f"{self.prog}: {message}")


def names_dist(cell: str) -> bool:
    """Whether a cell uses ``dist``, for which the ranks need a process group."""
    try:
        tree = ast.parse(cell)
    except SyntaxError:
        return False
    return any(isinstance(node, ast.Name) and node.id == "dist" for node in ast.walk(tree))


def _values(run: Run, results: dict[int, CellResult]) -> ValueMesh[Any]:
    """The value of each rank of a cell, in the shape of what it was for."""
    extent = run.views[0].extent if len(run.views) == 1 else Extent(("ranks",), (len(run.ranks),))
    return ValueMesh(extent, [_value(results.get(rank)) for rank in run.ranks])


def _value(result: CellResult | None) -> Any:
    sealed = result.value if result is not None else None
    return Deferred(sealed.open) if sealed is not None else None


@magics_class
class MeshMagics(Magics):
    """The magics, and the meshes of the notebook."""

    shell: Any  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, shell: Any) -> None:
        super().__init__(shell)
        self.meshes = Meshes()
        self._streams: Streams | None = None
        self._count = 0

    # The line magic

    @line_magic("mesh")
    def line(self, line: str) -> Any:
        """Meshes: ``%mesh help`` lists what there is."""
        words = shlex.split(line)
        verb = words.pop(0) if words else "table"
        action = getattr(self, f"do_{verb}", None)
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
        parser = _Parser("%mesh up", add_help=False)
        parser.add_argument("name", nargs="?", default="mesh")
        parser.add_argument("--procs", type=int)
        parser.add_argument("--gpus", type=int)
        parser.add_argument("--env", action="append", default=[])
        given = parser.parse_args(words)
        if given.procs and given.gpus:
            raise Usage("%mesh up: give either --procs or --gpus")
        axes = {"procs": given.procs} if given.procs else {"gpus": given.gpus} if given.gpus else usual_axes()
        env: dict[str, str] = {}
        for pair in given.env:
            key, equals, value = pair.partition("=")
            if not equals:
                raise Usage(f"%mesh up: --env takes K=V, and not {pair!r}")
            env[key] = value
        begun = time.perf_counter()
        self._attach_streams()
        mesh = self.meshes.up(given.name, axes, env)
        count = len(mesh.procs)
        self._progress(f"starting {count} processes")
        mesh.procs.initialized.get()
        self._progress(f"{count} processes run; making their namespaces")
        mesh.cells.initialized.get()
        axes_text = ", ".join(f"{label}={size}" for label, size in mesh.procs.sizes.items())
        print(f"mesh {mesh.name!r} is up: {axes_text}, in {time.perf_counter() - begun:.2f} s")

    def _progress(self, text: str) -> None:
        # Only where a line can be overwritten; a notebook keeps the last one.
        print(text, end="\r", flush=True)

    def do_table(self, words: list[str]) -> None:
        """Shows the meshes and their ranks."""
        if not self.meshes.by_name:
            print("there is no mesh; start one by %mesh up")
            return
        for mesh in self.meshes.by_name.values():
            used = " (in use)" if mesh.name == self.meshes.used else ""
            print(f"mesh {mesh.name!r}{used}")
            print(mesh.procs.to_table())

    def do_use(self, words: list[str]) -> None:
        """Chooses the mesh of cells that name none."""
        if len(words) != 1:
            raise Usage("%mesh use needs the name of a mesh")
        print(f"cells run on mesh {self.meshes.use(words[0]).name!r} now")

    def do_down(self, words: list[str]) -> None:
        """Ends a mesh."""
        mesh = self.meshes.down(words[0] if words else None)
        print(f"mesh {mesh.name!r} is down")

    def do_restart(self, words: list[str]) -> None:
        """Ends a mesh and starts it anew."""
        mesh = self.meshes.get(words[0] if words else None)
        sizes = mesh.procs.sizes
        self.meshes.down(mesh.name)
        anew = self.meshes.up(mesh.name, sizes, {})
        anew.cells.initialized.get()
        print(f"mesh {anew.name!r} is up again, with empty namespaces")

    def do_push(self, words: list[str]) -> None:
        """Copies variables of the notebook to all ranks."""
        if not words:
            raise Usage("%mesh push needs the names of variables")
        missing = [word for word in words if word not in self.shell.user_ns]
        if missing:
            raise Usage(f"the notebook has no variable {missing[0]!r}")
        mesh = self.meshes.get(None)
        mesh.cells.push.call({word: self.shell.user_ns[word] for word in words}).get()

    def do_pull(self, words: list[str]) -> None:
        """Brings a variable of the ranks into the notebook."""
        parser = _Parser("%mesh pull", add_help=False)
        parser.add_argument("name")
        parser.add_argument("--rank", type=int)
        parser.add_argument("--as", dest="target")
        given = parser.parse_args(words)
        mesh = self.meshes.get(None)
        cells: Any = mesh.cells
        if given.rank is not None:
            if not 0 <= given.rank < len(mesh.cells):
                raise Usage(f"there is no rank {given.rank}; mesh {mesh.name!r} has ranks 0 to {len(mesh.cells) - 1}")
            value = mesh.cells._member(given.rank).pull.call_one(given.name).get()
        else:
            value = cells.pull.call(given.name).get()
        self.shell.user_ns[given.target or given.name] = value

    def do_log(self, words: list[str]) -> None:
        """Shows all that ranks have printed."""
        for line in self._attach_streams().log:
            sys.stdout.write(line)

    # The cell magic

    @cell_magic("mesh")
    def cell(self, line: str, cell: str) -> Any:
        """Runs the cell on ranks: ``%%mesh [MESH][SLICE] [options]``."""
        header = parse(line)
        mesh, actors = self._addressed(header.name)
        self._attach_streams()
        finishing = mesh.finishing() if mesh is not None else []
        if finishing:
            where = describe_ranks(finishing)
            print(f"waiting for {where}, still inside a C call of a cell that was stopped", file=sys.stderr)
        try:
            if mesh is not None and names_dist(cell):
                mesh.form_group()
            run, displays = self._start(actors, header, cell, mesh is None)
        except DeviceMeshError as error:
            raise error if mesh is None else with_hint(error, mesh.name) from None
        if header.nowait:
            return self._handle(mesh, header, run, displays, len(actors))
        stopped: Stopped | None = None
        try:
            until = None if header.timeout is None else time.monotonic() + header.timeout
            if not run.wait(until):
                stopped = self._stop(mesh, run, finishing)
                stopped.timeout = header.timeout
            elif run.missing():
                # A rank has died, so the cell has failed; the others need not go on.
                run.signal(signal.SIGINT)
        except KeyboardInterrupt:
            stopped = self._stop(mesh, run, finishing)
        displays.close()
        return self._finish(len(actors), header, run, stopped)

    def _addressed(self, name: str | None) -> tuple[Mesh | None, ActorMesh]:
        """The mesh of a name with its namespaces; or no mesh, and the actors that a variable of that name has."""
        actors = self.shell.user_ns.get(name) if name is not None else None
        if isinstance(actors, ActorMesh) and name not in self.meshes.by_name:
            return None, actors
        mesh = self.meshes.get(name)
        return mesh, mesh.cells

    def _stop(self, mesh: Mesh | None, run: Run, finishing: list[int]) -> Stopped:
        """Stops a cell; ranks that cannot be stopped otherwise are replaced, those inside C at the second stop."""
        stopped = climb(run, set(finishing))
        if mesh is None:
            # Actors of the person's own keep their state; what does not stop is theirs to replace.
            stopped.finishing, stopped.replaced = sorted(stopped.finishing + stopped.replaced), []
            return stopped
        # Some may have left a collective that others are in.
        mesh.grouped = False
        if stopped.finishing:
            mesh.unfinished.append(run)
        if stopped.replaced:
            mesh.replace(stopped.replaced)
        return stopped

    def _start(self, actors: ActorMesh, header: Header, cell: str, inside: bool) -> tuple[Run, Any]:
        # The number of the cell that runs, as the notebook shows it.
        self._count += 1
        name = f"cell [{self.shell.execution_count}]"
        port, displays = Channel.open_ranked()
        shown = displays.reply

        def show(reply: Any, frames: Any) -> None:
            shown(reply, frames)
            rank, bundle = displays.recv().get()
            if not header.quiet:
                self._publish(tagged(rank, bundle))

        displays.reply = show
        try:
            run = Run(name, cell, choose(actors, header), port, inside)
        except BaseException:
            displays.close()
            raise
        streams = self._attach_streams()
        if header.quiet or not header.stream:
            for future in run.futures:
                streams.hidden[future.port] = None if header.quiet else []
        return run, displays

    def _finish(self, total: int, header: Header, run: Run, stopped: Stopped | None) -> Any:
        streams = self._attach_streams()
        for future in run.futures:
            kept = streams.hidden.pop(future.port, None)
            if kept:
                sys.stdout.write("".join(kept))
        results = run.results()
        ordered = sorted(results.items())
        values = _values(run, results)
        self.shell.user_ns["_mesh"] = values
        if header.out:
            self.shell.user_ns[header.out] = values
        if not header.quiet:
            bundle = bundle_of_results(ordered, total)
            if bundle is not None:
                self._publish(bundle)
        if stopped is not None:
            print(stopped.text(), file=sys.stderr)
            raise KeyboardInterrupt("the cell was stopped on its ranks")
        errors = {rank: result.error for rank, result in ordered if result.error is not None}
        if errors:
            raise MeshCellError(run.name, errors, total, values)
        return None

    def _handle(self, mesh: Mesh | None, header: Header, run: Run, displays: Any, total: int) -> Handle:
        """A cell that the notebook does not wait for."""

        def finish() -> ValueMesh[Any]:
            displays.close()
            results = run.results()
            errors = {rank: result.error for rank, result in results.items() if result.error is not None}
            values = _values(run, results)
            if errors:
                raise MeshCellError(run.name, errors, total, values)
            return values

        handle = Handle(run, finish, lambda: self._stop(mesh, run, []))
        self.shell.user_ns["_mesh"] = handle
        if header.out:
            self.shell.user_ns[header.out] = handle
        return handle

    def _publish(self, bundle: dict[str, Any]) -> None:
        self.shell.display_pub.publish(bundle)

    def _attach_streams(self) -> Streams:
        runtime = get_runtime()
        if self._streams is None or runtime.session.output.on_line != self._streams.take:
            self._streams = Streams(runtime, getattr(self.shell, "kernel", None))
            runtime.session.output.on_line = self._streams.take
        return self._streams
