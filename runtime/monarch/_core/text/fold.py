"""Folding of rank output: equal lines of several ranks become one."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence
from itertools import pairwise
from operator import itemgetter
from typing import Any, NamedTuple

from monarch._core.shapes.ranks import describe_ranks

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


PROGRESS = "progress "
"""Begins the stream of a finished line that was shown, or rewritten, while it was unfinished."""
_CUT = 64
"""Lines of each rank to compare one by one before the rest is compared as a whole again."""
_MOST_CUT = 1 << 20
"""The most such lines, where that never helps."""


class Line(NamedTuple):
    """A line of output, of one rank or of several that printed the same."""

    source: Hashable
    ranks: tuple[int, ...]
    """Ascending."""
    stream: str
    text: str
    """Without the newline."""

    def prefix(self) -> str:
        """Return the prefix: ``[rank 3]`` or ``[ranks 0-7]``."""
        return f"[{describe_ranks(self.ranks)}]"


class Block(NamedTuple):
    """Consecutive lines of output, of one rank or of several that printed the same."""

    source: Hashable
    ranks: tuple[int, ...]
    """Ascending."""
    stream: str
    text: str
    """Each line with its newline."""

    def prefix(self) -> str:
        """Return the prefix."""
        return f"[{describe_ranks(self.ranks)}]"

    def lines(self) -> list[Line]:
        """Return the same, line by line."""
        source, ranks, stream, text = self
        return [Line(source, ranks, stream, line) for line in text[:-1].split("\n")]

    def prefixed(self) -> str:
        """Return the text with the prefix before each line."""
        prefix = self.prefix() + " "
        return prefix + self.text[:-1].replace("\n", f"\n{prefix}") + "\n"


_Key = tuple[str, str]
"""Stream and text, which must be equal for lines to fold."""


class _Printed(NamedTuple):
    """Whole lines that a rank printed at once."""

    came: float
    stream: str
    text: str
    """Each line with its newline."""


class _Pending:
    """Output of one source that is not emitted yet."""

    __slots__ = ("blocks", "cut", "last_part", "live", "parts", "queues", "since", "where")

    def __init__(self) -> None:
        # By rank and stream: the pieces of the unfinished line, and the time of the last one.
        self.parts: dict[tuple[int, str], list[str]] = {}
        self.last_part = 0.0
        # By rank and stream: when the unfinished line began.
        self.since: dict[tuple[int, str], float] = {}
        # Rank and stream of unfinished lines that are shown or rewritten before their end.
        self.live: set[tuple[int, str]] = set()
        # By rank: its output, which is split into lines only if it does not fold as a whole.
        self.blocks: dict[int, deque[_Printed]] = {}
        # How many lines of each rank to split next time; more each time that it does not help.
        self.cut = _CUT
        # By rank: lines before its blocks, with serial numbers, oldest first; only while lines are taken out.
        self.queues: dict[int, deque[tuple[int, _Key]]] = {}
        # By key: the ranks that have such lines in their queues, and how many.
        self.where: dict[_Key, dict[int, int]] = {}


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
        self._sources: dict[Hashable, _Pending] = {}
        # By source with queues: its lines by serial number, each with time and rank. Oldest first.
        self._waiting: dict[Hashable, OrderedDict[int, tuple[float, int]]] = {}
        self._serial = 0
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
            pending = self._sources[source] = _Pending()
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

    def _add_part(self, pending: _Pending, source: Hashable, rank: int, stream: str, text: str, now: float) -> None:
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
            parts[:] = [_overwritten(whole) + ("\r" if whole.endswith("\r") else "")]
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

    def due(self, now: float) -> list[Line]:
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
            self._put_back(source, pending)
            self._tidy(source, pending)
        return blocks

    def next_due(self) -> float | None:
        """Return when to call ``due`` next, on the clock of ``add``; None if no line waits."""
        waiting = [each for each in self._sources.items() if each[1].blocks or each[1].queues]
        return min((self._due_at(*each) for each in waiting), default=None)

    def flush(self, source: Hashable = None) -> list[Line]:
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
        ranks: dict[_Key, list[int]] = {}
        for (rank, stream), parts in sorted(pending.parts.items()):
            text = _overwritten("".join(parts))
            if text.strip() and len(text) < _LONG:
                pending.live.add((rank, stream))
                ranks.setdefault((stream, text), []).append(rank)
        return [Block(source, tuple(each), stream, text + "\n") for (stream, text), each in ranks.items()]

    # Blocks

    def _print_lines(self, pending: _Pending, source: Hashable, rank: int, stream: str, text: str, now: float) -> None:
        """Take whole lines of a rank, each by its own stream."""
        live = (rank, stream) in pending.live
        pending.live.discard((rank, stream))
        if not self.marks_progress or not (live or "\r" in text):
            self._printed(pending, source, rank, stream, text, now)
            return
        for number, line in enumerate(text[:-1].split("\n")):
            is_progress = _is_rewritten(line) or (live and number == 0 and not _is_wiped(line))
            name, line = (PROGRESS + stream, line.rstrip()) if is_progress else (stream, line)
            self._printed(pending, source, rank, name, line + "\n", now)

    def _printed(self, pending: _Pending, source: Hashable, rank: int, stream: str, text: str, now: float) -> None:
        """Whole lines of a rank."""
        if "\r" in text:
            text = "".join(_overwritten(line) + "\n" for line in text[:-1].split("\n"))
        if len(text) >= _LONG:
            # Keeps one of equal texts.
            text = next((each[-1].text for each in pending.blocks.values() if each[-1].text == text), text)
        pending.blocks.setdefault(rank, deque()).append(_Printed(now, stream, text))

    def _held(self) -> int:
        """Characters of waiting blocks; a text that several ranks share counts once."""
        every = (block.text for each in self._sources.values() for blocks in each.blocks.values() for block in blocks)
        return sum({id(text): len(text) for text in every}.values())

    def _oldest(self, source: Hashable, pending: _Pending) -> float:
        """Return when the oldest line of a source came, on the clock of ``add``."""
        if pending.queues:
            return next(iter(self._waiting[source].values()))[0]
        return min(blocks[0].came for blocks in pending.blocks.values())

    def _due_at(self, source: Hashable, pending: _Pending) -> float:
        """Return when to emit the oldest line of a source."""
        came = self._oldest(source, pending)
        due = came + self._window
        if any(map(_is_long, pending.parts.values())):
            # The rest of another rank's long line is just coming, and may be equal.
            due = max(due, min(pending.last_part + self._window, came + _LONG_WAIT))
        return due

    def _emit_oldest(self, source: Hashable, pending: _Pending, until: float, emitted: list[Block]) -> None:
        """Emit the oldest output, and what folds with it.

        Args:
            source: the source.
            pending: its output.
            until: emit output from before this time.
            emitted: receives the blocks.
        """
        if not pending.queues:
            if self._emit_alike(source, pending, until, emitted) or self._emit_private(source, pending, until, emitted):
                pending.cut = _CUT
                return
            self._cut(pending, source)
        _, rank = next(iter(self._waiting[source].values()))
        count = len(pending.queues)
        self._emit(source, rank, emitted)
        if len(pending.queues) < count and pending.blocks.keys() - pending.queues.keys():
            # One rank has more lines to compare, which may be equal again.
            self._put_back(source, pending)

    def _emit_alike(self, source: Hashable, pending: _Pending, until: float, emitted: list[Block]) -> bool:
        """Emit the common beginning of all ranks; False if that is not all of some."""
        streams = {block.stream for blocks in pending.blocks.values() for block in blocks}
        if len(streams) > 1:
            return False
        stream = streams.pop()
        texts = sorted((_joined(blocks), rank) for rank, blocks in pending.blocks.items())
        texts.sort(key=lambda each: len(each[0]))
        if any(not longer.startswith(shorter) for (shorter, _), (longer, _) in pairwise(texts)):
            return False
        # Return the length of the output that is due on any rank.
        end = max(_due_length(blocks, until) for blocks in pending.blocks.values())
        longest = texts[-1][0]
        ranks = sorted(rank for _, rank in texts)
        start = 0
        for text, rank in texts:
            stop = min(len(text), end)
            if stop > start:
                emitted.append(Block(source, tuple(ranks), stream, longest[start:stop]))
                start = stop
            ranks.remove(rank)
            self._drop(pending, rank, stop)
        return True

    def _emit_private(self, source: Hashable, pending: _Pending, until: float, emitted: list[Block]) -> bool:
        """Emit the output of ranks without a common line; False if two have one."""
        seen: set[str] = set()
        total = 0
        for blocks in pending.blocks.values():
            lines: set[str] = set()
            for block in blocks:
                lines.update(block.text[:-1].split("\n"))
            total += len(lines)
            seen |= lines
            if len(seen) != total:
                return False
        for rank in sorted(pending.blocks, key=lambda rank: pending.blocks[rank][0].came):
            length = 0
            for stream, text in _merged(pending.blocks[rank], until):
                emitted.append(Block(source, (rank,), stream, text))
                length += len(text)
            self._drop(pending, rank, length)
        return True

    def _drop(self, pending: _Pending, rank: int, length: int) -> None:
        """Remove the first characters of a rank's output."""
        blocks = pending.blocks[rank]
        while length:
            block = blocks[0]
            if len(block.text) > length:
                blocks[0] = block._replace(text=block.text[length:])
                break
            length -= len(block.text)
            blocks.popleft()
        if not blocks:
            del pending.blocks[rank]

    def _cut(self, pending: _Pending, source: Hashable) -> None:
        """Split the beginnings of the blocks into lines, in the order in which they came."""
        cut: list[tuple[float, _Printed, int]] = []
        for rank, blocks in list(pending.blocks.items()):
            left, latest = pending.cut, float("-inf")
            while left > 0 and blocks:
                block = blocks.popleft()
                lines = block.text.split("\n", left)
                rest = lines.pop()
                left -= len(lines)
                if rest:
                    blocks.appendleft(block._replace(text=rest))
                    block = block._replace(text=block.text[: -len(rest)])
                # Lines that a flush has ended count as old, but come last.
                latest = max(latest, block.came)
                cut.append((latest, block, rank))
            if not blocks:
                del pending.blocks[rank]
        pending.cut = min(2 * pending.cut, _MOST_CUT)
        for _, block, rank in sorted(cut, key=itemgetter(0)):
            for line in block.text[:-1].split("\n"):
                self._queue(pending, source, rank, (block.stream, line), block.came)

    def _put_back(self, source: Hashable, pending: _Pending) -> None:
        """Turn lines that were not taken out back into blocks."""
        waiting = self._waiting.pop(source, None)
        if waiting is None:
            return
        for rank, queue in pending.queues.items():
            blocks = pending.blocks.setdefault(rank, deque())
            lines: list[str] = []
            last: _Printed | None = None
            for serial, (stream, text) in reversed(queue):
                came = waiting[serial][0]
                if last is not None and (last.came, last.stream) != (came, stream):
                    blocks.appendleft(last._replace(text="\n".join(reversed(lines)) + "\n"))
                    lines = []
                last = _Printed(came, stream, "")
                lines.append(text)
            if last is not None:
                blocks.appendleft(last._replace(text="\n".join(reversed(lines)) + "\n"))
        pending.queues.clear()
        pending.where.clear()

    # Lines

    def _end_parts(self, source: Hashable, pending: _Pending) -> None:
        """Turn unfinished output into lines."""
        everything, pending.parts = pending.parts, {}
        for (rank, stream), parts in everything.items():
            whole = "".join(parts)
            self._in_parts -= len(whole)
            # A wiped line, as a closing progress bar leaves it, is no line.
            if whole.strip() or not whole.endswith("\r"):
                self._print_lines(pending, source, rank, stream, whole + "\n", float("-inf"))

    def _tidy(self, source: Hashable, pending: _Pending) -> None:
        if not pending.queues and not pending.blocks and not pending.parts:
            self._sources.pop(source, None)

    def _queue(self, pending: _Pending, source: Hashable, rank: int, key: _Key, now: float) -> None:
        self._serial += 1
        pending.queues.setdefault(rank, deque()).append((self._serial, key))
        ranks = pending.where.setdefault(key, {})
        ranks[rank] = ranks.get(rank, 0) + 1
        waiting = self._waiting.get(source)
        if waiting is None:
            waiting = self._waiting[source] = OrderedDict()
        waiting[self._serial] = (now, rank)

    def _emit(self, source: Hashable, rank: int, emitted: list[Block]) -> None:
        """Emit the head of a rank's queue for all ranks that have it, after what precedes it in theirs."""
        pending = self._sources[source]
        queues, where, waiting = pending.queues, pending.where, self._waiting[source]
        key = queues[rank][0][1]
        # Each level is a key to emit and the ranks to bring to it, in reverse; the next serves one of them.
        levels = [(key, [*reversed(where[key])])]
        busy = {key}
        while levels:
            key, behind = levels[-1]
            # A busy head is this key, or waits below: moving it for this level would loop.
            while behind and queues[behind[-1]][0][1] in busy:
                behind.pop()
            if behind:
                before = queues[behind[-1]][0][1]
                levels.append((before, [*reversed(where[before])]))
                busy.add(before)
                continue
            ranks = sorted(rank for rank in where[key] if queues[rank][0][1] == key)
            for each in ranks:
                _take(pending, waiting, each)
            stream, text = key
            emitted.append(Block(source, tuple(ranks), stream, text + "\n"))
            levels.pop()
            busy.discard(key)
        if not waiting:
            del self._waiting[source]


