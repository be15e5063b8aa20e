"""Sets of ranks as people write and read them: ``0-3,7`` and ``0-6:2``."""

from __future__ import annotations

import re
from collections.abc import Iterable

from monarch.exceptions import PointError, ShapeError

_PARTS = 24
"""Ranges in a sentence; with more, nobody reads them."""
_PART = re.compile(r"\s*([0-9]+)\s*(?:-\s*([0-9]+)\s*(?::\s*([0-9]+)\s*)?)?")


def format_ranks(ranks: Iterable[int]) -> str:
    """Return ranks ascending, without duplicates, with runs folded: ``0-3,7``, and ``0-6:2`` for three or more in step.

    Raises:
        PointError: a rank is negative.
    """
    ordered = sorted(set(ranks))
    if ordered and ordered[0] < 0:
        raise PointError(f"rank {ordered[0]} is invalid; ranks count from 0")
    parts: list[str] = []
    start = 0
    while start < len(ordered):
        end = start + 1
        step = ordered[end] - ordered[start] if end < len(ordered) else 1
        while end < len(ordered) and ordered[end] - ordered[end - 1] == step:
            end += 1
        if step > 1 and end - start < 3:
            # Two ranks apart are not a run; the second may begin one.
            end = start + 1
        first, last = ordered[start], ordered[end - 1]
        parts.append(str(first) if first == last else f"{first}-{last}" + (f":{step}" if step > 1 else ""))
        start = end
    return ",".join(parts)


def parse_ranks(text: str, total: int | None = None) -> list[int]:
    """Parse a text such as ``0-3,7`` or ``0-6:2`` to ascending ranks without duplicates; none for an empty text.

    Args:
        text: ranks and inclusive ranges, separated by commas.
        total: number of ranks, if known.

    Raises:
        ShapeError: the text has another form.
        PointError: a rank is not below ``total``.
    """
    ranks: set[int] = set()
    for part in text.split(",") if text.strip() else ():
        match = _PART.fullmatch(part)
        if match is None:
            raise ShapeError(f"invalid ranks {text!r}; write them like 0-3,7 or 0-6:2")
        first, last, step = int(match[1]), int(match[2] or match[1]), int(match[3] or 1)
        if last < first or step < 1:
            raise ShapeError(f"invalid ranks {part.strip()!r}: ranges must ascend, with a step of at least 1")
        if total is not None and last >= total:
            where = "" if text == str(last) else f" in {text!r}"
            raise PointError(f"no rank {last}{where}; this mesh has ranks 0-{total - 1}")
        ranks.update(range(first, last + 1, step))
    return sorted(ranks)


def describe_ranks(ranks: Iterable[int], total: int | None = None) -> str:
    """Describe ranks: ``rank 3``, ``ranks 0-7``, ``all 8 ranks``, or, of many, ``ranks 0-3,8,... (412 in all)``."""
    chosen = set(ranks)
    if not chosen:
        return "no ranks"
    if len(chosen) == 1:
        return f"rank {chosen.pop()}"
    if len(chosen) == total:
        return f"all {total} ranks"
    parts = format_ranks(chosen).split(",")
    if len(parts) <= _PARTS:
        return f"ranks {','.join(parts)}"
    return f"ranks {','.join(parts[:_PARTS])},... ({len(chosen):,} in all)"
