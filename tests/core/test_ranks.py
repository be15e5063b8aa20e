"""Ranks as text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch._core.shapes.ranks import describe_ranks, format_ranks, parse_ranks
from monarch.exceptions import PointError, ShapeError


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([], ""),
        ([3], "3"),
        ([0, 1, 2, 3, 7], "0-3,7"),
        ([0, 1], "0-1"),
        ([0, 2], "0,2"),
        ([0, 2, 4, 6], "0-6:2"),
        ([0, 2, 3, 4], "0,2-4"),
        ([1, 4, 7, 8, 9], "1-7:3,8-9"),
        ([7, 0, 1, 0], "0-1,7"),
    ],
)
def test_runs_of_ranks_are_folded(ranks: list[int], text: str) -> None:
    assert format_ranks(ranks) == text


@given(st.sets(st.integers(0, 60)))
def test_parsing_is_inverse_of_formatting(ranks: set[int]) -> None:
    assert parse_ranks(format_ranks(ranks), total=61) == sorted(ranks)


def test_parsing_takes_spaces_repeats_and_any_order() -> None:
    assert parse_ranks(" 7, 2 - 4 ,3,0-5:2 ") == [0, 2, 3, 4, 7]
    assert parse_ranks("  ") == []


@pytest.mark.parametrize("text", ["a", "1,", "-1", "0--2", "0-4:0", "4-2", "1:2", "1 2", "٣"])
def test_invalid_rank_text_is_rejected(text: str) -> None:
    with pytest.raises(ShapeError, match="invalid ranks"):
        parse_ranks(text)


def test_rank_out_of_range_is_rejected_before_expansion() -> None:
    with pytest.raises(PointError, match=r"no rank 99999999999 in '0-99999999999'; this mesh has ranks 0-7"):
        parse_ranks("0-99999999999", total=8)


def test_negative_rank_is_rejected() -> None:
    with pytest.raises(PointError, match="rank -1 is invalid"):
        format_ranks([3, -1])


@pytest.mark.parametrize(
    ("ranks", "total", "words"),
    [
        ([3], 8, "rank 3"),
        ([0], 1, "rank 0"),
        (range(8), 8, "all 8 ranks"),
        (range(8), 16, "ranks 0-7"),
        (range(8), None, "ranks 0-7"),
        ([], 8, "no ranks"),
        # Not in step, so that each is a range.
        ([at * at for at in range(4, 4 + 24)], None, f"ranks {','.join(str(at * at) for at in range(4, 28))}"),
        (
            [at * at for at in range(4, 44)],
            None,
            f"ranks {','.join(str(at * at) for at in range(4, 28))},... (40 in all)",
        ),
    ],
)
def test_ranks_are_described(ranks: list[int], total: int | None, words: str) -> None:
    assert describe_ranks(ranks, total) == words
