"""Boxes: the parts of tensors that processes hold, as index ranges along each dim."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise, product
from math import prod
from typing import NamedTuple, TypeAlias

import numpy

Box: TypeAlias = tuple[tuple[int, int], ...]
"""Start and stop index of each dim; empty for a tensor without dims."""


class Runs(NamedTuple):
    """Elements that are contiguous in two boxes, each stored in row-major order."""

    there: numpy.ndarray
    """Offset in elements of each run in the box that is read."""
    here: numpy.ndarray
    """Offset in elements of each run in the box that is written."""
    length: int
    """Elements of each run."""


def box_of(shape: Sequence[int], offset: Sequence[int] | None = None) -> Box:
    """Return the box of a tensor of some shape, whose first element has these indices in a larger one."""
    starts = offset if offset is not None else [0] * len(shape)
    return tuple((start, start + size) for start, size in zip(starts, shape, strict=True))


def elements(box: Box) -> int:
    """Return its number of elements."""
    return prod(stop - start for start, stop in box)


def grid(boxes: Iterable[Box]) -> list[list[int]]:
    """Return the indices along each dim at which some box begins or ends, in order."""
    all_boxes = list(boxes)
    return [sorted({edge for box in all_boxes for edge in box[dim]}) for dim in range(len(all_boxes[0]))]


def cells_of(box: Box, edges: Sequence[Sequence[int]]) -> Iterator[Box]:
    """Yield the cells of a grid that make up a box; the box's own edges must be edges of the grid."""
    ranges: list[list[tuple[int, int]]] = []
    for (start, stop), along in zip(box, edges, strict=True):
        ranges.append(list(pairwise(along[bisect_left(along, start) : bisect_left(along, stop) + 1])))
    yield from product(*ranges)


def split(box: Box, parts: int) -> list[Box]:
    """Split a box into at most so many parts of nearly equal size, along its longest dim."""
    if not box or parts < 2:
        return [box]
    dim = max(range(len(box)), key=lambda each: box[each][1] - box[each][0])
    start, stop = box[dim]
    count = min(parts, stop - start)
    edges = [start + (stop - start) * index // count for index in range(count + 1)]
    return [(*box[:dim], edge, *box[dim + 1 :]) for edge in pairwise(edges)]


def runs(part: Box, there: Box, here: Box) -> Runs:
    """Return the elements of a part that both boxes have, in as few runs as possible.

    Args:
        part: inside both others.
        there: box to read.
        here: box to write.
    """
    # From the last dim on, as long as the part spans both boxes, its elements are contiguous.
    together = len(part)
    while together > 0 and all(box[together - 1] == part[together - 1] for box in (there, here)):
        together -= 1
    outer = max(0, together - 1)
    length = prod(stop - start for start, stop in part[outer:])
    return Runs(_before(part, there, outer), _before(part, here, outer), length)


def _before(part: Box, box: Box, outer: int) -> numpy.ndarray:
    """Return the element offset of each row of a part within a box, by the dims up to ``outer``."""
    before = numpy.zeros(1, dtype=numpy.int64)
    stride = elements(box)
    for dim, ((start, stop), (first, last)) in enumerate(zip(part, box, strict=True)):
        stride //= max(1, last - first)
        steps = numpy.arange(start, stop if dim < outer else start + 1, dtype=numpy.int64) - first
        before = (before[:, None] + steps[None, :] * stride).ravel()
    return before
