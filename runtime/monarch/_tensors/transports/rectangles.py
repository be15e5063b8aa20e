"""Runs of bytes as rectangles: the rows of a part of a matrix, which a GPU copies in one call."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy

if TYPE_CHECKING:
    from numpy.typing import NDArray

_WIDEST = (1 << 31) - 1
"""Bytes between rows that CUDA accepts at most (CU_DEVICE_ATTRIBUTE_MAX_PITCH)."""


class Rectangle(NamedTuple):
    """Rows of equal size at equal distances. All in bytes."""

    there: int
    """Offset of the first row in the remote memory."""
    here: int
    """Offset of the first row in the local memory."""
    width: int
    height: int
    """Number of rows."""
    pitch_there: int
    """From one row to the next in the remote memory; the width if there is only one row."""
    pitch_here: int


def whole(size: int) -> Rectangle:
    """Return all of some memory.

    Args:
        size: in bytes.
    """
    return Rectangle(0, 0, size, 1, size, size)


def rectangles(spans: NDArray[numpy.int64]) -> list[Rectangle]:
    """Join runs of bytes to rectangles, in their order.

    Args:
        spans: rows of remote offset, local offset and size in bytes, as ``Move.rows``.
    """
    if len(spans) == 1:
        there, here, width = (int(each) for each in spans[0])
        return [Rectangle(there, here, width, 1, width, width)]
    steps = numpy.diff(spans, axis=0)
    changes = numpy.flatnonzero((steps[1:] != steps[:-1]).any(axis=1))
    found: list[Rectangle] = []
    start = 0
    while start < len(spans):
        there, here, width = (int(each) for each in spans[start])
        height, pitches = 1, (width, width)
        if start < len(steps):
            further, nearer, wider = (int(each) for each in steps[start])
            if not wider and width <= further <= _WIDEST and width <= nearer <= _WIDEST:
                after = int(numpy.searchsorted(changes, start))
                last = int(changes[after]) if after < len(changes) else len(steps) - 1
                height, pitches = last - start + 2, (further, nearer)
        found.append(Rectangle(there, here, width, height, *pitches))
        start += height
    return found
