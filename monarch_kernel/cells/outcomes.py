"""The outcome of a cell on ranks: its results in ``_mesh``, its errors, how it was stopped, or the handle of a cell
that the notebook does not wait for."""

from __future__ import annotations

import sys
from collections.abc import Callable
from threading import Lock
from typing import Any

from monarch._kernel_api import (
    CellResult,
    Deferred,
    Extent,
    ValueMesh,
    describe_ranks,
    hides_value,
    in_thread,
    open_node,
)
from monarch.exceptions import CallTimeoutError
from monarch_kernel.calls.cell_run import Run
from monarch_kernel.calls.stop_report import StopReport
from monarch_kernel.cells.handle import CellHandle
from monarch_kernel.cells.hints import Hints
from monarch_kernel.cells.stopping import SURVIVORS_S, Stopping
from monarch_kernel.grammar.header import Header
from monarch_kernel.kernel_like import kernel_of, request_of
from monarch_kernel.meshes.mesh import Mesh
from monarch_kernel.meshes.steps import apart
from monarch_kernel.output.bundles import bundles_of_ranks
from monarch_kernel.output.cell_errors import CellStopped, MeshCellError, error_lines, stopped_lines, timeout_text
from monarch_kernel.output.displays import Displays
from monarch_kernel.output.streams import Streams


class Outcomes:
    """Shows the outcomes of cells, and keeps their results in variables of the notebook.

    Args:
        shell: the shell of the notebook.
        hints: for undefined names.
        stopping: the stops of cells.
        streams: returns the streams that show the output of ranks.
    """

    def __init__(self, shell: Any, hints: Hints, stopping: Stopping, streams: Callable[[], Streams]) -> None:
        self._shell = shell
        self._hints = hints
        self._stopping = stopping
        self._streams = streams

    def finish(
        self, mesh: Mesh | None, total: int, header: Header, run: Run, stopped: StopReport | None, shown: bool
    ) -> None:
        """Show the outcome of a cell, and raise its errors.

        Args:
            mesh: the mesh of the ranks; None for a mesh of actors.
            total: the ranks of the mesh.
            header: the header of the cell.
            run: the cell.
            stopped: how it was stopped; None if it has ended by itself.
            shown: whether to show the results.

        Raises:
            MeshCellError: it failed on some ranks.
            CellStopped: it was stopped.
            CallTimeoutError: its timeout ran out.
        """
        __tracebackhide__ = True
        streams = self._streams()
        for future in run.futures:
            kept = streams.hidden.pop(future.port, None)
            if kept is not None:
                sys.stdout.writelines(kept.pieces())
        streams.finish()
        results = run.results()
        ordered = sorted(results.items())
        values = _values(run, results)
        self._shell.user_ns["_mesh"] = values
        if header.out and stopped is None and not any(result.error is not None for result in results.values()):
            # As in an assignment: nothing is assigned if the right side raises.
            self._shell.user_ns[header.out] = values
            if hides_value(run.source.code):
                print(f"note: {header.out} holds None for each rank, because the cell ends in a semicolon")
        if shown and not header.quiet:
            bundles = [(rank, result.bundle) for rank, result in ordered if result.bundle is not None]
            for bundle in bundles_of_ranks(bundles, total):
                self._shell.display_pub.publish(bundle)
        if stopped is not None:
            if stopped.errors:
                # The stop does not hide errors from before it.
                self.show_errors(MeshCellError(run.name, stopped.errors, total), run.told >= stopped.errors.keys())
            print(stopped.text(), file=sys.stderr)
            if stopped.timeout is None and not stopped.stuck:
                interrupts = {rank: each.error for rank, each in ordered if each.error and each.error.interrupted}
                for line in stopped_lines(run.name, interrupts):
                    print(line, file=sys.stderr)
            _record(mesh, header, run, results, total)
            if stopped.timeout is not None:
                raise CallTimeoutError(_describe_timeout(run, results, stopped))
            raise CellStopped(stopped.outcome())
        errors = {rank: result.error for rank, result in ordered if result.error is not None}
        _record(mesh, header, run, results, total)
        if errors:
            self._hints.teach(mesh, errors)
            failure = MeshCellError(run.name, errors, total, values)
            self.show_errors(failure, True)
            alike = len(errors) == total and len({each.text for each in errors.values()}) == 1
            # Else some ranks may have made a step that others have not.
            if mesh is not None and not alike and not mesh.dead() and (line := apart(mesh, None)):
                print(line, file=sys.stderr)
            raise failure

    def show_errors(self, failure: MeshCellError, shown: bool) -> None:
        """Show folded tracebacks, below the error lines unless these were shown already."""
        if not shown:
            print("\n".join(failure.lines), file=sys.stderr)
        tracebacks = failure.tracebacks()
        if tracebacks is not None:
            self._shell.display_pub.publish(tracebacks)
            failure.folded = True

    def previewer(self, mesh: Mesh | None, total: int) -> Callable[[Run], None]:
        """Return a function that shows the errors of ranks while others still run."""
        streams = self._streams()
        parent = request_of(kernel_of(self._shell))

        def show(run: Run) -> None:
            # The stop reports the ranks that it interrupted or freed, and those that waited for them.
            by_hand = self._stopping.is_interrupted(run)
            errors = {
                rank: error
                for rank, error in run.failures().items()
                if not (error.interrupted or error.freed or (error.broken and by_hand))
            }
            run.told.update(errors)
            left = run.missing()
            if not errors or not left:
                return
            self._hints.teach(mesh, errors)
            head, *lines = error_lines(run.name, errors, total)
            verb = "is" if len(left) == 1 else "are"
            text = "\n".join([f"{head}; {describe_ranks(left)} {verb} still running", *lines, ""])
            streams.write(text, "stderr", parent)

        # Called by the receiving thread, which must not wait.
        return lambda run: (in_thread(open_node(), "preview", lambda: show(run)), None)[1]

    def handle(self, mesh: Mesh | None, header: Header, run: Run, displays: Displays, total: int) -> CellHandle:
        """Return the handle of a cell that the notebook does not wait for."""

        streams = self._streams()
        once, closing = Lock(), Lock()
        # Each set once, by any reader; to do what it notes twice does no harm.
        is_closed = is_settled = False

        def settle() -> bool:
            nonlocal is_closed
            if not run.done:
                return False
            results = run.results()
            with once:
                # No user code runs under this lock.
                if not handle.recorded:
                    for future in run.futures:
                        streams.hidden.pop(future.port, None)
                    if run.missing():
                        self._stopping.end_survivors(mesh, run, 0.0)
                    _record(mesh, header, run, results, total)
                    # Last, since a Stop may end this at any point.
                    handle.recorded = True
            with closing:
                # Apart, since this may wait for seconds.
                if not is_closed:
                    displays.close()
                    is_closed = True
            return True

        def finish() -> ValueMesh[Any]:
            settle()
            nonlocal is_settled
            if not is_settled:
                run.settle(SURVIVORS_S)
                is_settled = True
            results = run.results()
            errors = {rank: result.error for rank, result in results.items() if result.error is not None}
            values = _values(run, results)
            if errors:
                self._hints.teach(mesh, errors)
                raise MeshCellError(run.name, errors, total, values)
            return values

        name = header.out or f"Out[{self._shell.displayhook.prompt_count}]"
        handle = CellHandle(run, finish, lambda: self._stopping.stop_cell(mesh, run), name, streams.place())
        streams.calls.name(run.futures, run.name, name)
        self._shell.user_ns["_mesh"] = handle
        if header.out:
            self._shell.user_ns[header.out] = handle
        if mesh is not None:
            mesh.record_ended()
            mesh.unrecorded.append(settle)
        handle.watch()
        return handle


