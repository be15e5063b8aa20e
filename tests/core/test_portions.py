"""The part of a long output that a cell shows."""

from __future__ import annotations

import re

import pytest

from monarch_kernel.output.portions import FIRST, LAST, Portions

NOTE = "… more\n"


def lines_of(ranks: str, count: int, first: int = 0, text: str = "line") -> str:
    return "".join(f"[{ranks}] {text} {number}\n" for number in range(first, first + count))


def numbers(ranks: str, text: str) -> list[int]:
    return [int(each) for each in re.findall(rf"^\[{ranks}\] line (\d+)$", text, re.M)]


def test_short_output_is_shown_as_it_comes() -> None:
    portions = Portions(10, 1000)
    text = lines_of("rank 0", 4) + "no rank\n" + lines_of("rank 1", 5)
    assert portions.take(text, NOTE) == text and not portions.is_cut
    assert portions.end("") == ""


def test_slower_ranks_show_their_first_and_last_lines() -> None:
    portions = Portions(100, 1 << 20)
    # The fastest rank alone fills the page; the slower ones print far less, and later.
    shown = portions.take(lines_of("rank 1", 50_000), NOTE)
    assert shown == lines_of("rank 1", 100) + NOTE
    later = portions.take(lines_of("ranks 0,3", 15) + lines_of("rank 2", 500), NOTE)
    assert later == lines_of("ranks 0,3", FIRST) + lines_of("rank 2", FIRST)
    assert portions.take(lines_of("rank 0", 5, 15), NOTE) == "", "rank 0 has shown its first lines with rank 3"
    portions.take(lines_of("rank 1", 50_000, 50_000), NOTE)
    end = portions.end("%mesh log shows them")
    head, _, tail = end.partition("\n")
    omitted = 100_000 + 15 + 500 + 5 - 100 - 2 * FIRST - LAST
    assert re.fullmatch(rf"… not shown here: {omitted:,} lines \([\d,]+ characters\) of this cell; .*them", head)
    assert tail.count("\n") == LAST
    assert numbers("ranks 0,3", tail) == list(range(FIRST, 15)) and numbers("rank 0", tail) == list(range(15, 20))
    assert numbers("rank 2", tail)[-1] == 499 and numbers("rank 1", tail)[-1] == 99_999
    assert min(len(numbers("rank 1", tail)), len(numbers("rank 2", tail))) >= (LAST - 10) // 2
    # In the order in which they came.
    assert tail.index("ranks 0,3") < tail.index("rank 2") < tail.index("rank 0") < tail.index("rank 1")
    assert portions.end("") == ""
    # What comes after the end of the cell.
    assert portions.take("[rank 0] late\n", NOTE) == "" and portions.end("") == "[rank 0] late\n"


def test_characters_of_long_lines_are_bounded() -> None:
    portions = Portions(100, 1000)
    first = f"[rank 0] {'x' * 5000}\n"
    assert portions.take(first, NOTE) == first
    long = f"[rank 1] {'y' * (1 << 20)}\n"
    assert portions.take(long, NOTE) == NOTE
    text = portions.end("")
    assert text.startswith("[rank 1] yyyy") and text.endswith("y…\n") and len(text) < 1000


@pytest.mark.parametrize("count", [1, 64, 5000])
def test_many_groups_of_ranks_are_bounded(count: int) -> None:
    portions = Portions(1, 1 << 20)
    text = "".join(lines_of(f"rank {rank}", 30) for rank in range(count))
    shown = portions.take(text, NOTE)
    assert shown.count("\n") <= 1002
    tail = portions.end("").partition("here")[2].partition("\n")[2]
    assert tail.count("\n") <= LAST
    if count == 64:
        assert all(numbers(f"rank {rank}", shown)[:FIRST] == list(range(FIRST)) for rank in range(64))
        assert all(numbers(f"rank {rank}", tail)[-1] == 29 for rank in range(64))
