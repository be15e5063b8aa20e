"""The output of ranks in a running cell: each rank can clear its own part, as ``clear_output`` does for a cell.

Front ends can only clear all of a cell. So the page of a cell keeps the output of its ranks, and when ranks have
cleared their parts, it clears the cell and shows the other parts again. The next output of a rank takes the place of
the cleared one, so that a page keeps its layout while it is cleared over and over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from threading import RLock
from typing import Any, Protocol

from monarch._kernel_api import Block

EVERY = 0.1
"""Seconds from the first change of a page until it is shown again."""


_DISPLAYS = 150
"""Most displays kept, more than ranks can still update."""

Later = Callable[[float, Callable[[], None]], None]
"""Calls a function after some seconds."""


class Bars(Protocol):
    """Unfinished lines of ranks in one display."""

    name: str

    def ranks(self) -> set[int]: ...
    def drop(self, rank: int) -> None: ...
    def text(self) -> str: ...


Order = tuple[int, int]
"""Place on the page, and for ranks that have cleared their output the number of the line since then."""


@dataclass(eq=False)
class _Item:
    """One piece of a page: text, displays, or unfinished lines."""

    order: Order
    ranks: set[int]
    """Those that show it; empty for notes of the notebook, which no rank clears."""
    stream: str = ""
    text: str = ""
    name: str = ""
    """Display id."""
    contents: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    bars: Bars | None = None


class Canvas(Protocol):
    """The cell that a page is shown in."""

    def clear(self, wait: bool) -> None: ...
    def write(self, text: str, stream: str, is_note: bool) -> None: ...
    def show(self, content: dict[str, Any]) -> None: ...
    def end(self, is_cut: bool) -> None: ...


class Page:
    """The output of ranks in one cell. Thread-safe.

    Args:
        canvas: the cell.
        later: calls a function in the output thread after some seconds.
        most: lines and characters kept; of a longer output, the rest is not shown again.
    """

    def __init__(self, canvas: Canvas, later: Later, most: tuple[int, int]) -> None:
        self.lock = RLock()
        """Held while something is sent to the cell, so that the page and the screen agree. Guards everything below."""
        self.on_cleared: Callable[[int, int], object] = lambda rank, number: None
        """Called with a rank and the number of its clear when lines of it carry that out, with the lock held."""
        self._canvas = canvas
        self._later = later
        self._room = most
        """Lines and characters that can still be kept."""
        self._items: list[_Item] = []
        self._new: list[_Item] = []
        """Those that are not on screen yet."""
        self._stale: dict[int, int] = {}
        """Ranks whose next output clears what they have shown, with the number of that clear."""
        self._counts: dict[int, int] = {}
        """Lines of each rank since it has cleared its output."""
        self._last = 0
        """Place of the last item."""
        self._base = 0
        """Place of the output of ranks that have cleared theirs."""
        self._is_redrawn = False
        """Whether the cell will be cleared and all items shown again."""
        self._is_due = False
        """Whether the page will be drawn."""

    # Clearing

    def clear(self, rank: int, wait: bool, number: int) -> None:
        """Clear what a rank has shown, now or with its next output.

        Args:
            rank: the rank.
            wait: whether its next output clears.
            number: the number of this clear, for ``on_cleared``.
        """
        with self.lock:
            self._base = self._base or next((item.order[0] for item in self._items if item.ranks), self._last + 1)
            self._last = max(self._last, self._base)
            if wait:
                self._stale[rank] = number
            else:
                self._remove(rank)

    def is_stale(self, rank: int) -> bool:
        """Return whether the next output of a rank clears what it has shown."""
        with self.lock:
            return rank in self._stale

    def wake(self, ranks: Iterable[int], is_display: bool = False) -> None:
        """Clear what ranks have shown that waited for this output of them; the caller holds the lock."""
        for rank in self._stale.keys() & set(ranks):
            number = self._stale.pop(rank)
            self._remove(rank)
            if not is_display:
                self.on_cleared(rank, number)

    def _remove(self, rank: int) -> None:
        self._counts[rank] = 0
        mine = [item for item in self._items if rank in item.ranks]
        for item in mine:
            item.ranks.discard(rank)
            if item.bars is not None:
                item.bars.drop(rank)
        gone = {item for item in mine if not item.ranks}
        self._items = [item for item in self._items if item not in gone]
        self._take_room(*(-each for each in _room_of(gone)))
        self._draw_later(bool(mine))

    def _take_room(self, lines: int, size: int) -> None:
        self._room = self._room[0] - lines, self._room[1] - size

    def _draw_later(self, is_redrawn: bool) -> None:
        self._is_redrawn |= is_redrawn
        if not self._is_due:
            self._is_due = True
            self._later(EVERY, self.draw)

    def _order(self, ranks: Iterable[int]) -> Order:
        """Return the place of a new item."""
        cleared = [rank for rank in ranks if rank in self._counts]
        if not cleared:
            self._last += 1
            return self._last, 0
        count = min(self._counts[rank] for rank in cleared)
        for rank in cleared:
            self._counts[rank] = count + 1
        return self._base, count

    # New output; the caller holds the lock

    def add_blocks(self, blocks: Sequence[Block], stream: str) -> bool:
        """Keep lines of ranks; return whether the caller shows them now."""
        for block in blocks:
            self.wake(block.ranks)
            # Lines of ranks that clear their output are folded here, since not all ranks clear it at the same time.
            pieces = [f"{line}\n" for line in block.text[:-1].split("\n")] if self._base else [block.text]
            for text in pieces if min(self._room) > 0 else ():
                self._add(_Item(self._order(block.ranks), set(block.ranks), stream, text))
        if self._base:
            self._draw_later(False)
        return not self._base

    def _add(self, item: _Item) -> None:
        self._take_room(*_room_of([item]))
        self._items.append(item)
        if self._base:
            self._new.append(item)

    def add_note(self, text: str, stream: str) -> bool:
        """Keep text that is not of ranks; return whether the caller shows it now."""
        self._items.append(_Item(self._order(()), set(), stream, text))
        return not self._is_redrawn

    def add_bars(self, bars: Bars) -> str:
        """Keep unfinished lines; return the kind of the message that shows them now, or an empty text for none."""
        item = self._named(bars.name)
        if item is None:
            self._add(_Item(self._order(sorted(bars.ranks())), bars.ranks(), name=bars.name, bars=bars))
            return self._kind(None)
        item.bars = bars
        item.ranks |= bars.ranks()
        return self._kind(item)

    def add_display(self, name: str, contents: list[dict[str, Any]], ranks: set[int], is_update: bool) -> str:
        """Keep a display, or what it shows now; return the kind of the message, as ``add_bars`` does."""
        item = self._named(name) if is_update else None
        if item is not None and ranks:
            item.contents, item.ranks = contents, set(ranks)
        elif item is not None:
            self._items.remove(item)
            self._draw_later(True)
        elif ranks:
            self._add(_Item(self._order(sorted(ranks)), set(ranks), name=name, contents=contents))
            self._drop_oldest()
        return self._kind(item) if ranks else ""

    def _drop_oldest(self) -> None:
        """Drop the oldest display from the page, which may be large; it stays on screen until the page is redrawn."""
        displays = [item for item in self._items if item.contents]
        if len(displays) > _DISPLAYS:
            self._items.remove(displays[0])

    def _kind(self, item: _Item | None) -> str:
        """Return the kind of the message that shows a display now, and that updates one that is on screen."""
        if self._is_redrawn or item in self._new:
            return ""
        if item is not None:
            return "update_display_data"
        if self._new:
            self._draw_later(False)
            return ""
        return "display_data"

    def _named(self, name: str) -> _Item | None:
        return next((item for item in self._items if item.name == name), None)

    def has(self, name: str) -> bool:
        """Return whether a display is on the page."""
        return self._named(name) is not None

    # Showing it again

    def draw(self) -> None:
        """Show what has changed."""
        with self.lock:
            items = self._items if self._is_redrawn else self._new
            is_redrawn, self._is_redrawn, self._is_due, self._new = self._is_redrawn, False, False, []
            if is_redrawn:
                self._canvas.clear(bool(items))
            for item in _folded(items):
                self._draw(item)
            if is_redrawn:
                self._canvas.end(min(self._room) <= 0)

    def _draw(self, item: _Item) -> None:
        if item.bars is not None:
            data = {"text/plain": item.bars.text()}
            self._canvas.show({"data": data, "metadata": {}, "transient": {"display_id": item.name}})
        elif item.contents:
            for content in item.contents:
                self._canvas.show(content)
        elif item.ranks:
            block = Block(None, tuple(sorted(item.ranks)), item.stream, item.text)
            self._canvas.write(block.prefixed(), item.stream, False)
        else:
            self._canvas.write(item.text, item.stream, True)

    def close(self) -> None:
        """Show the last state, with equal lines of ranks once; the result of the cell clears stale output."""
        with self.lock:
            if self._base:
                self._is_redrawn |= len(_folded(self._items)) < len(self._items)
                self.draw()
            if self._items and all(item.ranks and item.ranks <= self._stale.keys() for item in self._items):
                self._canvas.clear(True)
            self._items = []


def _room_of(items: Iterable[_Item]) -> tuple[int, int]:
    """Return the lines and characters of items."""
    texts = [item.text for item in items]
    return sum(text.count("\n") for text in texts), sum(map(len, texts))


def _folded(items: Iterable[_Item]) -> list[_Item]:
    """Return items in order, with equal text of several ranks once, and consecutive text of ranks in one piece."""
    ordered = sorted(items, key=lambda item: (item.order, sorted(item.ranks)))
    return _merged(_merged(_merged(_merged(_alike(ordered), _same_text), _same_ranks), _same_text), _same_ranks)


def _alike(items: list[_Item]) -> list[_Item]:
    """Return items with equal text at the same place once."""
    merged: dict[Any, _Item] = {}
    for item in items:
        key = (item.order, item.stream, item.text) if _is_text(item) else item
        other = merged.get(key)
        both = _same_text(other, item) if other is not None else None
        merged[key if both is not None or other is None else item] = both or item
    return list(merged.values())


def _merged(items: list[_Item], merge: Callable[[_Item, _Item], _Item | None]) -> list[_Item]:
    merged: list[_Item] = []
    for item in items:
        both = merge(merged[-1], item) if merged and _is_text(merged[-1]) and _is_text(item) else None
        if both is not None:
            merged[-1] = both
        else:
            merged.append(item)
    return merged


def _is_text(item: _Item) -> bool:
    return bool(item.text and item.ranks)


def _same_text(one: _Item, other: _Item) -> _Item | None:
    if (one.stream, one.text) != (other.stream, other.text) or one.ranks & other.ranks:
        return None
    return _Item(one.order, one.ranks | other.ranks, one.stream, one.text)


def _same_ranks(one: _Item, other: _Item) -> _Item | None:
    if (one.stream, one.ranks) != (other.stream, other.ranks):
        return None
    return _Item(one.order, one.ranks, one.stream, one.text + other.text)
