"""Folding the output of ranks: lines that several ranks print alike become one."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable
from typing import NamedTuple

from monarch._core.ranks import describe_ranks


class Line(NamedTuple):
    """A line of output, of one rank or of several that printed it alike."""

    source: Hashable
    ranks: tuple[int, ...]
    """Ascending."""
    stream: str
    text: str
    """Without the newline."""

    def prefix(self) -> str:
        """Whose line it is: ``[rank 3]`` or ``[ranks 0-7]``."""
        return f"[{describe_ranks(self.ranks)}]"


_Key = tuple[str, str]
"""Stream and text: what must be equal for lines to fold."""


class _Pending:
    """What one source has printed and was not emitted yet."""

    __slots__ = ("parts", "queues", "where")

    def __init__(self) -> None:
        # Of each rank and stream, the pieces of the line that has not ended.
        self.parts: dict[tuple[int, str], list[str]] = {}
        # Of each rank, its lines with their serial numbers, in the order in which they ended.
        self.queues: dict[int, deque[tuple[int, _Key]]] = {}
        # Of each key, the ranks that have such lines in their queues, and how many.
        self.where: dict[_Key, dict[int, int]] = {}


class Folder:
    """Folds equal lines of several ranks that come within a window of time.

    Each rank has a queue of its lines, and only heads of queues are emitted, so the order of each rank's
    lines is kept. When the oldest line has waited for the window, the ranks that have it further back are
    brought to it, by emitting what is before it in their queues; then it is emitted once for all of them.

    As on a terminal, a carriage return begins a line anew: what comes after it replaces what was there.

    Args:
        window: seconds for which a line waits for equal lines of other ranks.
    """

    def __init__(self, window: float) -> None:
        self._window = window
        self._sources: dict[Hashable, _Pending] = {}
        # Of each line that waits, by serial number: when it came, its source and its rank. Oldest first.
        self._waiting: OrderedDict[int, tuple[float, Hashable, int]] = OrderedDict()
        self._serial = 0

    def add(self, source: Hashable, rank: int, stream: str, text: str, now: float) -> None:
        """Takes what a rank printed: any piece of its output, of any length, with or without line ends.

        Args:
            source: whose ranks these are, such as mesh and call; lines of different sources do not fold.
            rank: who printed it.
            stream: where to, such as ``stdout``.
            text: what.
            now: seconds on a clock that does not go back; the clock of ``due`` and ``next_due`` too.
        """
        if not text:
            return
        pending = self._sources.get(source)
        if pending is None:
            pending = self._sources[source] = _Pending()
        *ended, rest = text.split("\n")
        for piece in ended:
            parts = pending.parts.pop((rank, stream), None)
            whole = "".join([*parts, piece]) if parts else piece
            self._queue(pending, source, rank, (stream, _overwritten(whole)), now)
        if rest:
            parts = pending.parts.setdefault((rank, stream), [])
            parts.append(rest)
            if "\r" in rest:
                # A progress bar may go on for ever without a newline; only its last state is kept.
                whole = "".join(parts)
                parts[:] = [_overwritten(whole) + ("\r" if whole.endswith("\r") else "")]

    def due(self, now: float) -> list[Line]:
        """Takes out the lines whose time has come, and what must go before them."""
        lines: list[Line] = []
        while self._waiting:
            came, source, rank = next(iter(self._waiting.values()))
            if came + self._window > now:
                break
            self._emit(source, rank, lines)
        return lines

    def next_due(self) -> float | None:
        """When to call ``due`` next, on the clock of ``add``; None if no line waits."""
        for came, _, _ in self._waiting.values():
            return came + self._window
        return None

    def flush(self, source: Hashable = None) -> list[Line]:
        """Takes out all lines of a source, or of all if it is None, those that have not ended included."""
        for name in list(self._sources) if source is None else [source]:
            self._end_parts(name)
        if source is None:
            return self.due(float("inf"))
        lines: list[Line] = []
        pending = self._sources.get(source)
        queues = pending.queues.values() if pending else ()
        for serial in sorted(serial for queue in queues for serial, _ in queue):
            if serial in self._waiting:
                self._emit(source, self._waiting[serial][2], lines)
        return lines

    def _end_parts(self, source: Hashable) -> None:
        """Makes lines of what has not ended."""
        pending = self._sources.get(source)
        if pending is None:
            return
        for (rank, stream), parts in pending.parts.items():
            whole = "".join(parts)
            # A line that was wiped, as a progress bar does when it closes, is none.
            if whole.strip() or not whole.endswith("\r"):
                self._queue(pending, source, rank, (stream, _overwritten(whole)), float("-inf"))
        pending.parts.clear()
        if not pending.queues:
            del self._sources[source]

    def _queue(self, pending: _Pending, source: Hashable, rank: int, key: _Key, now: float) -> None:
        self._serial += 1
        pending.queues.setdefault(rank, deque()).append((self._serial, key))
        ranks = pending.where.setdefault(key, {})
        ranks[rank] = ranks.get(rank, 0) + 1
        self._waiting[self._serial] = (now, source, rank)

    def _emit(self, source: Hashable, rank: int, lines: list[Line]) -> None:
        """Emits the head of a rank's queue for all ranks that have it, after what is before it in theirs."""
        pending = self._sources[source]
        queues, where = pending.queues, pending.where
        key = queues[rank][0][1]
        # Each level is a key to emit and the ranks to bring to it, in reverse; the next serves one of them.
        levels = [(key, [*reversed(where[key])])]
        busy = {key}
        while levels:
            key, behind = levels[-1]
            # A head that is busy is this key, or waits below: moving it for this level would go in a circle.
            while behind and queues[behind[-1]][0][1] in busy:
                behind.pop()
            if behind:
                before = queues[behind[-1]][0][1]
                levels.append((before, [*reversed(where[before])]))
                busy.add(before)
                continue
            ranks = sorted(rank for rank in where[key] if queues[rank][0][1] == key)
            for each in ranks:
                self._take(pending, each)
            stream, text = key
            lines.append(Line(source, tuple(ranks), stream, text))
            levels.pop()
            busy.discard(key)
        if not queues and not pending.parts:
            del self._sources[source]

    def _take(self, pending: _Pending, rank: int) -> None:
        """Removes the head of a rank's queue."""
        queue = pending.queues[rank]
        serial, key = queue.popleft()
        del self._waiting[serial]
        if not queue:
            del pending.queues[rank]
        ranks = pending.where[key]
        ranks[rank] -= 1
        if not ranks[rank]:
            del ranks[rank]
            if not ranks:
                del pending.where[key]


def _overwritten(text: str) -> str:
    """What a terminal leaves of a line: the part after the last carriage return that is not at its end."""
    return text.rstrip("\r").rpartition("\r")[2] if "\r" in text else text
