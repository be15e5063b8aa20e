"""Folding of rank output: equal lines of several ranks become one."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import Any

from monarch._core.text.folding.blocks import PROGRESS, Block, OutputLine
from monarch._core.text.folding.pending import CUT, Key, Pending, Printed
from monarch._core.text.folding.queues import Queues
from monarch._core.text.folding.rewriting import is_rewritten, is_wiped, overwritten
from monarch._core.text.folding.whole import emit_alike, emit_private

LINE_LIMIT = 16 << 20
"""Maximum characters of an unfinished line; a longer one is split."""
PARTS_LIMIT = 256 << 20
"""Maximum characters of all unfinished lines; beyond it, the longer ones are split."""
_LONG = 64 << 10
"""Length in characters from which an unfinished line makes equal ones of other ranks wait for its end."""
HELD_LIMIT = 128 << 20
"""Maximum characters of lines that wait for equal ones; beyond it, none waits."""
_LONG_WAIT = 2.0
"""Maximum seconds that they wait."""


class Folder:
    """Folds equal lines that several ranks print within a time window.

    The order of each rank's lines is kept. When the oldest line has waited for the window, ranks whose output begins
    alike are emitted as one as far as it is equal; ranks without a common line are emitted as they are. Otherwise lines
    are compared one by one: each rank has a queue of its lines; ranks that have the oldest line further back emit the
    lines before it first, then it is emitted once for all of them.

    As on a terminal, a carriage return restarts a line: the text after it replaces the text before.

    Args:
        window: seconds for which a line waits for equal lines of other ranks.
    """

    def __init__(self, window: float) -> None:
        self._window = window
        self.marks_progress = False
        """Whether lines that were live are of a stream of their own, see PROGRESS."""
        self._sources: dict[Hashable, Pending] = {}
        self._queues = Queues()
        self._in_parts = 0

    def add(self, source: Hashable, rank: int, stream: str, text: str, now: float) -> None:
        """Add output of a rank: any piece, of any length, with or without line ends.

        Args:
            source: the origin of the ranks, such as mesh and call; lines of different sources do not fold.
            rank: the rank that printed it.
            stream: such as ``stdout``.
            text: the output.
            now: seconds on a monotonic clock, also that of ``due`` and ``next_due``.
        """
        if not text:
            return
        pending = self._sources.get(source)
        if pending is None:
            pending = self._sources[source] = Pending()
        end = text.rfind("\n") + 1
        if end:
            whole, text = text[:end], text[end:]
            parts = pending.parts.pop((rank, stream), None)
            if parts:
                self._in_parts -= sum(map(len, parts))
                whole = "".join([*parts, whole])
            self._print_lines(pending, source, rank, stream, whole, now)
        if text:
            self._add_part(pending, source, rank, stream, text, now)

    def _add_part(self, pending: Pending, source: Hashable, rank: int, stream: str, text: str, now: float) -> None:
        if (rank, stream) not in pending.parts:
            pending.since[rank, stream] = now
        parts = pending.parts.setdefault((rank, stream), [])
        parts.append(text)
        pending.last_part = now
        self._in_parts += len(text)
        if "\r" in text:
            # A progress bar may run forever without a newline; keep only its last state.
            whole = "".join(parts)
            self._in_parts -= len(whole)
            parts[:] = [overwritten(whole) + ("\r" if whole.endswith("\r") else "")]
            self._in_parts += len(parts[0])
            # A wiped line begins as a new one.
            (pending.live.add if parts[0].strip() else pending.live.discard)((rank, stream))
        elif len(text) >= _LONG or self._in_parts > PARTS_LIMIT:
            size = sum(map(len, parts))
            if size > LINE_LIMIT or (self._in_parts > PARTS_LIMIT and size > _LONG):
                self.end_line(source, rank, stream, now)

    def end_line(self, source: Hashable, rank: int, stream: str, now: float) -> None:
        """End an unfinished line, if there is one."""
        pending = self._sources.get(source)
        parts = pending.parts.pop((rank, stream), None) if pending is not None else None
        if pending is not None and parts:
            self._in_parts -= sum(map(len, parts))
            self._print_lines(pending, source, rank, stream, "".join([*parts, "\n"]), now)

    def due(self, now: float) -> list[OutputLine]:
        """Take out the lines whose time has come, and those that must precede them."""
        return [line for block in self.due_blocks(now) for line in block.lines()]

    def due_blocks(self, now: float) -> list[Block]:
        """Same as ``due``, as blocks."""
        blocks: list[Block] = []
        if self._held() > HELD_LIMIT:
            now = float("inf")
        for source, pending in list(self._sources.items()):
            while pending.blocks or pending.queues:
                # The oldest of the source decides.
                if self._due_at(source, pending) > now:
                    break
                # Rounding may put the oldest, which is due, just after that.
                until = max(now - self._window, self._oldest(source, pending))
                self._emit_oldest(source, pending, until, blocks)
            self._queues.put_back(source, pending)
            self._tidy(source, pending)
        return blocks

    def next_due(self) -> float | None:
        """Return when to call ``due`` next, on the clock of ``add``; None if no line waits."""
        waiting = [each for each in self._sources.items() if each[1].blocks or each[1].queues]
        return min((self._due_at(*each) for each in waiting), default=None)

    def flush(self, source: Hashable = None) -> list[OutputLine]:
        """Take out all lines of a source, or of all if it is None, unfinished ones included."""
        return [line for block in self.flush_blocks(source) for line in block.lines()]

    def flush_blocks(self, source: Hashable = None) -> list[Block]:
        """Same as ``flush``, as blocks."""
        blocks: list[Block] = []
        for name in list(self._sources) if source is None else [source]:
            pending = self._sources.get(name)
            if pending is None:
                continue
            self._end_parts(name, pending)
            while pending.blocks or pending.queues:
                self._emit_oldest(name, pending, float("inf"), blocks)
            self._tidy(name, pending)
        return blocks

    def sources(self) -> list[Any]:
        """Return the sources with pending lines."""
        return list(self._sources)

    def catch_up(self, source: Hashable) -> list[Block]:
        """Take out all finished lines of a source."""
        blocks: list[Block] = []
        pending = self._sources.get(source)
        while pending is not None and (pending.blocks or pending.queues):
            self._emit_oldest(source, pending, float("inf"), blocks)
        return blocks

    def unfinished(self, source: Hashable, began: float = float("inf")) -> list[Block] | None:
        """Return the unfinished lines of a source that had begun by a time, which stay; None to ask again.

        That is so if other lines precede them, or one has just begun, whose end may just be coming.
        """
        pending = self._sources.get(source)
        if pending is None:
            return []
        if pending.blocks or pending.queues:
            return None
        if any(key not in pending.live and pending.since[key] > began for key in pending.parts):
            return None
        ranks: dict[Key, list[int]] = {}
        for (rank, stream), parts in sorted(pending.parts.items()):
            text = overwritten("".join(parts))
            if text.strip() and len(text) < _LONG:
                pending.live.add((rank, stream))
                ranks.setdefault((stream, text), []).append(rank)
        return [Block(source, tuple(each), stream, text + "\n") for (stream, text), each in ranks.items()]

    # Finished lines

    def _print_lines(self, pending: Pending, source: Hashable, rank: int, stream: str, text: str, now: float) -> None:
        """Take whole lines of a rank, each by its own stream."""
        live = (rank, stream) in pending.live
        pending.live.discard((rank, stream))
        if not self.marks_progress or not (live or "\r" in text):
            self._printed(pending, source, rank, stream, text, now)
            return
        for number, line in enumerate(text[:-1].split("\n")):
            is_progress = is_rewritten(line) or (live and number == 0 and not is_wiped(line))
            name, line = (PROGRESS + stream, line.rstrip()) if is_progress else (stream, line)
            self._printed(pending, source, rank, name, line + "\n", now)

    def _printed(self, pending: Pending, source: Hashable, rank: int, stream: str, text: str, now: float) -> None:
        """Whole lines of a rank."""
        if "\r" in text:
            text = "".join(overwritten(line) + "\n" for line in text[:-1].split("\n"))
        if len(text) >= _LONG:
            # Keeps one of equal texts.
            text = next((each[-1].text for each in pending.blocks.values() if each[-1].text == text), text)
        pending.blocks.setdefault(rank, deque()).append(Printed(now, stream, text))

    def _held(self) -> int:
        """Characters of waiting blocks; a text that several ranks share counts once."""
        every = (block.text for each in self._sources.values() for blocks in each.blocks.values() for block in blocks)
        return sum({id(text): len(text) for text in every}.values())

    def _oldest(self, source: Hashable, pending: Pending) -> float:
        """Return when the oldest line of a source came, on the clock of ``add``."""
        if pending.queues:
            return self._queues.oldest(source)[0]
        return min(blocks[0].came for blocks in pending.blocks.values())

    def _due_at(self, source: Hashable, pending: Pending) -> float:
        """Return when to emit the oldest line of a source."""
        came = self._oldest(source, pending)
        due = came + self._window
        if any(map(_is_long, pending.parts.values())):
            # The rest of another rank's long line is just coming, and may be equal.
            due = max(due, min(pending.last_part + self._window, came + _LONG_WAIT))
        return due

    def _emit_oldest(self, source: Hashable, pending: Pending, until: float, emitted: list[Block]) -> None:
        """Emit the oldest output, and what folds with it.

        Args:
            source: the source.
            pending: its output.
            until: emit output from before this time.
            emitted: receives the blocks.
        """
        if not pending.queues:
            if emit_alike(source, pending, until, emitted) or emit_private(source, pending, until, emitted):
                pending.cut = CUT
                return
            self._queues.cut(pending, source)
        _, rank = self._queues.oldest(source)
        count = len(pending.queues)
        self._queues.emit(pending, source, rank, emitted)
        if len(pending.queues) < count and pending.blocks.keys() - pending.queues.keys():
            # One rank has more lines to compare, which may be equal again.
            self._queues.put_back(source, pending)

    # Unfinished lines

    def _end_parts(self, source: Hashable, pending: Pending) -> None:
        """Turn unfinished output into lines."""
        everything, pending.parts = pending.parts, {}
        for (rank, stream), parts in everything.items():
            whole = "".join(parts)
            self._in_parts -= len(whole)
            # A wiped line, as a closing progress bar leaves it, is no line.
            if whole.strip() or not whole.endswith("\r"):
                self._print_lines(pending, source, rank, stream, whole + "\n", float("-inf"))

    def _tidy(self, source: Hashable, pending: Pending) -> None:
        if not pending.queues and not pending.blocks and not pending.parts:
            self._sources.pop(source, None)


def _is_long(parts: list[str]) -> bool:
    return len(parts[0]) >= _LONG or sum(map(len, parts)) >= _LONG
