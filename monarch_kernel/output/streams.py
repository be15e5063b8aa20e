"""The output of ranks goes to the cell that caused it, even while another cell runs."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from threading import Lock, get_ident
from typing import Any

from monarch._kernel_api import (
    PROGRESS,
    Block,
    Excerpt,
    Finding,
    Gather,
    Node,
    UnjoinedCollectives,
    describe_ranks,
    describe_unjoined,
    in_units,
    is_tuple,
    left_out,
    ranks_of,
    show_blocks,
)
from monarch_kernel.cells.calls import Calls
from monarch_kernel.compat import capturing_streams, publish
from monarch_kernel.output.frontend import has_cells, overwrites_displays
from monarch_kernel.output.late import Late, id_of
from monarch_kernel.output.live import Live
from monarch_kernel.output.log import OutputLog
from monarch_kernel.output.waiting import PATIENCE, WaitingLine

_REMEMBERED = 10_000
LINES_SHOWN = 20_000
"""Lines of one cell that are shown as they arrive; of the rest, ``%mesh log`` has all and the cell its end."""
TEXT_SHOWN = 2 << 20
"""Characters of one cell that are shown as they arrive; at least one piece."""
_LAST = 8192
"""Characters shown from the end of a long output."""
_COLLECTED = 8 << 20
"""Characters kept from the beginning and from the end of the output of a ``--collect`` cell."""
_MORE = "… more lines of this cell: %mesh log shows them; the last follow at its end\n"
_UNFINISHED = 200
"""Most characters shown of an unfinished line."""


class _CellOutput:
    """The output of a cell so far."""

    __slots__ = ("bytes_left_out", "last", "lines", "size", "unfinished")

    def __init__(self) -> None:
        self.lines = 0
        self.size = 0
        self.last: Excerpt | None = None
        """The end of the output, once it is too long to show as it arrives."""
        self.bytes_left_out: dict[int, int] = {}
        """Bytes left out, by rank."""
        self.unfinished = ""
        """The unfinished line on screen; the next output overwrites it."""


class Streams:
    """Sends folded lines of ranks to the outputs of their cells.

    Args:
        node: of the notebook.
        kernel: ipykernel's kernel; None in a terminal, where lines are printed.
    """

    def __init__(self, node: Node, kernel: Any) -> None:
        self._node = node
        self._kernel = kernel
        self._parents: OrderedDict[int, Any] = OrderedDict()
        # Guarded by _lock, which is not held while sending.
        self._cells: OrderedDict[str, _CellOutput] = OrderedDict()
        self._lock = Lock()
        self.log = OutputLog()
        self._live = Live(self._send_live)
        self.output: Any = None
        """The output of the session."""
        self.hidden: dict[int, Excerpt | None] = {}
        """Ports whose output is not shown: where it is collected, or None."""
        self.calls = Calls(node)
        # Single operations on each, by the threads that run cells and the receiving thread.
        self._running: dict[str, Any] = {}
        """The running cells, by message id."""
        self._late = Late(kernel, self._running)
        self._waiting = WaitingLine(self.calls, self._send_display)
        self._told: set[tuple[str, int]] = set()
        """The cells and calls whose wait was reported."""
        self._watching = False
        self._captured: dict[int, dict[str, Any]] = {}
        """Ports of calls from a ``%%capture`` cell: the streams in memory that take their output."""
        self._hiding: dict[int, bool] = {}
        """Threads whose calls are hidden from the start, and whether their output is collected."""
        node.ports.opened.subscribe(self.opened)
        node.part(UnjoinedCollectives).show = self.tell_unjoined

    def attach(self, output: Any) -> None:
        """Subscribe to the output of the session."""
        output.on_blocks = self.take
        output.on_left_out = self.left_out
        output.on_end = self._live.end
        self.output = output
        if self._kernel is not None:
            output.on_unfinished = self.unfinished

    @contextmanager
    def hiding(self, collect: bool) -> Generator[None]:
        """Hide the output of calls that this thread makes meanwhile: collect it, or only keep it for ``%mesh log``."""
        self._hiding[get_ident()] = collect
        try:
            yield
        finally:
            del self._hiding[get_ident()]

    def opened(self, port: int) -> None:
        """Record a new call: its output belongs to the current cell."""
        collect = self._hiding.get(get_ident())
        if collect is not None:
            # Before the call is sent, so that no line arrives first.
            self.hidden[port] = Excerpt(_COLLECTED, _COLLECTED) if collect else None
        if self._kernel is None:
            return
        captured = capturing_streams()
        if captured and collect is None:
            self._captured[port] = captured
            if len(self._captured) > _REMEMBERED:
                self._captured.pop(next(iter(self._captured)), None)
        self.calls.opened(port, self._kernel.shell.displayhook.prompt_count)
        self._watch()
        self._parents[port] = self._kernel.get_parent("shell")
        if len(self._parents) > _REMEMBERED:
            self._parents.popitem(last=False)

    # Waits of cells

    def begin(self) -> None:
        """Record the start of a cell."""
        parent = self._kernel.get_parent("shell") if self._kernel is not None else None
        self._running[id_of(parent)] = parent

    def end(self) -> None:
        """Record the end of a cell."""
        cell = id_of(self._kernel.get_parent("shell") if self._kernel is not None else None)
        self._waiting.end(cell, self._running.pop(cell, None))
        self._told = {each for each in self._told if each[0] != cell}

    def told(self, calls: Sequence[Gather[Any]]) -> None:
        """Record that the current cell has reported its wait for these calls."""
        cell = id_of(self._kernel.get_parent("shell") if self._kernel is not None else None)
        self._told.update((cell, call.port) for call in calls)

    def _watch(self) -> None:
        """Schedule a check of what running cells wait for."""
        if not self._watching and self._running:
            self._watching = True
            self._node.receive_loop.call_later(PATIENCE, self._look)

    def _look(self) -> None:
        """Report what running cells wait for: which ranks, and each earlier call, once."""
        self._watching = False
        running = [(cell, parent, self.calls_of(cell)) for cell, parent in list(self._running.items())]
        waiting = [each for each in running if each[2]]
        for cell, parent, calls in running:
            if has_cells(parent):
                self._waiting.update(cell, parent, calls, lambda cell=cell: cell in self._running)
        for cell, parent, calls in waiting:
            for each in self.calls.ahead(calls):
                if (cell, each.call.port) not in self._told:
                    self._told.add((cell, each.call.port))
                    self.write(self.calls.reason(each) + "\n", "stderr", parent)
        if waiting:
            self._watch()

    def calls_of(self, cell: str) -> list[Gather[Any]]:
        """Return the unanswered calls of a cell, by its message id."""
        gathers = self._node.ports.gathers
        mine = [gathers.get(port) for port, parent in list(self._parents.items()) if id_of(parent) == cell]
        # Other gathers wait for deaths, which cannot be stopped.
        return [each for each in mine if isinstance(each, Gather)]

    def take(self, blocks: Sequence[Block]) -> None:
        """Show lines in their cells, consecutive lines of a cell as one message."""
        parent: Any = None
        stream = ""
        texts: list[str] = []
        for block in blocks:
            port = _port_of(block.source)
            text = block.prefixed()
            self.log.add(text, self.calls.cell_of(port))
            if port in self.hidden:
                kept = self.hidden[port]
                if kept is not None:
                    kept.add(text)
                continue
            if self._kernel is None:
                show_blocks([block])
                continue
            captured = self._captured.get(port, {}).get(block.stream.removeprefix(PROGRESS))
            if captured is not None:
                captured.write(text)
                continue
            owner = self._parents.get(port) or self._kernel.get_parent("shell")
            if self.calls.has_handle(port):
                owner = self._late.owner(owner, text, "stdout" if block.stream.startswith(PROGRESS) else block.stream)
                if owner is None:
                    continue
            if block.stream.startswith(PROGRESS):
                if texts:
                    self._show("".join(texts), stream, parent)
                    texts = []
                if self._live.finish(port, block, owner):
                    continue
            # A progress bar on stderr is no error.
            name = "stdout" if block.stream.startswith(PROGRESS) else block.stream
            if texts and (owner is not parent or name != stream):
                self._show("".join(texts), stream, parent)
                texts = []
            parent, stream = owner, name
            texts.append(text)
        if texts:
            self._show("".join(texts), stream, parent)

    def unfinished(self, source: Any, blocks: Sequence[Block]) -> None:
        """Show unfinished lines, such as progress bars, in place of their last state."""
        port = _port_of(source)
        if port in self.hidden or (blocks and blocks[-1].stream in self._captured.get(port, ())):
            return
        parent = self._parents.get(port) or self._kernel.get_parent("shell")
        if self.calls.has_handle(port):
            parent = self._late.owner(parent)
            if parent is None:
                return
        if overwrites_displays(self._kernel, parent):
            with self._lock:
                if self._cell(parent).last is not None:
                    return
            self._live.update(port, blocks, parent)
        elif blocks:
            self._overwrite(blocks, parent)

    def _overwrite(self, blocks: Sequence[Block], parent: Any) -> None:
        """Show unfinished lines in the last line of a terminal."""
        text = "  ".join(block.prefixed()[:-1] for block in blocks)[:_UNFINISHED]
        with self._lock:
            cell = self._cell(parent)
            if cell.last is not None or cell.unfinished == text:
                return
            wiped, cell.unfinished = _wipe(cell), text
        self.write(wiped + text, "stdout", parent)

    def _send_live(self, kind: str, name: str, text: str, parent: Any) -> None:
        self._send_display(
            kind, {"data": {"text/plain": text}, "metadata": {}, "transient": {"display_id": name}}, parent
        )

    def _send_display(self, kind: str, content: dict[str, Any], parent: Any) -> None:
        publish(self._kernel, kind, content, parent)

    def left_out(self, source: Any, rank: int, count: int) -> None:
        """Count bytes of a rank that were left out because it printed too fast."""
        parent = self._parents.get(source[2])
        with self._lock:
            counts = self._cell(parent).bytes_left_out
            counts[rank] = counts.get(rank, 0) + count

    def finish(self, parent: Any = None) -> None:
        """Show the end of a finished cell's output if it was too long, and how much is not shown.

        Args:
            parent: of the cell; None for the current one.
        """
        if self._kernel is None:
            return
        parent = parent or self._kernel.get_parent("shell")
        with self._lock:
            cell = self._cells.get(id_of(parent))
            if cell is None:
                return
            text = _wipe(cell)
            if cell.last is not None:
                pieces = cell.last.pieces()
                if cell.last.characters:
                    pieces[0] = f"… {left_out(cell.last.lines, cell.last.characters)} of this cell are not shown here\n"
                text += "".join(pieces) + _of_ranks(cell.bytes_left_out)
                cell.last, cell.bytes_left_out = Excerpt(0, _LAST), {}
        if text:
            self.write(text, "stdout", parent)

    def _show(self, text: str, stream: str, parent: Any) -> None:
        """Show as much of a text in a cell as fits."""
        with self._lock:
            cell = self._cell(parent)
            rest = ""
            if cell.last is None:
                text, rest = _fitting(text, LINES_SHOWN - cell.lines, TEXT_SHOWN - cell.size)
                cell.lines += text.count("\n")
                cell.size += len(text)
                text = _wipe(cell) + text
                if rest:
                    text += _MORE
                    cell.last = Excerpt(0, _LAST)
                    cell.last.add(rest)
            else:
                cell.last.add(text)
                text = ""
        if text:
            self.write(text, stream, parent)

    def _cell(self, parent: Any) -> _CellOutput:
        """Return the output of a cell; the caller holds the lock."""
        name = id_of(parent)
        cell = self._cells.get(name)
        if cell is None:
            cell = self._cells[name] = _CellOutput()
            if len(self._cells) > _REMEMBERED:
                self._cells.popitem(last=False)
        return cell

    def tell(self, text: str, port: int) -> None:
        """Show text as an error in the cell of a call, or in the current cell if that is unknown."""
        if self._kernel is None:
            print(text, end="", file=sys.stderr, flush=True)
        else:
            self.write(text, "stderr", self._parents.get(port) or self._kernel.get_parent("shell"))

    def tell_unjoined(self, finding: Finding, call: Gather[Any], count: int) -> None:
        """Report in its cell that ranks wait in a collective for finished ranks."""
        is_cell = self.calls.is_cell(call)
        where, what = ("this cell", "stop the cell") if is_cell else (call.label, "stop the cell that waits for it")
        self.tell(describe_unjoined(finding, count, where, what, ranks_of(call)) + "\n", call.port)

    def place(self) -> Place:
        """Return the output of the current cell, usable even after its end."""
        return Place(self, self._kernel.get_parent("shell") if self._kernel is not None else None)

    def ask_late(self, parent: Any) -> None:
        """Show what a cell has printed after its end in the current cell, if its own cell cannot show it."""
        if self._kernel is None:
            return
        here = self._kernel.get_parent("shell")
        for stream, text in self._late.ask(parent, here):
            self._show(text, stream, here)

    def update(self, name: str, text: str, parent: Any) -> None:
        """Replace the text of a display."""
        if self._kernel is not None:
            content = {"data": {"text/plain": text}, "metadata": {}, "transient": {"display_id": name}}
            publish(self._kernel, "update_display_data", content, parent)

    def write(self, text: str, stream: str, parent: Any) -> None:
        """Send text to the output of a cell."""
        kernel = self._kernel
        if kernel is None:
            print(text, end="", file=sys.stdout if stream == "stdout" else sys.stderr)
            return
        publish(kernel, "stream", {"name": stream, "text": text}, parent, f"stream.{stream}")


class Place:
    """The output of one cell.

    Args:
        streams: of the notebook.
        parent: of the cell.
    """

    def __init__(self, streams: Streams, parent: Any) -> None:
        self._streams = streams
        self._parent = parent

    def write(self, text: str) -> None:
        """Show a line of an error."""
        self._streams.write(text + "\n", "stderr", self._parent)

    def update(self, name: str, text: str) -> None:
        """Replace the text of a display."""
        self._streams.update(name, text, self._parent)

    def finish(self) -> None:
        """Record the end of the cell."""
        self._streams.finish(self._parent)

    def ask_late(self) -> None:
        """Show in the current cell what this cell has printed after its end and cannot show."""
        self._streams.ask_late(self._parent)


def _port_of(source: object) -> int:
    return source[2] if is_tuple(source) else 0


def _wipe(cell: _CellOutput) -> str:
    """Return the characters that erase the unfinished line."""
    shown, cell.unfinished = cell.unfinished, ""
    return "\r" + " " * len(shown) + "\r" if shown else ""


def _fitting(text: str, lines: int, characters: int) -> tuple[str, str]:
    """Split a text at the end of a line: as much as fits, and the rest."""
    end = len(text)
    if end > characters:
        # One line is always shown; its length has its own bound.
        end = text.rfind("\n", 0, max(0, characters)) + 1 or (text.find("\n") + 1 if characters == TEXT_SHOWN else 0)
    if text.count("\n", 0, end) > lines:
        end = len("\n".join(text.split("\n", lines)[:lines])) + 1 if lines > 0 else 0
    return text[:end], text[end:]


def _of_ranks(counts: dict[int, int]) -> str:
    """Describe the left-out output of ranks, one line for each count."""
    ranks: dict[int, list[int]] = {}
    for rank, count in sorted(counts.items()):
        ranks.setdefault(count, []).append(rank)
    return "".join(
        f"[{describe_ranks(each)}: {count:,} bytes of output{in_units(count)} left out, printed faster than shown]\n"
        for count, each in ranks.items()
    )
