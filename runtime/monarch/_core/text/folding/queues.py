"""Outputs of ranks compared line by line."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable
from operator import itemgetter

from monarch._core.text.folding.blocks import Block
from monarch._core.text.folding.pending import Key, Pending, Printed

_MOST_CUT = 1 << 20
"""The most lines of each rank to compare one by one, where that never helps."""


class Queues:
    """The lines of ranks that are compared one by one: each rank has a queue of its lines.

    A rank that has the oldest line further back emits the lines before it first; then the line is emitted once for all
    of them.
    """

    def __init__(self) -> None:
        # By source with queues: its lines by serial number, each with time and rank. Oldest first.
        self._waiting: dict[Hashable, OrderedDict[int, tuple[float, int]]] = {}
        self._serial = 0

    def oldest(self, source: Hashable) -> tuple[float, int]:
        """Return when the oldest line of a source came, and the rank that printed it."""
        return next(iter(self._waiting[source].values()))

    def cut(self, pending: Pending, source: Hashable) -> None:
        """Split the beginnings of the blocks into lines, in the order in which they came."""
        cut: list[tuple[float, Printed, int]] = []
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

    def put_back(self, source: Hashable, pending: Pending) -> None:
        """Turn lines that were not taken out back into blocks."""
        waiting = self._waiting.pop(source, None)
        if waiting is None:
            return
        for rank, queue in pending.queues.items():
            blocks = pending.blocks.setdefault(rank, deque())
            lines: list[str] = []
            last: Printed | None = None
            for serial, (stream, text) in reversed(queue):
                came = waiting[serial][0]
                if last is not None and (last.came, last.stream) != (came, stream):
                    blocks.appendleft(last._replace(text="\n".join(reversed(lines)) + "\n"))
                    lines = []
                last = Printed(came, stream, "")
                lines.append(text)
            if last is not None:
                blocks.appendleft(last._replace(text="\n".join(reversed(lines)) + "\n"))
        pending.queues.clear()
        pending.where.clear()

    def _queue(self, pending: Pending, source: Hashable, rank: int, key: Key, now: float) -> None:
        self._serial += 1
        pending.queues.setdefault(rank, deque()).append((self._serial, key))
        ranks = pending.where.setdefault(key, {})
        ranks[rank] = ranks.get(rank, 0) + 1
        waiting = self._waiting.get(source)
        if waiting is None:
            waiting = self._waiting[source] = OrderedDict()
        waiting[self._serial] = (now, rank)

    def emit(self, pending: Pending, source: Hashable, rank: int, emitted: list[Block]) -> None:
        """Emit the head of a rank's queue for all ranks that have it, after what precedes it in theirs."""
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


def _take(pending: Pending, waiting: OrderedDict[int, tuple[float, int]], rank: int) -> None:
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
