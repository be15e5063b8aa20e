"""Where arrays differ, from hashes and small parts of them."""

from __future__ import annotations

import math
import struct
from hashlib import sha256

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monarch._core.digests import elements
from monarch._core.digests.arrays import UnknownContentsError
from monarch._core.digests.elements import differing, index_of, values_in
from monarch._core.digests.flat import Flat


def compared(one: bytes, other: bytes, kind: str, width: int) -> elements.Elements:
    def hashes(start: int, stop: int, step: int) -> tuple[list[bytes], list[bytes]]:
        bounds = [(at * width, min(at + step, stop) * width) for at in range(start, stop, step)]
        return tuple([sha256(each[a:b]).digest() for a, b in bounds] for each in (one, other))  # pyright: ignore

    def data(start: int, stop: int) -> tuple[bytes, bytes]:
        assert stop - start <= elements.SMALL
        return one[start * width : stop * width], other[start * width : stop * width]

    return differing(len(one) // width, kind, hashes, data)


@settings(deadline=None, max_examples=60)
@given(st.data(), st.integers(1, 3000), st.sampled_from([1, 7, 64]))
def test_first_element_and_largest_difference_are_right(data: st.DataObject, count: int, small: int) -> None:
    here = list(range(count))
    there = list(here)
    for at in data.draw(st.sets(st.integers(0, count - 1), max_size=20)):
        there[at] += data.draw(st.integers(1, 1000))
    before, elements.SMALL = elements.SMALL, small
    try:
        found = compared(struct.pack(f"={count}q", *here), struct.pack(f"={count}q", *there), "q", 8)
    finally:
        elements.SMALL = before
    places = [at for at in range(count) if here[at] != there[at]]
    assert found.complete and found.differing == len(places)
    assert found.first == (places[0] if places else -1)
    assert found.largest == max([abs(here[at] - there[at]) for at in places], default=0)
    if places:
        assert (found.here, found.there) == (here[places[0]], there[places[0]])


def test_reads_of_arrays_that_differ_everywhere_are_bounded() -> None:
    count = 4 * elements.BUDGET
    found = compared(bytes(count), b"\1" * count, "B", 1)
    assert found.first == 0 and not found.complete and found.largest == 1
    assert found.differing == elements.BUDGET


def test_nan_equals_nan_and_differs_from_numbers() -> None:
    pack = struct.Struct("=3d").pack
    found = compared(pack(1, math.nan, math.inf), pack(1, 2, math.inf), "d", 8)
    assert found.first == 1 and math.isnan(float(found.here)) and found.there == 2.0  # pyright: ignore
    assert found.differing == 1 and found.largest == 0.0


@given(st.lists(st.integers(1, 5), min_size=0, max_size=4), st.data())
def test_index_counts_in_row_major_order(shape: list[int], data: st.DataObject) -> None:
    flat = data.draw(st.integers(0, math.prod(shape) - 1))
    assert (
        index_of(flat, shape) == tuple(map(int, numpy.unravel_index(flat, shape))) if shape else index_of(0, ()) == ()
    )


@pytest.mark.parametrize(
    "dtype", ["float64", "float32", "float16", "complex64", "complex128", "bool", "int8", "uint16", "int64"]
)
def test_numbers_are_read_from_their_bytes(dtype: str) -> None:
    value = numpy.array([[0, 1, 3], [5, 6, 7]]).astype(dtype)
    flat = Flat(value.T)
    assert flat.form == f"{dtype}[3, 2]"
    assert list(values_in(flat.data(0, 6), flat.kind)) == value.T.reshape(-1).tolist()
    assert flat.hashes(0, 6, 4) == [Flat(value.T.reshape(-1)[:4]).mark(), Flat(value.T.reshape(-1)[4:]).mark()]


def test_tensors_are_read_like_arrays() -> None:
    torch = pytest.importorskip("torch")
    value = torch.tensor([1.5, float("nan"), -2.0], dtype=torch.bfloat16)
    read = values_in(Flat(value).data(0, 3), Flat(value).kind)
    assert read[0] == 1.5 and math.isnan(abs(read[1])) and read[2] == -2.0
    assert Flat(torch.nn.Parameter(torch.ones(2, 3))).form == "float32[2, 3] on cpu"
    with pytest.raises(UnknownContentsError):
        Flat(torch.ones(2).to_sparse())
    with pytest.raises(UnknownContentsError):
        Flat([1, 2])
