"""Where two arrays differ: the first element, how many, and by how much, from hashes and small parts of both."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Sequence
from itertools import pairwise
from math import isnan, prod
from typing import NamedTuple

PIECES = 64
"""Parts that a range is hashed in."""
SMALL = 1 << 14
"""Elements of a part that is read rather than hashed."""
BUDGET = 1 << 17
"""Elements of each array that are read in all."""

Hashes = Callable[[int, int, int], tuple[Sequence[bytes], Sequence[bytes]]]
"""Takes a range of elements and a step, and returns the hashes of both arrays for each step of it."""
Data = Callable[[int, int], tuple[bytes, bytes]]
"""Takes a range of elements, and returns the bytes of both arrays."""


class Elements(NamedTuple):
    """How two arrays of equal shape and dtype differ."""

    first: int
    """The first element that differs, counted in row-major order; -1 if none was found."""
    here: object
    """Its value in the first array; None if its dtype is not known here."""
    there: object
    """Its value in the second array."""
    differing: int
    """Elements that differ, of those that were compared."""
    largest: float
    """The largest absolute difference of elements that were compared; 0.0 if none is finite."""
    complete: bool
    """Whether all elements were compared."""


def differing(count: int, kind: str, hashes: Hashes, data: Data) -> Elements:
    """Compare two arrays by hashes, reading only small parts of them.

    Args:
        count: the number of their elements.
        kind: the kind of an element; see ``values_in``.
        hashes: returns hashes of both.
        data: returns bytes of both.
    """
    ranges = [(0, count)] if count else []
    first, here, there, found, largest, left = -1, None, None, 0, 0.0, BUDGET
    while ranges and left > 0:
        start, stop = ranges.pop()
        if stop - start > SMALL:
            step = max(SMALL, -(-(stop - start) // PIECES))
            bounds = [*range(start, stop, step), stop]
            parts = zip(pairwise(bounds), *hashes(start, stop, step), strict=True)
            # The first one is the next.
            ranges += reversed([part for part, one, other in parts if one != other])
            continue
        left -= stop - start
        one, other = data(start, stop)
        places = _places(one, other, stop - start)
        if not places:
            continue
        ones, others = values_in(one, kind), values_in(other, kind)
        known = len(ones) == len(others) == stop - start
        if first < 0:
            first = start + places[0]
            here, there = (ones[places[0]], others[places[0]]) if known else (None, None)
        found += len(places)
        gaps = [abs(ones[at] - others[at]) for at in places] if known else []
        largest = max([largest, *(gap for gap in gaps if not isnan(gap) and gap != float("inf"))])
    return Elements(first, here, there, found, largest, not ranges)


def index_of(flat: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the index of an element by its number in row-major order."""
    index: list[int] = []
    for at, size in enumerate(shape):
        index.append(flat // prod(shape[at + 1 :]) % size)
    return tuple(index)


def values_in(data: bytes, kind: str) -> Sequence[float | int | complex]:
    """Return the numbers in bytes of this machine's order; none for an unknown kind.

    Args:
        data: the data of consecutive elements.
        kind: as in ``struct``: ``d``, ``f``, ``e``, ``b``, ``B``, ``h``, ``H``, ``i``, ``I``, ``q``, ``Q``, ``?``; and
            ``bf`` for bfloat16, ``F`` and ``D`` for complex numbers of two ``f`` and ``d``.
    """
    if kind in ("F", "D"):
        parts = array(kind.lower(), data)
        return [complex(real, imag) for real, imag in zip(parts[::2], parts[1::2], strict=True)]
    if kind == "bf":
        # The upper half of a float32.
        return array("f", array("I", [each << 16 for each in array("H", data)]).tobytes())
    if kind in ("e", "?"):
        return struct.unpack(f"={len(data) // struct.calcsize(kind)}{kind}", data)
    return array(kind, data) if kind and kind in "dfbBhHiIqQ" else ()


def _places(one: bytes, other: bytes, count: int) -> list[int]:
    """Return which elements differ, given the bytes of as many."""
    if one == other:
        return []
    width = max(1, len(one) // count)
    return [at for at in range(count) if one[at * width : (at + 1) * width] != other[at * width : (at + 1) * width]]
