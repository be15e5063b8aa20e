"""``%mesh view`` and ``%mesh top``: the ranks of a mesh, live."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from monarch._kernel_api import telemetry_of
from monarch_kernel.compat import display_line
from monarch_kernel.grammar.parsers import parse
from monarch_kernel.kernel_like import kernel_of
from monarch_kernel.meshes.mesh import Mesh
from monarch_kernel.meshes.registry import NotebookMeshes
from monarch_kernel.output.frontend import has_cells
from monarch_kernel.views.feed import StateSource
from monarch_kernel.views.picture import text_of
from monarch_kernel.views.shown import ShownMeshes, state_of_source

_EVERY_S = 0.5
"""Seconds between two pictures in a terminal."""
_REDRAW = "\x1b[H\x1b[J"
"""Puts the cursor at the top of a terminal, and clears it."""


class Watching:
    """The commands that show a mesh live.

    Args:
        shell: the shell of the notebook.
        meshes: the meshes of the notebook.
        shown: the meshes that cells have shown.
    """

    def __init__(self, shell: Any, meshes: NotebookMeshes, shown: ShownMeshes) -> None:
        self._shell = shell
        self._meshes = meshes
        self._shown = shown

    def commands(self) -> dict[str, Callable[[list[str]], Any]]:
        """Return the action of each command."""
        return {"view": self.view, "top": self.top}

    def view(self, words: list[str]) -> None:
        """Show the ranks of a mesh in the cell."""
        self._shown.show(self._mesh("view", words).procs)

    def top(self, words: list[str]) -> None:
        """Show the ranks of a mesh as text, until it is interrupted."""
        source = telemetry_of(self._mesh("top", words).procs)
        kernel = kernel_of(self._shell)
        try:
            if kernel is None:
                _in_terminal(source)
            elif has_cells(kernel.get_parent("shell")):
                _in_cell(source)
            else:
                _printed(source)
        except KeyboardInterrupt:
            # This is how it ends.
            return

    def _mesh(self, command: str, words: list[str]) -> Mesh:
        return self._meshes.get(parse(command, words).name)


def _in_terminal(source: StateSource) -> None:
    """Redraw the picture in a terminal of this process."""
    from rich.live import Live
    from rich.text import Text

    with Live(Text(text_of(state_of_source(source))), auto_refresh=False, screen=True) as live:
        while True:
            time.sleep(_EVERY_S)
            live.update(Text(text_of(state_of_source(source))), refresh=True)


def _in_cell(source: StateSource) -> None:
    """Replace the picture in the output of a cell."""
    shown, handle = text_of(state_of_source(source)), None
    handle = display_line(shown)
    while True:
        time.sleep(_EVERY_S)
        text = text_of(state_of_source(source))
        if text != shown:
            shown, handle = text, display_line(text, handle)


def _printed(source: StateSource) -> None:
    """Print the picture over and over, for the terminal of a front end such as ``jupyter console``."""
    while True:
        print(f"{_REDRAW}{text_of(state_of_source(source))}\n(Ctrl-C or Stop ends this)", flush=True)
        time.sleep(_EVERY_S)
