"""``%%mesh --in-frame``: statements that run in the selected frame of paused ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from threading import Event
from typing import Any

from monarch._kernel_api import (
    CellError,
    CellResult,
    Failure,
    ServiceAnswers,
    break_off_here,
    collective_in,
    current_node,
    describe_ranks,
    request,
    run_in_frame,
    split_proc,
    state_of,
)
from monarch_kernel.calls.held_stop import HeldStop
from monarch_kernel.debug.grouped import grouped_lines
from monarch_kernel.grammar.header import Header, HeaderError
from monarch_kernel.meshes.mesh import Mesh
from monarch_kernel.output.bundles import bundles_of_ranks
from monarch_kernel.output.cell_errors import CellStopped, MeshCellError
from monarch_kernel.output.displays import Displays
from monarch_kernel.output.streams import Streams
from monarch_kernel.source.cell import CellSource

_LOOK = 0.5
"""Seconds between two looks whether a rank has died."""
_STOP_S = 5.0
"""Seconds for statements to end when they are interrupted; C code ends when it returns."""


class InFrame:
    """Runs cells in frames.

    Args:
        shell: the shell of the notebook.
        streams: returns the streams that show the output of ranks.
        show: shows the tracebacks of a failed cell.
    """

    def __init__(self, shell: Any, streams: Callable[[], Streams], show: Callable[[MeshCellError], None]) -> None:
        self._shell = shell
        self._streams = streams
        self._show = show

    def run(self, mesh: Mesh, ranks: list[int], header: Header, name: str, source: CellSource) -> None:
        """Run a cell in the selected frame of ranks, and show its results.

        Raises:
            HeaderError: no rank is paused, or the cell would wait for ranks that do not run it.
            MeshCellError: it has failed on some ranks.
        """
        waiting = "" if header.force else collective_in(source.code, "exec")
        if waiting:
            raise HeaderError(
                f"{waiting} would wait for other ranks, which are running other code; --force calls it anyway"
            )
        streams = self._streams()
        with streams.hiding(False) if header.quiet else nullcontext():
            displays = Displays(self._shell, len(ranks), len(mesh.procs), header.quiet, streams)
        stopped = False
        try:
            with HeldStop() as held:
                held.begin()
                asking = _Asking(mesh, ranks, mesh.frame, name, source, displays.port)
                try:
                    held.release()
                    asking.wait()
                except KeyboardInterrupt:
                    stopped = True
                    asking.stop()
                finally:
                    asking.close()
        finally:
            displays.close()
        current_node().waits.await_shown()
        self._finish(mesh, header, name, asking.answers, stopped)

    def _finish(self, mesh: Mesh, header: Header, name: str, answers: dict[int, Any], stopped: bool) -> None:
        results = {rank: each for rank, each in sorted(answers.items()) if isinstance(each, CellResult)}
        if not header.quiet:
            shown = [(rank, each.bundle) for rank, each in results.items() if each.bundle is not None]
            for bundle in bundles_of_ranks(shown, len(mesh.procs)):
                self._shell.display_pub.publish(bundle)
        refused = {rank: str(each) for rank, each in sorted(answers.items()) if rank not in results}
        if refused and not results:
            raise HeaderError(f"the cell was not run\n{grouped_lines(refused.items())}")
        if refused:
            print(grouped_lines(refused.items()), file=sys.stderr)
        if stopped:
            ended = [rank for rank, each in results.items() if each.error is not None and each.error.interrupted]
            text = f"{describe_ranks(ended)} stopped in the frame" if ended else "the cell had already ended"
            raise CellStopped(f"{text}; the ranks are still paused: %mesh resume continues them")
        errors: dict[int, CellError] = {rank: each.error for rank, each in results.items() if each.error is not None}
        if errors:
            failure = MeshCellError(name, errors, len(mesh.procs))
            self._show(failure)
            raise failure


class _Asking:
    """The request to ranks to run statements, and their answers.

    Args:
        mesh: the mesh of the ranks.
        ranks: the ranks of the mesh.
        level: the level of the frame.
        name: the name of the cell.
        source: the source of the cell.
        sink: the port of its displays.
    """

    def __init__(self, mesh: Mesh, ranks: list[int], level: int, name: str, source: CellSource, sink: Any) -> None:
        self._node = current_node()
        self._procs = {state_of(mesh.procs).procs.proc(rank): rank for rank in ranks}
        self.answers: dict[int, Any] = {}
        """By rank; written by the receiving thread, in single operations."""
        self._all = Event()
        asked = request(run_in_frame, source.code, name, level, sink, self._node.proc, source.shown)
        self._asked = ServiceAnswers(self._node, list(self._procs), asked, self._heard, urgent=True)

    def _heard(self, proc: str, answer: Any) -> None:
        self.answers[split_proc(proc)[1]] = answer.text if isinstance(answer, Failure) else answer
        if len(self.answers) == len(self._procs):
            self._all.set()

    def wait(self, patience: float | None = None) -> None:
        """Wait until all live ranks have answered."""
        waited = 0.0
        while not self._all.wait(_LOOK) and (patience is None or waited < patience):
            waited += _LOOK
            for proc, rank in self._procs.items():
                if self._node.peers.get(proc).dead is not None:
                    self.answers.setdefault(rank, "dead; %mesh heal replaces it")
            if len(self.answers) == len(self._procs):
                return

    def stop(self) -> None:
        """Interrupt the statements, and nothing else, and wait a little for their ends."""
        left = [proc for proc, rank in self._procs.items() if rank not in self.answers]
        ServiceAnswers(self._node, left, request(break_off_here), urgent=True).close()
        self.wait(_STOP_S)
        for proc in left:
            self.answers.setdefault(self._procs[proc], "still inside a C call; stops when it returns")

    def close(self) -> None:
        """Take no more answers."""
        self._asked.close()
