"""How a value differs among ranks."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from monarch._core.digests.elements import Elements, index_of
from monarch._core.shapes.ranks import describe_ranks

_MANY = 4
"""Groups of ranks of which each is described."""


class ComparedPart(NamedTuple):
    """A part of a value without parts of its own: an array, a number, a text."""

    path: str
    """From the value to the part, as in ``['layers'][0].weight``; empty for the value itself."""
    form: str
    """Type, dtype, shape and type of device."""
    mark: bytes
    """A hash of form and contents; empty if these cannot be read."""
    text: str
    """The value in a few words."""


class Difference(NamedTuple):
    """The first part of a value that differs between two groups of ranks."""

    ranks: list[int]
    """Those that differ from the first group."""
    path: str
    """Of the part."""
    parts: int
    """How many parts differ."""
    total: int
    """How many parts the two values have together."""
    here: str
    """The part in the first group in a few words; empty if it is missing there."""
    there: str
    """The part on ``ranks``."""
    shape: tuple[int, ...] = ()
    """Of the arrays that were compared."""
    elements: Elements | None = None
    """How the arrays differ; None for other parts, and for arrays of different shape or dtype."""

    @property
    def first_index(self) -> tuple[int, ...] | None:
        """The first index at which the arrays differ; None if they are not arrays of one shape."""
        at = self.elements.first if self.elements is not None else -1
        return index_of(at, self.shape) if at >= 0 else None


class Comparison(NamedTuple):
    """A value compared across ranks."""

    expression: str
    text: str
    """The value of the first group in a few words."""
    groups: list[list[int]]
    """Ranks that agree, the most first."""
    differences: list[Difference]
    """For each further group, how it differs from the first one."""
    unread: int
    """Parts that were not compared, since their contents cannot be read."""
    failed: dict[int, str]
    """Ranks that have no such value, and why."""

    @property
    def equal(self) -> bool:
        """Whether all ranks have the value, and it is the same."""
        return len(self.groups) == 1 and not self.failed

    def __str__(self) -> str:
        """Return it as text, with a paragraph for each group."""
        lines: list[str] = []
        if len(self.groups) == 1:
            ranks = self.groups[0]
            lines = [
                f"{describe_ranks(ranks)} {'has' if len(ranks) == 1 else 'agree on'} {self.expression}: {self.text}"
            ]
        elif self.groups:
            lines = [f"{self.expression} differs: {_of_groups(self.groups)}"]
            lines += _detailed(self.differences, describe_ranks(self.groups[0]))
        if self.unread:
            parts = "1 part was" if self.unread == 1 else f"{self.unread:,} parts were"
            lines.append(f"{parts} not compared, because the contents cannot be read")
        failed: dict[str, list[int]] = {}
        for rank, text in sorted(self.failed.items()):
            failed.setdefault(text, []).append(rank)
        return "\n".join([*lines, *(f"{describe_ranks(ranks)}: {text}" for text, ranks in failed.items())])


def first_difference(
    here: list[ComparedPart], there: list[ComparedPart]
) -> tuple[ComparedPart | None, ComparedPart | None, int]:
    """Return the first part that differs, in both values, None where it is missing, and how many differ.

    Args:
        here: the parts of a value, in order.
        there: of another.
    """
    ours, theirs = {part.path: part for part in here}, {part.path: part for part in there}
    paths = [part.path for part in here] + [part.path for part in there if part.path not in ours]
    differing = [path for path in paths if _differs(ours.get(path), theirs.get(path))]
    if not differing:
        return None, None, 0
    return ours.get(differing[0]), theirs.get(differing[0]), len(differing)


def _differs(one: ComparedPart | None, other: ComparedPart | None) -> bool:
    if one is None or other is None:
        return True
    return one.form != other.form or bool(one.mark and other.mark and one.mark != other.mark)


def _of_groups(groups: list[list[int]]) -> str:
    shown = [f"{describe_ranks(ranks)} agree" if len(ranks) > 1 else describe_ranks(ranks) for ranks in groups[:_MANY]]
    if len(groups) > _MANY:
        shown.append(f"{len(groups) - _MANY} other groups")
    if all(len(ranks) == 1 for ranks in groups):
        return f"no two of {describe_ranks(rank for ranks in groups for rank in ranks)} agree"
    return "; ".join(shown)


def _detailed(differences: list[Difference], first: str) -> list[str]:
    """Return some lines for each group that differs from the first one."""
    lines: list[str] = []
    shown = ""
    for each in differences[: _MANY - 1]:
        theirs = describe_ranks(each.ranks)
        if each.path:
            of = f"{each.parts:,} of {each.total:,} parts differ{'s' if each.parts == 1 else ''}"
            lines.append(f"{theirs} vs {first} at {each.path} ({of}):")
        elif len(differences) > 1 and each.elements is not None:
            lines.append(f"{theirs} vs {first}:")
        here = f"  {first}: {each.here or 'missing'}"
        if each.path or here != shown:
            lines.append(here)
        shown = here
        lines += [f"  {theirs}: {each.there or 'missing'}", *_of_elements(each, first, theirs)]
    if len(differences) >= _MANY:
        lines.append(f"  and {len(differences) - _MANY + 1:,} more groups")
    return lines


def _of_elements(difference: Difference, first: str, theirs: str) -> list[str]:
    """Return which elements of arrays differ, and by how much."""
    elements, index = difference.elements, difference.first_index
    if elements is None or index is None:
        return []
    values = f": {_number(elements.here)} on {first}, {_number(elements.there)} on {theirs}"
    count, total = elements.differing, prod(difference.shape)
    among = f"{count:,} of {total:,} elements differ{'s' if count == 1 else ''}, by at most {elements.largest:.6g}"
    if not elements.complete:
        largest = f"the largest difference is at least {elements.largest:.6g}"
        among = f"at least {count:,} of {total:,} elements differ; {largest}"
    place = ", ".join(map(str, index))
    return [f"  first difference at [{place}]{values if elements.here is not None else ''}", f"  {among}"]


def _number(value: object) -> str:
    return f"{value:.9g}" if isinstance(value, float) else str(value)
