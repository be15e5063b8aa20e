"""Where the output of ranks goes: to the cell that caused it, also when another one runs by then."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any

from monarch._actors.output import show
from monarch._actors.runtime import Runtime
from monarch._core.fold import Line

_REMEMBERED = 10_000
LINES_SHOWN = 1000
"""Lines of one cell that are shown as they come; the others are kept, for ``%mesh log``."""


class Streams:
    """Takes folded lines of ranks and sends them to the outputs of their cells.

    Args:
        runtime: of the notebook.
        kernel: ipykernel's kernel; None in a terminal, where lines are simply printed.
    """

    def __init__(self, runtime: Runtime, kernel: Any) -> None:
        self._runtime = runtime
        self._kernel = kernel
        self._parents: OrderedDict[int, Any] = OrderedDict()
        self._shown: dict[str, int] = {}
        self.log: list[str] = []
        self.hidden: dict[int, list[str] | None] = {}
        """Of ports whose output is not to be shown: where it is collected, or None."""
        self._hiding: dict[int, bool] = {}
        """Threads whose calls are to be hidden from their beginning; whether their output is collected."""
        runtime.on_open = self.opened

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
            self.hidden[port] = [] if collect else None
        if self._kernel is None:
            return
        self._parents[port] = self._kernel.get_parent("shell")
        if len(self._parents) > _REMEMBERED:
            self._parents.popitem(last=False)

    def calls_of(self, cell: str) -> list[Any]:
        """The calls of a cell, by its message id, that have no answer yet."""
        gathers = self._runtime._gathers
        return [
            gathers[port]
            for port, parent in list(self._parents.items())
            if port in gathers and (parent or {}).get("header", {}).get("msg_id") == cell
        ]

    def take(self, line: Line) -> None:
        """Shows a line in the cell that it belongs to."""
        port = line.source[2] if isinstance(line.source, tuple) else 0
        text = f"{line.prefix()} {line.text}\n"
        self.log.append(text)
        if port in self.hidden:
            kept = self.hidden[port]
            if kept is not None:
                kept.append(text)
            return
        if self._kernel is None:
            show(line)
            return
        parent = self._parents.get(port) or self._kernel.get_parent("shell")
        cell = (parent or {}).get("header", {}).get("msg_id", "")
        count = self._shown[cell] = self._shown.get(cell, 0) + 1
        if count > LINES_SHOWN:
            if count == LINES_SHOWN + 1:
                self.write("… more lines of this cell are kept: %mesh log shows them\n", line.stream, parent)
            return
        self.write(text, line.stream, parent)

    def write(self, text: str, stream: str, parent: Any) -> None:
        """Sends text to the output of a cell."""
        kernel = self._kernel
        if kernel is None:
            print(text, end="", file=sys.stdout if stream == "stdout" else sys.stderr)
            return
        kernel.session.send(
            kernel.iopub_socket,
            "stream",
            {"name": stream, "text": text},
            parent=parent,
            ident=f"stream.{stream}".encode(),
        )
