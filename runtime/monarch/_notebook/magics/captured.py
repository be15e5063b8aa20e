"""``%%capture`` on a rank: what the body prints and displays goes to a variable."""

from __future__ import annotations

import io
import sys
from collections.abc import Generator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any

from monarch._notebook.showing.display import CLEAR, Display, ShownObject, current_display
from monarch._notebook.showing.show import Bundle


class CapturedOutput:
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
        for bundle in self.outputs:
            current_display().publish(bundle)

    __call__ = show

    def __str__(self) -> str:
        return self.stdout


class _Outputs:
    """The sink of a display that collects bundles."""

    number = 0

    def __init__(self, bundles: list[Bundle]) -> None:
        self._bundles = bundles

    def send(self, shown: ShownObject) -> None:
        """Take what is shown."""
        if shown.kind == CLEAR:
            self._bundles.clear()
        else:
            self._bundles.append(shown.bundle)


@contextmanager
def capturing(display: Display, kept: set[str]) -> Generator[CapturedOutput]:
    """Capture output in the block.

    Args:
        display: the display of the cell.
        kept: the parts that are captured: ``stdout``, ``stderr``, ``display``.
    """
    captured = CapturedOutput()
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
