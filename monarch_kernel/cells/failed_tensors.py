"""Distributed tensors that have failed without a look at them, told in the cell that runs or ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from monarch._kernel_api import failed_tensors
from monarch_kernel.cells.tracebacks import with_cells
from monarch_kernel.output.streams import Streams


class FailedTensors:
    """Tells what has failed at the end of a cell, which may raise it itself, or at once while none runs.

    Args:
        shell: the shell of the notebook.
        streams: returns the streams of the notebook.
    """

    def __init__(self, shell: Any, streams: Callable[[], Streams]) -> None:
        self._shell = shell
        self._streams = streams
        self._cell_runs = False
        """Written by the thread of the notebook; a cell that ends just now tells what has failed."""

    def cell_begins(self) -> None:
        """Leave what fails to the cell."""
        self._cell_runs = True

    def cell_ended(self) -> None:
        """Show what has failed and was not raised."""
        self._cell_runs = False
        self._tell()

    def failed(self) -> None:
        """Handle the news, in any thread."""
        if not self._cell_runs:
            self._tell()

    def _tell(self) -> None:
        for text in failed_tensors(self._shell.user_ns):
            self._streams().tell(f"monarch: {with_cells(self._shell, text)}\n", 0)