def _take(pending: _Pending, waiting: OrderedDict[int, tuple[float, int]], rank: int) -> None:
    """Remove the head of a rank's queue."""
    queue = pending.queues[rank]
    serial, key = queue.popleft()
    del waiting[serial]
    if not queue:
        del pending.queues[rank]
    ranks = pending.where[key]
    ranks[rank] -= 1
    if not ranks[rank]:
        del ranks[rank]
        if not ranks:
            del pending.where[key]


def merge_blocks(blocks: Sequence[Block]) -> list[Block]:
    """Join consecutive lines of the same ranks and stream."""
    runs: list[list[Block]] = []
    for block in blocks:
        if runs and runs[-1][-1][:3] == block[:3]:
            runs[-1].append(block)
        else:
            runs.append([block])
    return [
        each[0] if len(each) == 1 else each[0]._replace(text="".join(block.text for block in each)) for each in runs
    ]


def _joined(blocks: deque[_Printed]) -> str:
    return blocks[0].text if len(blocks) == 1 else "".join([block.text for block in blocks])


def _due_length(blocks: deque[_Printed], until: float) -> int:
    """Return the characters of what came before a time, and of what must precede it."""
    length = due = 0
    for block in blocks:
        length += len(block.text)
        if block.came <= until:
            due = length
    return due


