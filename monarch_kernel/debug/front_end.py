"""The link between the commands of the notebook and the debugger of its front end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from monarch_kernel.source.gutter import lines_above, typed

Packed = tuple[int, str, str, int, str, str, str]
"""A breakpoint as ranks take it; see ``Point`` in the runtime."""


class Ran(NamedTuple):
    """A cell whose code ranks know by another name than front ends do."""

    text: str
    """All of the cell, as typed."""
    above: int
    """Lines above the first one of the code of the ranks."""


class FrontEnd:
    """The debugger of the front end, as the commands see it, and the cells, as that debugger sees them."""

    def __init__(self) -> None:
        # Written by the thread of the control channel, as a whole.
        self.active = False
        """Whether a debugger is attached: it shows where ranks stop, and asks what they are to do."""
        self.points: Callable[[], tuple[Packed, ...]] = tuple
        """Returns its breakpoints, in any thread."""
        self.show: Callable[[str], object] = lambda proc: None
        """Called with the process of a rank that a person has selected elsewhere; in any thread."""
        self.on_cell: Callable[[], object] = lambda: None
        """Called before a cell runs on ranks; in the thread of the cell."""
        # Written by threads that run cells, in single operations.
        self.cells: dict[str, Ran] = {}
        """By the name of the code on ranks, such as ``cell [3]``."""
        self.spawned: dict[str, str] = {}
        """By all of a cell that spawns actors, the part with their class."""

    def begin(self, shell: Any, name: str) -> None:
        """Note a cell that is about to run on ranks.

        Args:
            shell: the shell of the notebook.
            name: the name of its code on ranks, whose lines are those of the cell.
        """
        text = typed(shell)
        if text:
            self.cells[name] = Ran(text, 0)
            self.on_cell()

    def begin_spawn(self, shell: Any, code: str) -> None:
        """Note a cell that is about to define actors, whose code is that of the notebook."""
        text = typed(shell)
        if lines_above(shell, code):
            # All of it, since its lines are those of the cell.
            self.spawned[text] = text
            self.on_cell()
