"""The waits of running cells, shown while they last: for which ranks, why, and behind which earlier calls."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from monarch._kernel_api import Gather, Node
from monarch_kernel.calls.record import CallRecord, EarlierCall
from monarch_kernel.calls.waits import wait_lines
from monarch_kernel.kernel_like import Kernel, request_of
from monarch_kernel.output.diagnosing import Diagnosing
from monarch_kernel.output.frontend import has_cells, is_terminal
from monarch_kernel.output.imports import Importing
from monarch_kernel.output.late import id_of
from monarch_kernel.output.owners import Owners
from monarch_kernel.output.positions import Positions
from monarch_kernel.output.waiting import PATIENCE, WaitingLine

_TERMINAL = 79
"""Characters of a line that any terminal holds."""
_REASONS = 20
"""Most different explanations of the waits of one cell that are written."""


class Screen(Protocol):
    """Shows texts in cells."""

    def run(self, action: Callable[[], None]) -> None:
        """Run an action in the thread of the output."""

    def write(self, text: str, stream: str, parent: Any) -> None:
        """Send text to the output of a cell, which stays when ranks clear theirs."""

    def overwrite(self, text: str, parent: Any) -> None:
        """Replace the last line of a terminal."""

    def send_display(self, kind: str, content: dict[str, Any], parent: Any) -> None:
        """Send a display of a cell, or an update."""


class CellWaits:
    """Watches the running cells of a notebook.

    Args:
        node: the node of the notebook.
        kernel: ipykernel's kernel; None in a terminal.
        owners: the cells of calls.
        calls: the calls of the notebook.
        screen: shows texts.
    """

    def __init__(self, node: Node, kernel: Kernel | None, owners: Owners, calls: CallRecord, screen: Screen) -> None:
        self._node = node
        self._kernel = kernel
        self._owners = owners
        self._calls = calls
        self._screen = screen
        # Single operations on each, by the threads that run cells and the receiving thread.
        self.running: dict[str, Any] = {}
        """The running cells, by message id."""
        self._diagnosing = Diagnosing(node, self._show_waits, calls.is_cell)
        self._waiting = WaitingLine(calls, Positions(node).text, self._diagnosing.text, screen.send_display)
        self._reasons: dict[str, set[str]] = {}
        """By cell of a front end without displays, why its ranks wait, as it was written. Leader only."""
        self._told: set[tuple[str, int | tuple[str, frozenset[str]]]] = set()
        """The cells and calls whose wait was reported."""
        self._watching = False
        self._imports: dict[str, Importing] = {}
        """By cell, a module that its thread imports to read a value. Single operations, as above."""

    def begin(self) -> None:
        """Record the start of a cell."""
        parent = self._kernel.get_parent("shell") if self._kernel is not None else None
        self.running[id_of(parent)] = parent

    def end(self) -> str:
        """Record the end of a cell; return the id of a display of it that is empty now, or nothing."""
        cell = id_of(request_of(self._kernel))
        self._imports.pop(cell, None)
        self._told = {each for each in self._told if each[0] != cell}
        return self._waiting.end(cell, self.running.pop(cell, None))

    def importing(self, module: Importing) -> None:
        """Record that this thread begins to import a module to read a value of the running cell."""
        self._imports[id_of(request_of(self._kernel))] = module
        self.watch()

    def told(self, calls: Sequence[Gather[Any]]) -> None:
        """Record that the current cell has reported its wait for these calls."""
        cell = id_of(request_of(self._kernel))
        self._told.update((cell, call.port) for call in calls)

    def stuck(self, calls: Sequence[Gather[Any]]) -> str:
        """Describe why calls could not have ended, unless their cell has kept that in its output. Any thread."""
        cells = {id_of(self._owners.get(call.port)) for call in calls}
        if not calls or any(self._reasons.get(cell) for cell in cells):
            return ""
        return self._diagnosing.stuck(calls, self._calls.title(calls[0]))

    def watch(self) -> None:
        """Schedule a check of what running cells wait for."""
        if not self._watching and self.running:
            self._watching = True
            self._node.receive_loop.call_later(PATIENCE, self._look)

    def _look(self) -> None:
        """Report what running cells wait for: which ranks, and each earlier call, once."""
        self._watching = False
        waiting = [each for each in self._show_waits() if each[2]]
        for cell, parent, calls in waiting:
            news: list[EarlierCall] = []
            for each in self._calls.ahead(calls):
                # Several calls of one map have the same title.
                keys = {(cell, each.call.port), (cell, (self._calls.title(each.call), each.procs))}
                if not keys & self._told:
                    news.append(each)
                self._told |= keys
            text = "".join(f"{line}\n" for line in wait_lines(self._calls, news))
            if text:
                # In the output thread: the page of a cell may be locked for as long as another thread sends it.
                self._screen.run(lambda text=text, parent=parent: self._screen.write(text, "stderr", parent))
        if waiting or any(each.runs() for each in list(self._imports.values())):
            self.watch()

    def _show_waits(self) -> list[tuple[str, Any, list[Gather[Any]]]]:
        """Show which ranks running cells wait for, and why; return the cells with their requests and calls."""
        running = [(cell, parent, self.calls_of(cell)) for cell, parent in list(self.running.items())]
        for cell, parent, calls in running:
            importing = self._imports.get(cell)
            note = importing.text() if importing is not None else ""
            if has_cells(parent):
                self._waiting.update(cell, parent, calls, lambda cell=cell: cell in self.running, note)
                continue
            line, *reasons = self._waiting.lines(calls) or [note]
            self._write_reasons(cell, parent, reasons)
            if is_terminal(self._kernel, parent):
                self._screen.overwrite(_in_width(line), parent)
        self._reasons = {cell: told for cell, told in self._reasons.items() if cell in self.running}
        return running

    def _write_reasons(self, cell: str, parent: Any, reasons: Sequence[str]) -> None:
        """Write once why ranks wait, where a text cannot be replaced."""
        text = "".join(f"{line}\n" for line in reasons)
        # Text with other seconds only is no news.
        key = re.sub(r" for \d+\w+( \d+\w)?", "", text)
        told = self._reasons.setdefault(cell, set())
        if text and key not in told and len(told) < _REASONS:
            told.add(key)
            self._screen.write(text, "stderr", parent)

    def calls_of(self, cell: str) -> list[Gather[Any]]:
        """Return the unanswered calls of a cell, by its message id."""
        gathers = self._node.ports.gathers
        gathers_of_cell = [gathers.get(port) for port in self._owners.open_ports(cell)]
        # Other gathers wait for deaths, which cannot be stopped.
        return [each for each in gathers_of_cell if isinstance(each, Gather)]

    def again(self, parent: Any) -> None:
        """Show again which ranks a cell waits for."""
        self._waiting.again(id_of(parent), parent)


def _in_width(text: str) -> str:
    """Return as much of a text as one line of a terminal holds, since a wrapped line cannot be overwritten."""
    return text if len(text) <= _TERMINAL else text[: _TERMINAL - 1] + "…"
