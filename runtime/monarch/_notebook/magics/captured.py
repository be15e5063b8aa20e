"""``%%capture`` on a rank: what the body prints and displays goes to a variable."""

from __future__ import annotations

import io
import sys
from collections.abc import Generator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any

from monarch._notebook.running_cell import running_cell
from monarch._notebook.show import Bundle, Display


class Captured:
    """Captured output; calling it, or ``show()``, shows it again.

    Attributes:
        stdout: printed text.
        stderr: text printed to stderr.
        outputs: MIME bundles of displayed values.
    """

    def __init__(self) -> None:
        self.stdout = ""
        self.stderr = ""
        self.outputs: list[Bundle] = []

    def show(self) -> None:
        """Print and display what was captured."""
        sys.stdout.write(self.stdout)
        sys.stderr.write(self.stderr)
        cell = running_cell.get()
        for bundle in self.outputs:
            (cell.display if cell is not None else Display()).send(bundle)

    __call__ = show

    def __str__(self) -> str:
        return self.stdout


class _Outputs:
    """The sink of a display that collects bundles."""

    def __init__(self, bundles: list[Bundle]) -> None:
        self.send = bundles.append


@contextmanager
def capturing(display: Display, kept: set[str]) -> Generator[Captured]:
    """Capture output in the block.

    Args:
        display: of the cell.
        kept: the parts that are captured: ``stdout``, ``stderr``, ``display``.
    """
    captured = Captured()
    streams: dict[str, Any] = {name: io.StringIO() for name in ("stdout", "stderr") if name in kept}
    try:
        with (
            redirect_stdout(streams.get("stdout", sys.stdout)),
            redirect_stderr(streams.get("stderr", sys.stderr)),
            display.to(_Outputs(captured.outputs) if "display" in kept else display.sink),
        ):
            yield captured
    finally:
        for name, stream in streams.items():
            setattr(captured, name, stream.getvalue())
