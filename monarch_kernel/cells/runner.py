"""Runs a cell on ranks: what comes before it, its calls, the wait for them, and its outcome."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from monarch._kernel_api import ActorMesh
from monarch_kernel.calls.cell_run import Run
from monarch_kernel.calls.held_stop import HeldStop
from monarch_kernel.calls.stop_report import StopReport
from monarch_kernel.cells.outcomes import Outcomes
from monarch_kernel.cells.stopping import SURVIVORS_S, Stopping
from monarch_kernel.compat import run_nested
from monarch_kernel.grammar.header import HERE, Header, HeaderError
from monarch_kernel.meshes.choosing import choose, ranks_in
from monarch_kernel.meshes.deaths import naming_deaths
from monarch_kernel.meshes.growing import Growing
from monarch_kernel.meshes.mesh import Mesh
from monarch_kernel.meshes.restarts import Restarts
from monarch_kernel.output.displays import Displays
from monarch_kernel.output.streams import Streams
from monarch_kernel.source.cell import CellSource, read
from monarch_kernel.source.gutter import lines_above


@dataclass(frozen=True)
class Hooks:
    """Functions of rooms above this one, called for each cell."""

    breakpoints: Callable[[Mesh], object]
    """Tells new ranks of a mesh its breakpoints."""
    files: Callable[[Mesh], object]
    """Copies changed Python files to the hosts of a mesh."""
    begins: Callable[[str], object]
    """Called with the name of a cell that is about to run."""
    wait: Callable[[Mesh | None, Run, float | None], bool]
    """Waits for a cell, until a time of the monotonic clock, and talks to the user about ranks that stop at
    breakpoints; returns whether the cell has ended."""


class CellRunner:
    """Runs cells on ranks. Used by the thread that runs cells.

    Args:
        shell: the shell of the notebook.
        streams: returns the streams that show the output of ranks.
        stopping: the stops of cells.
        outcomes: shows how cells ended.
        restarts: reminds the user of replaced ranks.
        hooks: functions of rooms above.
    """

    def __init__(
        self,
        shell: Any,
        streams: Callable[[], Streams],
        stopping: Stopping,
        outcomes: Outcomes,
        restarts: Restarts,
        hooks: Hooks,
    ) -> None:
        self._shell = shell
        self._streams = streams
        self._stopping = stopping
        self._outcomes = outcomes
        self._restarts = restarts
        self._growing = Growing()
        self._hooks = hooks

    def run(self, mesh: Mesh | None, actors: ActorMesh, header: Header, cell: str, shown: bool) -> Any:
        """Run a cell to its end; return its handle if the notebook does not wait for it.

        Args:
            mesh: the mesh of the ranks; None for a cell inside actors.
            actors: the namespaces of the ranks, or these actors.
            header: the header of the cell.
            cell: its text.
            shown: whether to show the results.
        """
        __tracebackhide__ = True
        if header.here:
            self._run_here(cell)
        if mesh is not None:
            self._prepare(mesh, actors, header)
        with HeldStop() as held:
            with naming_deaths(mesh):
                run, displays = self._start(mesh, actors, header, cell, held)
            if header.nowait and not held.pressed:
                return self._outcomes.handle(mesh, header, run, displays, len(actors))
            self._streams().calls.name(run.futures, run.name)
            stopped = self._wait(mesh, run, header.timeout, held)
        displays.close()
        self._outcomes.finish(mesh, len(actors), header, run, stopped, shown)
        return None

    def _run_here(self, cell: str) -> None:
        """Run a cell in the notebook too; raise if it fails, so that the ranks do not run it."""
        if not run_nested(self._shell, f"{HERE}\n{cell}").success:
            raise HeaderError("the cell failed in the notebook, so the ranks did not run it")

    def _prepare(self, mesh: Mesh, actors: ActorMesh, header: Header) -> None:
        """Bring a mesh into the state in which the next cell finds it."""
        self._stopping.say_finishing(mesh)
        self._restarts.remind(mesh, lambda: ranks_in(choose(actors, header)))
        mesh.check_groups_left()
        mesh.moves.wait()
        self._growing.grow(mesh)
        mesh.define()
        self._hooks.breakpoints(mesh)

    def _start(
        self, mesh: Mesh | None, actors: ActorMesh, header: Header, cell: str, held: HeldStop
    ) -> tuple[Run, Displays]:
        name, source = named(self._shell, cell)
        if mesh is not None:
            self._hooks.files(mesh)
        self._hooks.begins(name)
        views = choose(actors, header)
        streams = self._streams()
        count = sum(len(view) for view in views)
        displays = Displays(self._shell, count, len(actors), header.quiet, streams)
        hidden = header.quiet or not header.stream
        try:
            with streams.hiding(not header.quiet) if hidden else nullcontext():
                preview = None if header.quiet else self._outcomes.previewer(mesh, len(actors))
                held.begin()
                run = Run(name, source, views, displays.port, mesh is None, preview)
        except BaseException:
            displays.close()
            raise
        if mesh is not None:
            mesh.replaced.last_cell = name
        return run, displays

    def _wait(self, mesh: Mesh | None, run: Run, timeout: float | None, held: HeldStop) -> StopReport | None:
        """Wait for a cell; return how it was stopped, or None if it has ended by itself."""
        try:
            held.release()
            until = None if timeout is None else time.monotonic() + timeout
            if not self._hooks.wait(mesh, run, until):
                stopped = self._stopping.stop_cell(mesh, run)
                stopped.timeout = timeout
                return stopped
            if run.missing():
                self._stopping.end_survivors(mesh, run, SURVIVORS_S)
                return None
            return self._stopping.outcome_by_hand(run)
        except KeyboardInterrupt:
            return self._stopping.stop_cell(mesh, run)


def named(shell: Any, cell: str) -> tuple[str, CellSource]:
    """Return the name of the cell that runs, and its text as Python."""
    # The number that the notebook shows; the shell's own counter may be at the next cell already.
    name = f"cell [{shell.displayhook.prompt_count}]"
    return name, read(shell, cell, name, lines_above(shell, cell))
