"""Where the output of ranks goes: to the cell that caused it, also when another one runs by then."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Lock, get_ident
from typing import Any

from monarch._kernel_api import (
    Block,
    Excerpt,
    Finding,
    Gather,
    Node,
    UnjoinedCollectives,
    describe_ranks,
    describe_unjoined,
    in_units,
    left_out,
    show_blocks,
)
from monarch_kernel.cells.calls import Calls
from monarch_kernel.compat import publish
from monarch_kernel.output.log import OutputLog

_REMEMBERED = 10_000
LINES_SHOWN = 20_000
"""Lines of one cell that are shown as they come; the others are kept, for ``%mesh log``, and the last are shown."""
TEXT_SHOWN = 2 << 20
"""Characters of one cell that are shown as they come; but at least one piece."""
_LAST = 8192
"""Characters at the end of a cell that are shown, where not all of it is."""
_COLLECTED = 8 << 20
"""Characters of the beginning and of the end that are kept of what a cell with ``--no-stream`` prints."""
_MORE = "… more lines of this cell are kept: %mesh log shows them; the last ones follow at its end\n"
_PATIENCE = 1.0
"""Seconds between two looks at what a cell waits for."""
_UNFINISHED = 200
"""Characters of a line that has not ended."""


class _CellOutput:
    """What a cell has shown so far."""

    __slots__ = ("bytes_left_out", "last", "lines", "size", "unfinished")

    def __init__(self) -> None:
        self.lines = 0
        self.size = 0
        self.last: Excerpt | None = None
        """The end of what is not shown as it comes, once that is so."""
        self.bytes_left_out: dict[int, int] = {}
        """Of each rank that was too far ahead, how many bytes."""
        self.unfinished = ""
        """The line that was shown and has not ended; what comes next is written over it."""


class Streams:
    """Takes folded lines of ranks and sends them to the outputs of their cells.

    Args:
        node: of the notebook.
        kernel: ipykernel's kernel; None in a terminal, where lines are simply printed.
    """

    def __init__(self, node: Node, kernel: Any) -> None:
        self._node = node
        self._kernel = kernel
        self._parents: OrderedDict[int, Any] = OrderedDict()
        # Guarded by _lock, with which nothing is sent.
        self._cells: OrderedDict[str, _CellOutput] = OrderedDict()
        self._lock = Lock()
        self.log = OutputLog()
        self.hidden: dict[int, Excerpt | None] = {}
        """Of ports whose output is not to be shown: where it is collected, or None."""
        self.calls = Calls(node)
        # Single steps on each, by the threads that run cells and by the one that receives.
        self._running: dict[str, Any] = {}
        """The cells that run, by their message ids."""
        self._told: set[tuple[str, int]] = set()
        """The calls that a cell was said to wait for."""
        self._watching = False
        self._hiding: dict[int, bool] = {}
        """Threads whose calls are to be hidden from their beginning; whether their output is collected."""
        node.ports.opened.subscribe(self.opened)
        node.part(UnjoinedCollectives).show = self.tell_unjoined

    def attach(self, output: Any) -> None:
        """Takes what a view of output shows."""
        output.on_blocks = self.take
        output.on_left_out = self.left_out
        if self._kernel is not None:
            output.on_unfinished = self.unfinished

    @contextmanager
    def hiding(self, collect: bool) -> Iterator[None]:
        """Calls that this thread begins meanwhile show nothing: it is collected, or only kept for ``%mesh log``."""
        self._hiding[get_ident()] = collect
        try:
            yield
        finally:
            del self._hiding[get_ident()]

    def opened(self, port: int) -> None:
        """A call begins: its output belongs to the cell that runs now."""
        collect = self._hiding.get(get_ident())
        if collect is not None:
            # Before it is sent, so that no line is faster.
            self.hidden[port] = Excerpt(_COLLECTED, _COLLECTED) if collect else None
        if self._kernel is None:
            return
        self.calls.opened(port, self._kernel.shell.displayhook.prompt_count)
        self._watch()
        self._parents[port] = self._kernel.get_parent("shell")
        if len(self._parents) > _REMEMBERED:
            self._parents.popitem(last=False)

    # What cells wait for

    def begin(self) -> None:
        """A cell begins."""
        parent = self._kernel.get_parent("shell") if self._kernel is not None else None
        self._running[_id_of(parent)] = parent

    def end(self) -> None:
        """It has ended."""
        cell = _id_of(self._kernel.get_parent("shell") if self._kernel is not None else None)
        self._running.pop(cell, None)
        self._told = {each for each in self._told if each[0] != cell}

    def told(self, calls: Sequence[Gather[Any]]) -> None:
        """The cell that runs was said to wait for these."""
        cell = _id_of(self._kernel.get_parent("shell") if self._kernel is not None else None)
        self._told.update((cell, call.port) for call in calls)

    def _watch(self) -> None:
        """Looks in a while what the cells that run wait for."""
        if not self._watching and self._running:
            self._watching = True
            self._node.receive_loop.call_later(_PATIENCE, self._look)

    def _look(self) -> None:
        """Says of each earlier call that a cell waits for that it does."""
        self._watching = False
        waiting = [
            (cell, parent, found) for cell, parent in list(self._running.items()) if (found := self.calls_of(cell))
        ]
        for cell, parent, found in waiting:
            for each in self.calls.ahead(found):
                if (cell, each.call.port) not in self._told:
                    self._told.add((cell, each.call.port))
                    self.write(self.calls.reason(each) + "\n", "stderr", parent)
        if waiting:
            self._watch()

    def calls_of(self, cell: str) -> list[Gather[Any]]:
        """The calls of a cell, by its message id, that have no answer yet."""
        gathers = self._node.ports.gathers
        mine = [gathers.get(port) for port, parent in list(self._parents.items()) if _id_of(parent) == cell]
        # Others wait for deaths, and for nothing that could be stopped.
        return [each for each in mine if isinstance(each, Gather)]

    def take(self, blocks: Sequence[Block]) -> None:
        """Shows lines in the cells that they belong to: all that follow each other there as one message."""
        parent: Any = None
        stream = ""
        texts: list[str] = []
        for block in blocks:
            port = _port_of(block)
            text = block.prefixed()
            self.log.add(text)
            if port in self.hidden:
                kept = self.hidden[port]
                if kept is not None:
                    kept.add(text)
                continue
            if self._kernel is None:
                show_blocks([block])
                continue
            owner = self._parents.get(port) or self._kernel.get_parent("shell")
            if texts and (owner is not parent or block.stream != stream):
                self._show("".join(texts), stream, parent)
                texts = []
            parent, stream = owner, block.stream
            texts.append(text)
        if texts:
            self._show("".join(texts), stream, parent)

    def unfinished(self, blocks: Sequence[Block]) -> None:
        """Shows the state of lines that have not ended, such as progress bars, in place of their last state."""
        port = _port_of(blocks[0])
        if port in self.hidden:
            return
        parent = self._parents.get(port) or self._kernel.get_parent("shell")
        text = "  ".join(block.prefixed()[:-1] for block in blocks)[:_UNFINISHED]
        with self._lock:
            cell = self._cell(parent)
            if cell.last is not None or cell.unfinished == text:
                return
            wiped, cell.unfinished = _wipe(cell), text
        self.write(wiped + text, blocks[-1].stream, parent)

    def left_out(self, source: Any, rank: int, count: int) -> None:
        """Bytes of a rank were left out, as it was too far ahead."""
        parent = self._parents.get(source[2])
        with self._lock:
            found = self._cell(parent).bytes_left_out
            found[rank] = found.get(rank, 0) + count

    def finish(self, parent: Any = None) -> None:
        """A cell has ended: shows the end of its output, where not all of it was shown, and says how much was not.

        Args:
            parent: of the cell; None for the one that runs.
        """
        if self._kernel is None:
            return
        parent = parent or self._kernel.get_parent("shell")
        with self._lock:
            cell = self._cells.get(_id_of(parent))
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
        """Shows as much of a text in a cell as there is room for."""
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
        """What a cell has shown, with the lock held."""
        name = _id_of(parent)
        cell = self._cells.get(name)
        if cell is None:
            cell = self._cells[name] = _CellOutput()
            if len(self._cells) > _REMEMBERED:
                self._cells.popitem(last=False)
        return cell

    def tell(self, text: str, port: int) -> None:
        """Shows text as an error in the cell that has begun a call; in the one that runs if that is not known."""
        if self._kernel is None:
            print(text, end="", file=sys.stderr, flush=True)
        else:
            self.write(text, "stderr", self._parents.get(port) or self._kernel.get_parent("shell"))

    def tell_unjoined(self, finding: Finding, call: Gather[Any], count: int) -> None:
        """Says in its cell of ranks that wait in a collective for ranks that have finished."""
        is_cell = self.calls.is_cell(call)
        where, what = ("this cell", "stop the cell") if is_cell else (call.label, "stop the cell that waits for it")
        self.tell(describe_unjoined(finding, count, where, what) + "\n", call.port)

    def place(self) -> Place:
        """Where the cell that runs now shows things, also when it has ended."""
        return Place(self, self._kernel.get_parent("shell") if self._kernel is not None else None)

    def update(self, name: str, text: str, parent: Any) -> None:
        """Shows another text in place of what was displayed by a name."""
        if self._kernel is not None:
            content = {"data": {"text/plain": text}, "metadata": {}, "transient": {"display_id": name}}
            publish(self._kernel, "update_display_data", content, parent)

    def write(self, text: str, stream: str, parent: Any) -> None:
        """Sends text to the output of a cell."""
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
        """Shows a line of an error."""
        self._streams.write(text + "\n", "stderr", self._parent)

    def update(self, name: str, text: str) -> None:
        """Shows another text in place of what was displayed by a name."""
        self._streams.update(name, text, self._parent)

    def finish(self) -> None:
        """The cell has ended."""
        self._streams.finish(self._parent)


def _id_of(parent: Any) -> str:
    return (parent or {}).get("header", {}).get("msg_id", "")


def _port_of(block: Block) -> int:
    return block.source[2] if isinstance(block.source, tuple) else 0


def _wipe(cell: _CellOutput) -> str:
    """What has a front end forget the line that has not ended."""
    shown, cell.unfinished = cell.unfinished, ""
    return "\r" + " " * len(shown) + "\r" if shown else ""


def _fitting(text: str, lines: int, characters: int) -> tuple[str, str]:
    """A text cut in two at the end of a line: as much as there is room for, and the rest."""
    end = len(text)
    if end > characters:
        # One line is shown whatever its length, which has a bound of its own.
        end = text.rfind("\n", 0, max(0, characters)) + 1 or (text.find("\n") + 1 if characters == TEXT_SHOWN else 0)
    if text.count("\n", 0, end) > lines:
        end = len("\n".join(text.split("\n", lines)[:lines])) + 1 if lines > 0 else 0
    return text[:end], text[end:]


def _of_ranks(counts: dict[int, int]) -> str:
    """How much ranks have printed that was left out, a line for each number."""
    ranks: dict[int, list[int]] = {}
    for rank, count in sorted(counts.items()):
        ranks.setdefault(count, []).append(rank)
    return "".join(
        f"[{describe_ranks(each)}: {count:,} bytes of output{in_units(count)} left out, printed faster than shown]\n"
        for count, each in ranks.items()
    )
