"""The part of a long output that a cell shows: its beginning, and the first and last lines of each rank."""

from __future__ import annotations

import re
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from functools import lru_cache
from heapq import merge

from monarch._kernel_api import left_out, parse_ranks

FIRST = 10
"""Lines that are shown of each rank, even if others have filled the page before."""
LAST = 200
"""Lines that are shown from the end, about as many of each group of ranks that printed the same."""
_FIRST_LINES, _FIRST_CHARACTERS = 1000, 128 << 10
"""Most that is shown as the first lines of ranks after the page was full."""
_LONG = 500
"""Most characters shown of each line at the end."""
_GROUPS = 256
"""Most groups of ranks whose last lines are kept, the latest."""
_RUN = re.compile(r"(\[ranks? ([0-9,-]+)\] )?[^\n]*\n(?:(?(1)\1|(?!\[ranks? [0-9,-]+\] ))[^\n]*\n)*")
"""Consecutive lines of the same ranks, or lines without a prefix."""


class Portions:
    """Divides what a cell shows among its ranks. Not thread-safe.

    Args:
        lines: shown as they arrive, whichever rank printed them.
        characters: likewise; at least one line.
    """

    def __init__(self, lines: int, characters: int) -> None:
        self._lines = lines
        self._characters = self._page = characters
        self.is_cut = False
        """Whether the output is too long to show all as it arrives."""
        self._shown: dict[int, int] = {}
        """By rank, lines shown so far, up to FIRST."""
        self._room = _FIRST_LINES
        self._room_characters = _FIRST_CHARACTERS
        self._omitted = 0
        self._omitted_characters = 0
        # Both since the last end.
        self._number = 0
        self._last: OrderedDict[str, deque[tuple[int, str]]] = OrderedDict()
        """By group of ranks, the number and text of its last lines."""

    def take(self, text: str, note: str) -> str:
        """Return what to show now of whole lines; once with the note, where the page is full."""
        if self.is_cut:
            return self._take_more(text)
        fits, rest = _fitting(text, self._lines, self._characters, self._characters == self._page)
        self._lines -= fits.count("\n")
        self._characters -= len(fits)
        for _, ranks, run in _runs(fits):
            self._count(ranks, run.count("\n"))
        if not rest:
            return fits
        self.is_cut = True
        return fits + note + self._take_more(rest)

    def end(self, where: str) -> str:
        """Return the last lines of each group of ranks, below a count of the lines that are not shown.

        Args:
            where: what shows them.
        """
        chosen: list[list[tuple[int, str]]] = [[] for _ in self._last]
        count = 0
        for depth in range(1, LAST + 1):
            for lines, kept in zip(chosen, self._last.values(), strict=True):
                if len(kept) >= depth and count < LAST:
                    lines.append(kept[-depth])
                    count += 1
        lines = [line for _, line in merge(*(reversed(each) for each in chosen))]
        omitted, characters = self._omitted - len(lines), self._omitted_characters - sum(map(len, lines))
        self._omitted = self._omitted_characters = 0
        self._last.clear()
        note = f"… not shown here: {left_out(omitted, characters)} of this cell; {where}\n" if omitted else ""
        return note + "".join(lines)

    def _take_more(self, text: str) -> str:
        """Return the first lines of ranks of which too few are shown, and keep the others."""
        shown: list[str] = []
        for prefix, ranks, run in _runs(text):
            wanted = self._room and min(
                self._room, FIRST - min([self._shown.get(each, 0) for each in ranks] or [FIRST])
            )
            first, rest = _fitting(run, wanted, self._room_characters) if wanted > 0 else ("", run)
            if first:
                count = first.count("\n")
                self._room -= count
                self._room_characters -= len(first)
                self._count(ranks, count)
                shown.append(first)
            if rest:
                self._keep(prefix, rest)
        return "".join(shown)

    def _keep(self, prefix: str, text: str) -> None:
        self._omitted += text.count("\n")
        self._omitted_characters += len(text)
        kept = self._last.get(prefix)
        if kept is None:
            kept = self._last[prefix] = deque(maxlen=LAST)
            if len(self._last) > _GROUPS:
                self._last.popitem(last=False)
        self._last.move_to_end(prefix)
        for line in text[:-1].rsplit("\n", LAST)[-LAST:]:
            self._number += 1
            kept.append((self._number, f"{line}\n" if len(line) <= _LONG else f"{line[:_LONG]}…\n"))

    def _count(self, ranks: Sequence[int], lines: int) -> None:
        for rank in ranks:
            self._shown[rank] = min(FIRST, self._shown.get(rank, 0) + lines)


def _runs(text: str) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Yield consecutive lines of the same ranks: their prefix, the ranks and the lines."""
    for match in _RUN.finditer(text):
        yield match[1] or "", _parsed(match[2] or ""), match[0]


@lru_cache(1024)
def _parsed(ranks: str) -> tuple[int, ...]:
    return tuple(parse_ranks(ranks)) if ranks else ()


def _fitting(text: str, lines: int, characters: int, is_first: bool = False) -> tuple[str, str]:
    """Split a text at the end of a line: as much as fits, but at least one line if it is the first; and the rest."""
    end = len(text)
    if end > characters:
        # The length of a line has its own bound.
        end = text.rfind("\n", 0, max(0, characters)) + 1 or (text.find("\n") + 1 if is_first else 0)
    if text.count("\n", 0, end) > lines:
        end = len("\n".join(text.split("\n", lines)[:lines])) + 1 if lines > 0 else 0
    return text[:end], text[end:]
