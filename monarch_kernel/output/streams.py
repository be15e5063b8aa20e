"""The output of ranks goes to the cell that caused it, even while another cell runs."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from threading import Lock, get_ident
from typing import Any

from monarch._kernel_api import (
    PROGRESS,
    Block,
    Excerpt,
    Gather,
    Node,
    UnjoinedCollectives,
    UnjoinedRanks,
    advice,
    describe_ranks,
    describe_unjoined,
    in_units,
    is_tuple,
    ranks_of,
    show_blocks,
)
from monarch_kernel.calls.record import CallRecord
from monarch_kernel.compat import capturing_streams, publish
from monarch_kernel.kernel_like import Kernel, request_of
from monarch_kernel.output.cell_waits import CellWaits
from monarch_kernel.output.frontend import is_terminal, overwrites_displays
from monarch_kernel.output.late import LateOutput, id_of
from monarch_kernel.output.live import Live, LiveLines
from monarch_kernel.output.log import OutputLog
from monarch_kernel.output.owners import Owners, without_code
from monarch_kernel.output.page import Page
from monarch_kernel.output.portions import Portions

_CAPTURED = 10_000
"""Most calls whose output ``%%capture`` takes."""
_CELLS = 1_000
"""Most cells whose output is counted."""
LINES_SHOWN = 5_000
"""Lines of one cell that are shown as they arrive, since a page with many more is slow; of the rest, ``%mesh log`` has
all and the cell its end."""
TEXT_SHOWN = 1 << 20
"""Characters of one cell that are shown as they arrive; at least one piece."""
_COLLECTED = 8 << 20
"""Characters kept from the beginning and from the end of the output of a ``--collect`` cell."""
_MORE = "… more lines of this cell: {}; first lines of other ranks follow, and last lines of each when it ends\n"
_TEMPORARY = "ipykernel_"
"""In the names of files that ipykernel makes up for cells; errors and warnings of ranks show the cells instead."""
_UNFINISHED = 200
"""Most characters shown of an unfinished line."""


class _CellOutput:
    """The output of a cell so far."""

    __slots__ = ("bytes_left_out", "is_of_ranks", "number", "portions", "unfinished")

    def __init__(self) -> None:
        self.portions = Portions(LINES_SHOWN, TEXT_SHOWN)
        self.bytes_left_out: dict[int, int] = {}
        """Bytes left out, by rank."""
        self.number = 0
        """The number of the cell; 0 if unknown."""
        self.unfinished = ""
        """The unfinished line on screen; the next output overwrites it."""
        self.is_of_ranks = False
        """Whether ranks have printed it, rather than that it says which ranks still run."""

    def where(self) -> str:
        """Say what shows all of the output."""
        return f"%mesh log{f' --cell {self.number}' if self.number else ''} shows them"


class Streams:
    """Sends folded lines of ranks to the outputs of their cells.

    Args:
        node: the node of the notebook.
        kernel: ipykernel's kernel; None in a terminal, where lines are printed.
    """

    def __init__(self, node: Node, kernel: Kernel | None) -> None:
        self._node = node
        self._kernel = kernel
        self._owners = Owners()
        # Guarded by _lock, which is not held while sending.
        self._cells: OrderedDict[str, _CellOutput] = OrderedDict()
        self._lock = Lock()
        self.log = OutputLog()
        self._live = Live(self._send_live)
        self.output: Any = None
        """The output of the session."""
        self.hidden: dict[int, Excerpt | None] = {}
        """Ports whose output is not shown: where it is collected, or None."""
        self.calls = CallRecord(node)
        self.waits = CellWaits(node, kernel, self._owners, self.calls, self)
        self._late = LateOutput(kernel, self.waits.running)
        # Single operations, by the threads that run cells; read by any thread.
        self._pages: dict[str, Page] = {}
        """Of running cells whose ranks can clear their output, by message id."""
        self._captured: dict[int, dict[str, Any]] = {}
        """Ports of calls from a ``%%capture`` cell: the streams in memory that take their output."""
        self._hiding: dict[int, bool] = {}
        """Threads whose calls are hidden from the start, and whether their output is collected."""
        node.ports.opened.subscribe(self.opened)
        node.ports.closed.subscribe(self._owners.closed)
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
            if len(self._captured) > _CAPTURED:
                self._captured.pop(next(iter(self._captured)), None)
        self.calls.opened(port, self._kernel.shell.displayhook.prompt_count)
        self.waits.watch()
        self._owners.opened(port, self._kernel.get_parent("shell"))
        self._node.ports.follow(port)

    def take(self, blocks: Sequence[Block]) -> None:
        """Show lines in their cells, consecutive lines of a cell as one message."""
        parent: Any = None
        stream = ""
        shown: list[Block] = []
        for block in blocks:
            port = _port_of(block.source)
            if block.stream == "stderr" and _TEMPORARY in block.text:
                block = block._replace(text=advice().placed(block.text))
            text = block.prefixed()
            # A progress bar on stderr is not an error.
            name = "stdout" if block.stream.startswith(PROGRESS) else block.stream
            self.log.add(text, self.calls.cell_of(port), name, block.source[0] if is_tuple(block.source) else "")
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
            owner = self._owners.get(port) or self._kernel.get_parent("shell")
            self._number(owner, self.calls.cell_of(port))
            if self.calls.has_handle(port):
                owner = self._late.owner(owner, text, "stdout" if block.stream.startswith(PROGRESS) else block.stream)
                if owner is None:
                    continue
            if block.stream.startswith(PROGRESS):
                if shown:
                    self._show_blocks(shown, stream, parent)
                    shown = []
                with self._waking(owner, [block]):
                    if self._live.finish(port, block, owner):
                        continue
            if shown and (owner is not parent or name != stream):
                self._show_blocks(shown, stream, parent)
                shown = []
            parent, stream = owner, name
            shown.append(block)
        if shown:
            self._show_blocks(shown, stream, parent)

    def _show_blocks(self, blocks: Sequence[Block], stream: str, parent: Any) -> None:
        """Show lines in a cell, unless its page will be shown again."""
        page = self._pages.get(id_of(parent))
        with page.lock if page is not None else nullcontext():
            if page is None or page.add_blocks(blocks, stream):
                self.show("".join(block.prefixed() for block in blocks), stream, parent)

    @contextmanager
    def _waking(self, parent: Any, blocks: Sequence[Block]) -> Generator[None]:
        """Let unfinished lines clear what their ranks have shown, and keep the page of the cell meanwhile."""
        page = self._pages.get(id_of(parent))
        with page.lock if page is not None else nullcontext():
            if page is not None:
                page.wake([rank for block in blocks for rank in block.ranks])
            yield

    def open_page(self, parent: Any) -> Page | None:
        """Keep the output of a cell while it runs, so that ranks can clear theirs; None where nothing is cleared."""
        if self._kernel is None or is_terminal(self._kernel, parent):
            return None
        page = self._pages[id_of(parent)] = Page(_Canvas(self, parent), self._later, (LINES_SHOWN, TEXT_SHOWN))
        return page

    def close_page(self, parent: Any, page: Page) -> None:
        """Show the last state of the output of a cell that ends."""
        page.close()
        if self._pages.get(id_of(parent)) is page:
            del self._pages[id_of(parent)]

    def _later(self, seconds: float, action: Callable[[], None]) -> None:
        self._node.receive_loop.call_later(seconds, lambda: self.run(action))

    def run(self, action: Callable[[], None]) -> None:
        """Run an action in the thread of the output, since the page of a cell may be locked while it is sent."""
        self.output.run(action)

    def is_of(self, port: int, parent: Any) -> bool:
        """Return whether a call belongs to a cell."""
        return id_of(self._owners.get(port)) == id_of(parent)

    def clear(self, parent: Any, wait: bool) -> _CellOutput:
        """Clear a cell, now or with its next output; return what it had shown."""
        with self._lock:
            old = self._cell(parent)
            new = self._cells[id_of(parent)] = _CellOutput()
            new.number = old.number
        if self._kernel is not None:
            publish(self._kernel, "clear_output", {"wait": wait}, parent)
        return old

    def cut(self, parent: Any, old: _CellOutput) -> None:
        """Keep the end of a long output that was cleared in part."""
        with self._lock:
            cell = self._cell(parent)
            cell.portions, cell.bytes_left_out = old.portions, old.bytes_left_out
            cell.portions.is_cut = True

    def show_display(self, content: dict[str, Any], parent: Any) -> None:
        """Show a display in a cell."""
        self.send_display("display_data", content, parent)

    def unfinished(self, source: Any, blocks: Sequence[Block]) -> None:
        """Show unfinished lines, such as progress bars, in place of their last state."""
        port = _port_of(source)
        if port in self.hidden or (blocks and blocks[-1].stream in self._captured.get(port, ())):
            return
        parent = self._owners.get(port) or request_of(self._kernel)
        if self.calls.has_handle(port):
            parent = self._late.owner(parent)
            if parent is None:
                return
        if overwrites_displays(self._kernel, parent):
            with self._lock:
                if self._cell(parent).portions.is_cut:
                    return
            with self._waking(parent, blocks):
                self._live.update(port, blocks, parent)
        elif blocks:
            self.overwrite("  ".join(block.prefixed()[:-1] for block in blocks)[:_UNFINISHED], parent, True)

    def overwrite(self, text: str, parent: Any, is_of_ranks: bool = False) -> None:
        """Show unfinished lines of ranks, or which ranks a cell waits for, in the last line of a terminal."""
        with self._lock:
            cell = self._cell(parent)
            if cell.portions.is_cut or cell.unfinished == text or (cell.is_of_ranks and not is_of_ranks):
                return
            cell.is_of_ranks = is_of_ranks
            wiped, cell.unfinished = _wipe(cell), text
        self.write(wiped + text, "stdout", parent)

    def _send_live(self, kind: str, lines: LiveLines, parent: Any) -> None:
        page = self._pages.get(id_of(parent))
        with page.lock if page is not None else nullcontext():
            if page is not None:
                kind = page.add_bars(lines)
            data = {"text/plain": lines.text()}
            if kind:
                content = {"data": data, "metadata": {}, "transient": {"display_id": lines.name}}
                self.send_display(kind, content, parent)

    def send_display(self, kind: str, content: dict[str, Any], parent: Any) -> None:
        """Send a display of a cell, or an update."""
        if self._kernel is not None:
            publish(self._kernel, kind, content, parent)

    def left_out(self, source: Any, rank: int, count: int) -> None:
        """Count bytes of a rank that were left out because it printed too fast."""
        parent = self._owners.get(source[2])
        with self._lock:
            counts = self._cell(parent).bytes_left_out
            counts[rank] = counts.get(rank, 0) + count

    def finish(self, parent: Any = None) -> None:
        """Show the end of a finished cell's output if it was too long, and how much is not shown.

        Args:
            parent: the parent of the cell; None for the current one.
        """
        if self._kernel is None:
            return
        parent = parent or self._kernel.get_parent("shell")
        with self._lock:
            cell = self._cells.get(id_of(parent))
            if cell is None:
                return
            text = _wipe(cell)
            if cell.portions.is_cut:
                text += cell.portions.end(cell.where()) + _of_ranks(cell.bytes_left_out)
                cell.bytes_left_out = {}
        if text:
            self.write(text, "stdout", parent)

    def wipe(self) -> None:
        """Erase an unfinished line of the current cell, before something that would follow on the same line."""
        if self._kernel is None:
            return
        parent = self._kernel.get_parent("shell")
        with self._lock:
            cell = self._cells.get(id_of(parent))
            text = _wipe(cell) if cell is not None else ""
        if text:
            self.write(text, "stdout", parent)

    def show(self, text: str, stream: str, parent: Any) -> None:
        """Show as much of a text in a cell as fits."""
        with self._lock:
            cell = self._cell(parent)
            text = cell.portions.take(text, _MORE.format(cell.where()))
            if text:
                text = _wipe(cell) + text
        if text:
            self.send(text, stream, parent)

    def _number(self, parent: Any, number: int) -> None:
        with self._lock:
            self._cell(parent).number = number

    def _cell(self, parent: Any) -> _CellOutput:
        """Return the output of a cell; the caller holds the lock."""
        name = id_of(parent)
        cell = self._cells.get(name)
        if cell is None:
            cell = self._cells[name] = _CellOutput()
            if len(self._cells) > _CELLS:
                self._cells.popitem(last=False)
        self._cells.move_to_end(name)
        return cell

    def tell(self, text: str, port: int) -> None:
        """Show text as an error in the cell of a call, or in the current cell if that is unknown."""
        if self._kernel is None:
            print(text, end="", file=sys.stderr, flush=True)
        else:
            self.write(text, "stderr", self._owners.get(port) or self._kernel.get_parent("shell"))

    def tell_unjoined(self, finding: UnjoinedRanks, call: Gather[Any], count: int) -> None:
        """Report in its cell that ranks wait in a collective for finished ranks, unless the cell says why they wait."""
        if not self.calls.has_handle(call.port) and id_of(self._owners.get(call.port)) in self.waits.running:
            return
        is_cell = self.calls.is_cell(call)
        where, what = (
            ("this cell", "stop the cell") if is_cell else (call.label, f"stop the cell that waits for {call.label}")
        )
        self.tell(describe_unjoined(finding, count, where, what, ranks_of(call)) + "\n", call.port)

    def place(self) -> CellOutput:
        """Return the output of the current cell, usable even after its end."""
        return CellOutput(self, without_code(self._kernel.get_parent("shell")) if self._kernel is not None else None)

    def ask_late(self, parent: Any) -> None:
        """Show what a cell has printed after its end in the current cell, if its own cell cannot show it."""
        if self._kernel is None:
            return
        here = self._kernel.get_parent("shell")
        for stream, text in self._late.ask(parent, here):
            self.show(text, stream, here)

    def update(self, name: str, text: str, parent: Any) -> None:
        """Replace the text of a display."""
        if self._kernel is not None:
            content = {"data": {"text/plain": text}, "metadata": {}, "transient": {"display_id": name}}
            publish(self._kernel, "update_display_data", content, parent)

    def write(self, text: str, stream: str, parent: Any) -> None:
        """Send text to the output of a cell, which stays when ranks clear theirs."""
        page = self._pages.get(id_of(parent))
        with page.lock if page is not None else nullcontext():
            if page is None or page.add_note(text, stream):
                self.send(text, stream, parent)

    def send(self, text: str, stream: str, parent: Any) -> None:
        """Send text to the output of a cell."""
        kernel = self._kernel
        if kernel is None:
            print(text, end="", file=sys.stdout if stream == "stdout" else sys.stderr)
            return
        publish(kernel, "stream", {"name": stream, "text": text}, parent, f"stream.{stream}")


class _Canvas:
    """The cell of a page; see ``Canvas``."""

    def __init__(self, streams: Streams, parent: Any) -> None:
        self._streams = streams
        self._parent = parent
        self._cleared: _CellOutput | None = None

    def clear(self, wait: bool) -> None:
        self._cleared = self._streams.clear(self._parent, wait)

    def write(self, text: str, stream: str, is_note: bool) -> None:
        (self._streams.send if is_note else self._streams.show)(text, stream, self._parent)

    def show(self, content: dict[str, Any]) -> None:
        self._streams.show_display(content, self._parent)

    def end(self, is_cut: bool) -> None:
        if is_cut and self._cleared is not None:
            self._streams.cut(self._parent, self._cleared)
        self._streams.waits.again(self._parent)


class CellOutput:
    """The output of one cell.

    Args:
        streams: the streams of the notebook.
        parent: the parent of the cell.
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
    shown, cell.unfinished, cell.is_of_ranks = cell.unfinished, "", False
    return "\r" + " " * len(shown) + "\r" if shown else ""


def _of_ranks(counts: dict[int, int]) -> str:
    """Describe the left-out output of ranks, one line for each count."""
    ranks: dict[int, list[int]] = {}
    for rank, count in sorted(counts.items()):
        ranks.setdefault(count, []).append(rank)
    return "".join(
        f"[{describe_ranks(each)}: {count:,} bytes of output{in_units(count)} omitted: printed faster than the "
        f"notebook can show]\n"
        for count, each in ranks.items()
    )
