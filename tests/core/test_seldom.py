"""Complaints that are counted, and printed only a few times."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from monarch._core.text.seldom import MOST_KINDS, Seldom


def test_equal_complaints_are_printed_at_powers_of_ten() -> None:
    seldom = Seldom()
    told = [number for _ in range(80_000) if (number := seldom.count("frame"))]
    assert told == [1, 10, 100, 1000, 10_000]
    assert seldom.statistics() == {"frame": 80_000}


def test_first_complaint_of_each_kind_is_printed() -> None:
    seldom = Seldom()
    assert [seldom.count(kind) for kind in "abab"] == [1, 1, 0, 0]


@given(st.lists(st.text(max_size=4), max_size=400))
def test_kinds_are_bounded_and_no_complaint_is_lost(kinds: list[str]) -> None:
    seldom = Seldom()
    for kind in kinds:
        seldom.count(kind)
    assert sum(seldom.statistics().values()) == len(kinds)
    assert len(seldom.statistics()) <= MOST_KINDS + 1
