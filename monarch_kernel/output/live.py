"""Unfinished lines of ranks, such as progress bars: one display that is updated, with one line for each state."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any

from monarch._kernel_api import PROGRESS, Block, describe_ranks
from monarch_kernel.output.control_codes import without_codes

_ROWS = 32
"""Most lines of a display; of more ranks, the first and the last are shown."""
_LONG = 500
"""Most characters of a line."""
_LINES = 20
"""Most finished lines of one rank in a display."""
_DISPLAYS = 200
"""Most displays of one call; later bars replace the last one."""

Key = tuple[int, str]
"""Rank and stream."""


class LiveLines:
    """One display: the lines that are unfinished at the same time. For one thread at a time."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.ended: dict[Key, list[str]] = {}
        """Lines that were unfinished, with their last text."""
        self.open: dict[Key, str] = {}
        self.is_shown = False

    def ranks(self) -> set[int]:
        """Return the ranks with lines."""
        return {rank for rank, _ in (*self.ended, *self.open)}

    def drop(self, rank: int) -> None:
        """Drop the lines of a rank, which has cleared them."""
        for table in (self.ended, self.open):
            for key in [key for key in table if key[0] == rank]:
                del table[key]

    def end(self, key: Key, lines: Sequence[str]) -> None:
        """Record finished lines of a rank."""
        self.open.pop(key, None)
        self.ended[key] = [*self.ended.get(key, []), *lines][-_LINES:]

    def text(self) -> str:
        """Return all lines, equal ones of several ranks as one."""
        ranks: dict[tuple[str, ...], list[int]] = {}
        for key in sorted(self.ended.keys() | self.open.keys()):
            current = [self.open[key]] if key in self.open else []
            ranks.setdefault((*self.ended.get(key, []), *current), []).append(key[0])
        rows = [f"[{describe_ranks(each)}] {line[:_LONG]}" for lines, each in ranks.items() for line in lines]
        if len(rows) > _ROWS:
            rows[_ROWS // 2 : -_ROWS // 2] = [f"… {len(rows) - _ROWS} more lines"]
        return "\n".join(rows)


Send = Callable[[str, LiveLines, Any], None]
"""Sends a display: the kind of the message, the lines, the request of the cell."""


class Live:
    """The unfinished lines of calls, by port. For the output thread only.

    Args:
        send: sends a display.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._lines: dict[int, LiveLines] = {}
        self._count: dict[int, int] = {}
        """Displays of a call so far."""
        self._last: dict[int, str] = {}
        """Display id of the last one."""

    def update(self, port: int, blocks: Sequence[Block], parent: Any) -> None:
        """Show the unfinished lines of a call as they are now."""
        lines = self._lines.get(port)
        blocks = [block for block in blocks if without_codes(block.text).strip()]
        if lines is None:
            if not blocks:
                return
            lines = self._lines[port] = self._new(port)
        lines.open = {(rank, block.stream): block.text.rstrip() for block in blocks for rank in block.ranks}
        self._show(port, lines, parent)

    def finish(self, port: int, block: Block, parent: Any) -> bool:
        """Show the end of lines that were unfinished; return False if they were not shown meanwhile."""
        lines = self._lines.get(port)
        keys = [(rank, block.stream.removeprefix(PROGRESS)) for rank in block.ranks]
        if lines is None or not (lines.open.keys() | lines.ended.keys()).intersection(keys):
            return False
        for key in keys:
            lines.end(key, [line.rstrip() for line in block.text[:-1].split("\n")])
        self._show(port, lines, parent)
        return True

    def end(self, port: int) -> None:
        """Forget an ended call."""
        for table in (self._lines, self._count, self._last):
            table.pop(port, None)

    def _new(self, port: int) -> LiveLines:
        self._count[port] = self._count.get(port, 0) + 1
        if self._count[port] > _DISPLAYS:
            lines = LiveLines(self._last[port])
            lines.is_shown = True
            return lines
        self._last[port] = secrets.token_hex(8)
        return LiveLines(self._last[port])

    def _show(self, port: int, lines: LiveLines, parent: Any) -> None:
        self._send("update_display_data" if lines.is_shown else "display_data", lines, parent)
        lines.is_shown = True
        if not lines.open:
            del self._lines[port]
