"""Outputs of ranks compared as a whole: those that begin alike, and those without a common line."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from itertools import pairwise

from monarch._core.text.folding.blocks import Block
from monarch._core.text.folding.pending import Pending, Printed


def emit_alike(source: Hashable, pending: Pending, until: float, emitted: list[Block]) -> bool:
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
        _drop(pending, rank, stop)
    return True


def emit_private(source: Hashable, pending: Pending, until: float, emitted: list[Block]) -> bool:
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
        _drop(pending, rank, length)
    return True


def _drop(pending: Pending, rank: int, length: int) -> None:
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


def _joined(blocks: deque[Printed]) -> str:
    return blocks[0].text if len(blocks) == 1 else "".join([block.text for block in blocks])


def _due_length(blocks: deque[Printed], until: float) -> int:
    """Return the characters of what came before a time, and of what must precede it."""
    length = due = 0
    for block in blocks:
        length += len(block.text)
        if block.came <= until:
            due = length
    return due


def _merged(blocks: deque[Printed], until: float) -> list[tuple[str, str]]:
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
