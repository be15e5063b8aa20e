"""Lines of output with the ranks that printed them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from monarch._core.shapes.ranks import describe_ranks

PROGRESS = "progress "
"""Begins the stream of a finished line that was shown, or rewritten, while it was unfinished."""


class OutputLine(NamedTuple):
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

    def lines(self) -> list[OutputLine]:
        """Return the same, line by line."""
        source, ranks, stream, text = self
        return [OutputLine(source, ranks, stream, line) for line in text[:-1].split("\n")]

    def prefixed(self) -> str:
        """Return the text with the prefix before each line."""
        prefix = self.prefix() + " "
        return prefix + self.text[:-1].replace("\n", f"\n{prefix}") + "\n"


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
