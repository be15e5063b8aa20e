"""Runs of bytes as rectangles: they cover the same bytes, and the rows of a part of a matrix are one."""

from __future__ import annotations

import numpy
from hypothesis import given
from hypothesis import strategies as st

from monarch._tensors.transports.rectangles import Rectangle, rectangles

Spans = list[tuple[int, int, int]]


def spans_of(pieces: list[Rectangle]) -> Spans:
    return [
        (each.there + row * each.pitch_there, each.here + row * each.pitch_here, each.width)
        for each in pieces
        for row in range(each.height)
    ]


def array(spans: Spans) -> numpy.ndarray:
    return numpy.array(spans, dtype=numpy.int64).reshape(-1, 3)


rows = st.tuples(st.integers(0, 20), st.integers(0, 20), st.integers(1, 4))
blocks = st.tuples(rows, st.integers(1, 5), st.integers(-3, 9), st.integers(-3, 9)).map(
    lambda block: [
        (block[0][0] + 20 + at * block[2], block[0][1] + 20 + at * block[3], block[0][2]) for at in range(block[1])
    ]
)


@given(st.lists(blocks, max_size=6))
def test_rectangles_cover_the_same_bytes_in_order(parts: list[Spans]) -> None:
    spans = [each for part in parts for each in part]
    found = rectangles(array(spans))
    assert spans_of(found) == spans
    assert all(each.height == 1 or min(each.pitch_there, each.pitch_here) >= each.width for each in found)


def test_columns_of_a_matrix_are_one_rectangle() -> None:
    spans = [(row * 4096 + 256, row * 1024, 1024) for row in range(1000)]
    assert rectangles(array(spans)) == [Rectangle(256, 0, 1024, 1000, 4096, 1024)]
    assert rectangles(array([*spans, (0, 2_000_000, 8)]))[1] == Rectangle(0, 2_000_000, 8, 1, 8, 8)


def test_rows_that_are_too_far_apart_are_single() -> None:
    spans = [(row << 32, row * 8, 8) for row in range(3)]
    assert [each.height for each in rectangles(array(spans))] == [1, 1, 1]