def _merged(blocks: deque[_Printed], until: float) -> list[tuple[str, str]]:
    """Yield what came before a time, in as few texts as possible, each with its stream."""
    runs: list[tuple[str, list[str]]] = []
    for block in blocks:
        if block.came > until:
            break
        if runs and runs[-1][0] == block.stream:
            runs[-1][1].append(block.text)
        else:
            runs.append((block.stream, [block.text]))
    return [(stream, "".join(texts)) for stream, texts in runs]


def _is_long(parts: list[str]) -> bool:
    return len(parts[0]) >= _LONG or sum(map(len, parts)) >= _LONG


def _is_rewritten(line: str) -> bool:
    """Return whether a line was rewritten from its start, as a progress bar does, and not only wiped."""
    before, returned, _ = line.rstrip("\r").rpartition("\r")
    return bool(returned and before.rpartition("\r")[2].strip())


def _is_wiped(line: str) -> bool:
    """Return whether a line was wiped before its last text was written."""
    before, returned, _ = line.rstrip("\r").rpartition("\r")
    return bool(returned and not before.rpartition("\r")[2].strip())


def _overwritten(text: str) -> str:
    """Return what a terminal keeps of a line: the part after the last carriage return that is not at its end."""
    return text.rstrip("\r").rpartition("\r")[2] if "\r" in text else text
