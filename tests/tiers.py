"""Which tests run how often: ``tiers.txt`` and ``wide.txt`` mark tests as slow, wide or soak, beside the marks in code.

A line is ``MARK NAME`` or ``MARK NAME keep N``. NAME is a folder, a file, or a test with all its parameters; of these,
N spread over them are not marked.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

MARKS = ("slow", "wide", "soak")
LISTS = [Path(__file__).with_name(name) for name in ("tiers.txt", "wide.txt")]


class Rule(NamedTuple):
    """A line of the list."""

    mark: str
    name: str
    """Path below tests/, with or without ``::test``; a folder ends in a slash."""
    keep: int


def rules(text: str) -> list[Rule]:
    """Return the lines of a list.

    Raises:
        ValueError: a line is no rule.
    """
    found: list[Rule] = []
    for line in text.splitlines():
        words = line.partition("#")[0].split()
        if not words:
            continue
        if words[0] not in MARKS or len(words) not in (2, 4) or (len(words) == 4 and words[2] != "keep"):
            raise ValueError(
                f"tiers.txt: expected 'MARK NAME [keep N]' with a mark of {', '.join(MARKS)}, got {line!r}"
            )
        found.append(Rule(words[0], words[1], int(words[3]) if len(words) == 4 else 0))
    return found


def kept(count: int, keep: int) -> set[int]:
    """Return which of some tests are kept, spread over them: positions from 0 on."""
    return {at * count // keep for at in range(keep)} if keep < count else set(range(count))


def mark(items: Iterable[pytest.Item], of: Sequence[Rule]) -> None:
    """Mark tests by rules."""
    named: dict[str, list[pytest.Item]] = {}
    for item in items:
        node = item.nodeid.removeprefix("tests/")
        for name in {node.split("/")[0] + "/", node.split("::")[0], node.split("[")[0]}:
            named.setdefault(name, []).append(item)
    for rule in of:
        meant = named.get(rule.name, [])
        spared = kept(len(meant), rule.keep)
        for at, item in enumerate(meant):
            if at not in spared:
                item.add_marker(rule.mark)