def _values(run: Run, results: dict[int, CellResult]) -> ValueMesh[Any]:
    """Return the value of each rank, in the shape of the mesh or slice that the cell ran on."""
    extent = run.futures[0].extent if len(run.futures) == 1 else Extent(("ranks",), (len(run.ranks),))
    # A result is kept for long, and the cell is not.
    ranks = run.ranks
    return ValueMesh.of(extent, [_value(results.get(rank)) for rank in ranks], lambda: ranks)


def _value(result: CellResult | None) -> Any:
    sealed = result.value if result is not None else None
    return Deferred(sealed.open) if sealed is not None else None


def _describe_timeout(run: Run, results: dict[int, CellResult], stopped: StopReport) -> str:
    interrupts = {
        rank: result.error
        for rank, result in sorted(results.items())
        if result.error is not None and rank not in stopped.errors
    }
    return timeout_text(run.name, stopped.timeout or 0.0, interrupts, stopped.left)


def _record(mesh: Mesh | None, header: Header, run: Run, results: dict[int, CellResult], total: int) -> None:
    """Record the definitions of a cell for the ranks where it succeeded, of ``total`` ranks; for the others, which may
    have died in it, those above the line that they have reached."""
    if mesh is None or header.once:
        return
    good = [rank for rank in sorted(results) if results[rank].error is None]
    if good:
        mesh.definitions.record(run.name, run.source, good, total, header.define)
    reached = {
        rank: result.error.reached
        for rank, result in sorted(results.items())
        if result.error is not None and result.error.reached and (result.error.called or not result.error.file)
    }
    if reached:
        mesh.definitions.record(run.name, run.source, list(reached), total, above=min(reached.values()))
