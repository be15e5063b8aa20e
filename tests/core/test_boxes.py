"""Boxes: their grids, and the contiguous elements of two boxes."""

from __future__ import annotations

from typing import Any

import numpy
from hypothesis import given
from hypothesis import strategies as st

from monarch._core.shapes.boxes import Box, box_of, cells_of, elements, grid, runs, split

SIZES = st.lists(st.integers(1, 6), min_size=0, max_size=3)


@st.composite
def inside(draw: Any, box: Box) -> Box:
    """A box within another, not empty."""
    found: list[tuple[int, int]] = []
    for start, stop in box:
        first = draw(st.integers(start, stop - 1))
        found.append((first, draw(st.integers(first + 1, stop))))
    return tuple(found)


@st.composite
def around(draw: Any, box: Box, shape: list[int]) -> Box:
    """A box of a tensor that has another in it."""
    return tuple(
        (draw(st.integers(0, start)), draw(st.integers(stop, size)))
        for (start, stop), size in zip(box, shape, strict=True)
    )


@given(st.data(), SIZES)
def test_runs_copy_same_elements_as_indices(data: st.DataObject, shape: list[int]) -> None:
    tensor = numpy.arange(numpy.prod(shape, dtype=int)).reshape(shape)
    part = data.draw(inside(box_of(shape)))
    there, here = data.draw(around(part, shape)), data.draw(around(part, shape))
    source = tensor[tuple(slice(*each) for each in there)].ravel()
    target = numpy.full(elements(here), -1)
    found = runs(part, there, here)
    for first, to in zip(found.there, found.here, strict=True):
        target[to : to + found.length] = source[first : first + found.length]
    expected = numpy.full([stop - start for start, stop in here], -1)
    within = tuple(slice(start - first, stop - first) for (start, stop), (first, _) in zip(part, here, strict=True))
    expected[within] = tensor[tuple(slice(*each) for each in part)]
    assert (target.reshape(expected.shape) == expected).all()


def test_contiguous_rows_are_one_run() -> None:
    whole = box_of([100, 8])
    assert [run.tolist() for run in runs(((10, 20), (0, 8)), whole, whole)[:2]] == [[80], [80]]
    assert runs(((10, 20), (0, 8)), whole, whole).length == 80
    assert len(runs(((10, 20), (0, 4)), whole, whole).there) == 10


@given(st.data(), st.lists(st.integers(1, 6), min_size=1, max_size=3))
def test_cells_of_box_cover_it(data: st.DataObject, shape: list[int]) -> None:
    boxes = [data.draw(inside(box_of(shape))) for _ in range(data.draw(st.integers(1, 4)))]
    edges = grid(boxes)
    for box in boxes:
        seen = numpy.zeros(shape, dtype=int)
        for cell in cells_of(box, edges):
            seen[tuple(slice(*each) for each in cell)] += 1
        expected = numpy.zeros(shape, dtype=int)
        expected[tuple(slice(*each) for each in box)] = 1
        assert (seen == expected).all()


@given(st.data(), st.lists(st.integers(1, 6), min_size=0, max_size=3), st.integers(1, 9))
def test_box_is_split_into_parts_of_equal_size(data: st.DataObject, shape: list[int], parts: int) -> None:
    box = data.draw(inside(box_of(shape)))
    found = split(box, parts)
    assert 1 <= len(found) <= parts
    assert sum(elements(each) for each in found) == elements(box)
    sizes = [elements(each) for each in found]
    longest = max((stop - start for start, stop in box), default=1)
    assert max(sizes) - min(sizes) <= elements(box) // longest
