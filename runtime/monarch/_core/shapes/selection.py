"""How a view was selected from its mesh, as text: ``gpus=1, hosts=0:2``."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod

from monarch._core.shapes.extent import Point
from monarch._core.shapes.ranks import describe_ranks
from monarch._core.shapes.region import Region


def selection(whole: Region, part: Region) -> str:
    """Return the index of each axis, as ``slice`` takes it; empty for the whole mesh.

    Members that no ``slice`` can select are given by their ranks in the whole mesh, without ranks that a shrunk mesh no
    longer has.

    Args:
        whole: the mesh.
        part: a view of it, with any axis names.
    """
    if whole is part or whole == part:
        return ""
    positions = [whole.position_of(rank) for rank in part.base_ranks()]
    members = sorted({position for position in positions if position is not None})
    if len(members) == whole.nelements:
        return ""
    if not members:
        return "gone"
    points = [Point(member, whole.extent) for member in members]
    kept = {label: sorted({point[label] for point in points}) for label in whole.labels}
    if prod(map(len, kept.values())) != len(members) or not all(map(_is_range, kept.values())):
        return describe_ranks(members)
    return ", ".join(
        f"{label}={_range(numbers)}" for label, numbers in kept.items() if len(numbers) < whole.extent[label]
    )


def called(name: str, whole: Region, part: Region) -> str:
    """Name a view by its mesh: ``trainers[gpus=1]``; the name alone for the whole mesh."""
    text = selection(whole, part)
    return f"{name}[{text}]" if text else name


def _is_range(numbers: Sequence[int]) -> bool:
    return len(numbers) < 3 or len({after - before for before, after in pairwise(numbers)}) == 1


def _range(numbers: Sequence[int]) -> str:
    first, last = numbers[0], numbers[-1]
    if first == last:
        return str(first)
    step = numbers[1] - first
    return f"{first}:{last + 1}" + (f":{step}" if step > 1 else "")
