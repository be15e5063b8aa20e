"""Cheap fingerprints of tensors."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from monarch._tensors.fingerprints import local_part, mark_of, number_of, size_sum, strangeness  # noqa: E402

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 5000), st.integers(0, 3), st.sampled_from(DTYPES), st.data())
def test_fingerprints_are_equal_exactly_for_equal_tensors(
    count: int, offset: int, dtype: Any, data: st.DataObject
) -> None:
    one = (torch.arange(count + offset) % 250).to(dtype)[offset:]
    # Elsewhere in memory, and so with another alignment.
    other = torch.cat([torch.zeros(3, dtype=dtype), one])[3:]
    assert int(mark_of(one)) == int(mark_of(other))
    at = data.draw(st.integers(0, count - 1))
    assert number_of(one) == number_of(other)
    other[at] = 0 if bool(other[at]) else 1
    assert int(mark_of(one)) != int(mark_of(other)) and number_of(one) != number_of(other)


def test_moved_values_change_the_fingerprint() -> None:
    one = torch.arange(2000.0)
    other = one.clone()
    other[[3, 1500]] = one[[1500, 3]]
    assert int(mark_of(one)) != int(mark_of(other))
    assert int(mark_of(one.reshape(40, 50).T)) == int(mark_of(one.reshape(40, 50).T.contiguous()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64])
def test_nan_and_inf_are_seen(dtype: Any) -> None:
    value = torch.full((700,), 60000.0).to(dtype)
    assert math.isfinite(float(size_sum(value))) and not strangeness(value)
    for bad, name in ((float("nan"), "NaN"), (float("inf"), "Inf"), (-float("inf"), "Inf")):
        strange = value.clone()
        strange[699] = bad
        assert not math.isfinite(float(size_sum(strange))) and strangeness(strange) == name


def test_ordinary_tensors_are_whole() -> None:
    value = torch.nn.Parameter(torch.ones(2))
    assert local_part(value) == (value, False)
