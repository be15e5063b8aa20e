"""Output of ranks that is not emitted yet."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

CUT = 64
"""Lines of each rank to compare one by one before the rest is compared as a whole again."""
Key = tuple[str, str]
"""Stream and text, which must be equal for lines to fold."""


class Printed(NamedTuple):
    """Whole lines that a rank printed at once."""

    came: float
    stream: str
    text: str
    """Each line with its newline."""


class Pending:
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
        self.blocks: dict[int, deque[Printed]] = {}
        # How many lines of each rank to split next time; more each time that it does not help.
        self.cut = CUT
        # By rank: lines before its blocks, with serial numbers, oldest first; only while lines are taken out.
        self.queues: dict[int, deque[tuple[int, Key]]] = {}
        # By key: the ranks that have such lines in their queues, and how many.
        self.where: dict[Key, dict[int, int]] = {}
