"""Folding the output of ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch._core.text.folding import folder as folder_module
from monarch._core.text.folding.blocks import Block, OutputLine, merge_blocks
from monarch._core.text.folding.folder import Folder

WINDOW = 0.1

Add = tuple[str, int, str, str]
"""Source, rank, stream, text."""
Printed = dict[tuple[str, int], list[tuple[str, str]]]
"""By source and rank, stream and text of its lines in order."""


def adds(text: st.SearchStrategy[str]) -> st.SearchStrategy[Add]:
    return st.tuples(st.sampled_from("AB"), st.integers(0, 3), st.sampled_from(["stdout", "stderr"]), text)


CHUNKS = adds(st.text("ab\n", min_size=1, max_size=6))
LINES = adds(st.sampled_from(["a\n", "b\n", "c\n", "a\nb\n", "\n"]))
STEPS = st.lists(
    CHUNKS | LINES | LINES | st.floats(0, 2 * WINDOW).map(lambda wait: ("wait", wait)) | st.sampled_from("AB"),
    max_size=60,
)


def by_rank(lines: Iterable[OutputLine]) -> Printed:
    found: Printed = defaultdict(list)
    for line in lines:
        assert list(line.ranks) == sorted(set(line.ranks))
        for rank in line.ranks:
            found[str(line.source), rank].append((line.stream, line.text))
    return found


class Unfolded:
    """Return what the folder should keep: the lines of each rank in the order in which they ended."""

    def __init__(self) -> None:
        self.printed: Printed = defaultdict(list)
        self.parts: dict[Add, str] = {}

    def add(self, source: str, rank: int, stream: str, text: str) -> None:
        key = (source, rank, stream, "")
        for char in text:
            if char == "\n":
                self.printed[source, rank].append((stream, self.parts.pop(key, "")))
            else:
                self.parts[key] = self.parts.get(key, "") + char

    def flush(self, source: str | None = None) -> None:
        for key in [key for key in self.parts if source in (None, key[0])]:
            self.printed[key[0], key[1]].append((key[2], self.parts.pop(key)))


@given(STEPS)
def test_no_line_of_a_rank_is_lost_doubled_or_reordered(steps: list[object]) -> None:
    folder, plain, lines, now = Folder(WINDOW), Unfolded(), list[OutputLine](), 0.0
    for step in steps:
        match step:
            case str(source):
                lines += folder.flush(source)
                plain.flush(source)
            case ("wait", float(wait)):
                now += wait
                lines += folder.due(now)
                following = folder.next_due()
                assert following is None or now < following <= now + WINDOW
            case (str(source), int(rank), str(stream), str(text)):
                folder.add(source, rank, stream, text, now)
                plain.add(source, rank, stream, text)
            case _:
                raise AssertionError(step)
    lines += folder.flush()
    plain.flush()
    assert by_rank(lines) == plain.printed
    assert folder.next_due() is None
    assert not folder._sources
    assert not folder._queues._waiting


def test_line_due_by_rounding_alone_is_emitted() -> None:
    # came + WINDOW <= now, and yet now - WINDOW < came.
    came, now = next(
        (came, came + WINDOW) for came in (index * 0.1 for index in range(1, 10_000)) if came + WINDOW - WINDOW < came
    )
    folder = Folder(WINDOW)
    folder.add("A", 0, "stdout", "a\n", came)
    assert [line.text for line in folder.due(now)] == ["a"]


@given(st.text("ab\r\n", max_size=30), st.data())
def test_chunk_boundaries_make_no_difference(text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    whole, cut = Folder(WINDOW), Folder(WINDOW)
    whole.add("A", 0, "stdout", text, 0)
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        cut.add("A", 0, "stdout", text[start:end], 0)
    assert cut.flush() == whole.flush()


@given(st.permutations(range(8)), st.integers(1, 4))
def test_equal_output_of_all_ranks_is_shown_once(order: list[int], chunks: int) -> None:
    folder = Folder(WINDOW)
    text = "0\n1\n2\n"
    for at, rank in enumerate(order):
        for start in range(0, len(text), chunks):
            folder.add("A", rank, "stdout", text[start : start + chunks], at * 0.01)
    assert folder.due(WINDOW - 0.001) == []
    assert folder.due(2 * WINDOW) == [OutputLine("A", tuple(range(8)), "stdout", text) for text in "012"]


def fold(*printed: str, order: Iterable[int] | None = None) -> list[tuple[str, str]]:
    """Return prefix and text of the output of ranks, each given as lines separated by spaces."""
    folder = Folder(WINDOW)
    for rank in range(len(printed)) if order is None else order:
        folder.add("A", rank, "stdout", printed[rank].replace(" ", "\n") + "\n", rank * 0.001)
    return [(line.prefix(), line.text) for line in folder.due(1)]


def test_lines_after_lines_of_ranks_own_fold() -> None:
    assert fold("r0 ready done", "r1 ready done", "r2 ready done") == [
        ("[rank 0]", "r0"),
        ("[rank 1]", "r1"),
        ("[rank 2]", "r2"),
        ("[ranks 0-2]", "ready"),
        ("[ranks 0-2]", "done"),
    ]


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 0, 2]])
def test_lines_after_line_of_one_rank_only_fold(order: list[int]) -> None:
    assert fold("start one two", "one two", "one two", order=order) == [
        ("[rank 0]", "start"),
        ("[ranks 0-2]", "one"),
        ("[ranks 0-2]", "two"),
    ]


def test_lines_shared_by_some_ranks_fold() -> None:
    assert fold("end", "r1 shared end", "r2 shared end") == [
        ("[rank 1]", "r1"),
        ("[rank 2]", "r2"),
        ("[ranks 1-2]", "shared"),
        ("[ranks 0-2]", "end"),
    ]


def test_ranks_printing_in_opposite_orders_keep_their_order() -> None:
    found = fold("a b", "b a")
    assert [text for who, text in found if "0" in who] == ["a", "b"]
    assert [text for who, text in found if who in ("[rank 1]", "[ranks 0-1]")] == ["b", "a"]
    assert len(found) == 3


def test_line_that_rank_prints_twice_is_shown_twice() -> None:
    assert fold("x x x", "x x") == [("[ranks 0-1]", "x"), ("[ranks 0-1]", "x"), ("[rank 0]", "x")]


def test_streams_and_sources_do_not_fold_into_each_other() -> None:
    folder = Folder(WINDOW)
    folder.add("A", 0, "stdout", "x\n", 0)
    folder.add("A", 1, "stderr", "x\n", 0)
    folder.add("B", 0, "stdout", "x\n", 0)
    assert folder.due(1) == [
        OutputLine("A", (0,), "stdout", "x"),
        OutputLine("A", (1,), "stderr", "x"),
        OutputLine("B", (0,), "stdout", "x"),
    ]


def test_line_waits_for_window_and_no_longer() -> None:
    folder = Folder(WINDOW)
    assert folder.next_due() is None
    folder.add("A", 0, "stdout", "x\ny", 5.0)
    folder.add("A", 1, "stdout", "x\n", 5.0 + WINDOW + 0.01)
    assert folder.next_due() == 5.0 + WINDOW
    assert folder.due(5.0 + WINDOW / 2) == []
    assert folder.due(5.0 + WINDOW) == [OutputLine("A", (0, 1), "stdout", "x")]
    assert folder.next_due() is None


def test_late_rank_has_line_of_its_own() -> None:
    folder = Folder(WINDOW)
    folder.add("A", 0, "stdout", "x\n", 0)
    assert folder.due(WINDOW) == [OutputLine("A", (0,), "stdout", "x")]
    folder.add("A", 1, "stdout", "x\n", WINDOW)
    assert folder.due(2 * WINDOW) == [OutputLine("A", (1,), "stdout", "x")]


def test_part_of_line_waits_for_its_end_or_flush() -> None:
    folder = Folder(WINDOW)
    for rank in range(3):
        folder.add("A", rank, "stdout", "loading", 0)
    assert folder.due(10) == []
    assert folder.next_due() is None
    assert folder.flush("A") == [OutputLine("A", (0, 1, 2), "stdout", "loading")]
    folder.add("A", 0, "stdout", " done\n", 11)
    assert folder.flush() == [OutputLine("A", (0,), "stdout", " done")]


def test_flushing_one_source_leaves_others() -> None:
    folder = Folder(WINDOW)
    folder.add("A", 0, "stdout", "x\ny", 0)
    folder.add("B", 0, "stdout", "z\n", 0)
    assert [line.text for line in folder.flush("A")] == ["x", "y"]
    assert folder.flush("A") == folder.flush("C") == []
    assert folder.due(1) == [OutputLine("B", (0,), "stdout", "z")]


def test_carriage_return_restarts_the_line() -> None:
    folder = Folder(WINDOW)
    folder.add("A", 0, "stderr", "\r 10%", 0)
    folder.add("A", 0, "stderr", "\r 50%\r", 0)
    folder.add("A", 0, "stderr", "100%\r\nend\r\n", 0)
    assert [line.text for line in folder.flush()] == ["100%", "end"]


def test_endless_progress_bar_takes_bounded_memory() -> None:
    folder = Folder(WINDOW)
    for step in range(10_000):
        folder.add("A", 0, "stderr", f"\r{step} of 10000", 0)
    assert sum(map(len, folder._sources["A"].parts[0, "stderr"])) < 100
    assert [line.text for line in folder.flush()] == ["9999 of 10000"]


def test_progress_bar_that_wiped_itself_leaves_no_line() -> None:
    folder = Folder(WINDOW)
    folder.add("A", 0, "stderr", "\r100%\r    \r", 0)
    assert folder.flush() == []
    folder.add("A", 0, "stderr", "\r100%\r    \r", 0)
    folder.add("A", 0, "stderr", "done\n", 0)
    assert [line.text for line in folder.flush()] == ["done"]


def test_thousand_interdependent_ranks_fold() -> None:
    # Each rank has, further back, the line that the one before it begins with.
    printed = [f"line{rank} line{rank - 1}" for rank in range(1000)]
    found = fold(*printed)
    assert len(found) == 1001
    assert found[0] == ("[rank 999]", "line999")
    assert found[-2:] == [("[ranks 0-1]", "line0"), ("[rank 0]", "line-1")]


def test_prefix_names_ranks() -> None:
    assert OutputLine("A", (3,), "stdout", "x").prefix() == "[rank 3]"
    assert OutputLine("A", tuple(range(8)), "stdout", "x").prefix() == "[ranks 0-7]"


MANY = st.lists(st.sampled_from(["same", "other", "r"]), min_size=150, max_size=260)


@given(st.lists(MANY, min_size=2, max_size=3), st.floats(0, WINDOW))
def test_many_lines_of_few_kinds_keep_their_order(printed: list[list[str]], wait: float) -> None:
    folder, lines = Folder(WINDOW), list[OutputLine]()
    for rank, texts in enumerate(printed):
        half = len(texts) // 2
        for part, now in ((texts[:half], 0.0), (texts[half:], wait)):
            folder.add("A", rank, "stdout", "".join(f"{text}{rank if text == 'r' else ''}\n" for text in part), now)
    lines += folder.due(WINDOW)
    lines += folder.due(3 * WINDOW)
    expected = {
        ("A", rank): [("stdout", f"r{rank}" if text == "r" else text) for text in texts]
        for rank, texts in enumerate(printed)
    }
    assert by_rank(lines) == expected
    assert not folder._sources and not folder._queues._waiting


def test_consecutive_blocks_are_merged_and_prefixed() -> None:
    folder = Folder(WINDOW)
    for rank in range(2):
        folder.add("A", rank, "stdout", "one\n", 0)
        folder.add("A", rank, "stdout", "two\n\n", 0.01)
    blocks = merge_blocks(folder.due_blocks(1))
    assert blocks == [Block("A", (0, 1), "stdout", "one\ntwo\n\n")]
    assert blocks[0].prefixed() == "[ranks 0-1] one\n[ranks 0-1] two\n[ranks 0-1] \n"
    assert [line.text for line in blocks[0].lines()] == ["one", "two", ""]


def test_slow_rank_folds_as_far_as_it_printed() -> None:
    folder = Folder(WINDOW)
    folder.add("A", 0, "stdout", "1\n2\n3\n", 0)
    folder.add("A", 1, "stdout", "1\n2\n", 0.05)
    assert folder.due_blocks(WINDOW) == [Block("A", (0, 1), "stdout", "1\n2\n"), Block("A", (0,), "stdout", "3\n")]


def test_equal_long_lines_wait_for_the_rest_of_one() -> None:
    folder, text = Folder(WINDOW), "x" * 200_000
    folder.add("A", 0, "stdout", text + "\n", 0)
    for step in range(5):
        folder.add("A", 1, "stdout", text[step * 40_000 : (step + 1) * 40_000], step * 0.05)
        # The part that came by 0.05 s makes it long.
        if step:
            assert folder.due(step * 0.05 + 0.04) == []
    folder.add("A", 1, "stdout", "\n", 0.25)
    assert folder.due(1) == [OutputLine("A", (0, 1), "stdout", text)]


def test_unfinished_line_is_split_at_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_module, "LINE_LIMIT", 300_000)
    folder = Folder(WINDOW)
    for _ in range(5):
        folder.add("A", 0, "stdout", "x" * 100_000, 0)
    assert [len(line.text) for line in folder.due(1)] == [400_000]
    assert [len(line.text) for line in folder.flush()] == [100_000]


def test_beyond_bound_no_line_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_module, "HELD_LIMIT", 100)
    folder = Folder(WINDOW)
    folder.add("A", 0, "stdout", "x" * 99 + "\n", 0)
    assert folder.due(0.01) == []
    folder.add("A", 0, "stdout", "y\n", 0.01)
    assert len(folder.due(0.01)) == 2


def test_unfinished_lines_can_be_peeked() -> None:
    folder = Folder(WINDOW)
    for rank in range(2):
        folder.add("A", rank, "stderr", "\r5/10", 0)
    folder.add("A", 2, "stderr", "\r4/10", 0)
    assert folder.unfinished("A") == [Block("A", (0, 1), "stderr", "5/10\n"), Block("A", (2,), "stderr", "4/10\n")]
    assert [line.text for line in folder.flush("A")] == ["5/10", "4/10"]
    assert folder.unfinished("A") == []


@pytest.mark.parametrize(
    ("pieces", "streams"),
    [
        (["\r1/2", "\r2/2\n"], ["progress stderr"]),
        (["\r1/2\r2/2\n"], ["progress stderr"]),
        (["\r1/2", "\n"], ["progress stderr"]),
        (["plain\n"], ["stderr"]),
        (["windows\r\n"], ["stderr"]),
        (["\r1/2", "\r   \rlogged\n"], ["stderr"]),
        (["\r1/2", "\r   \r", "logged\n"], ["stderr"]),
        (["\r1/2\r2/2\nplain\n"], ["progress stderr", "stderr"]),
    ],
)
def test_rewritten_lines_have_their_own_stream(pieces: list[str], streams: list[str]) -> None:
    folder = Folder(WINDOW)
    folder.marks_progress = True
    for piece in pieces:
        folder.add("A", 0, "stderr", piece, 0)
    assert [line.stream for line in folder.flush("A")] == streams


def test_shown_unfinished_lines_have_their_own_stream() -> None:
    folder = Folder(WINDOW)
    folder.marks_progress = True
    folder.add("A", 0, "stdout", "part", 0)
    assert folder.unfinished("A") == [Block("A", (0,), "stdout", "part\n")]
    folder.add("A", 0, "stdout", " rest\nnext\n", 0)
    assert [(line.stream, line.text) for line in folder.flush("A")] == [
        ("progress stdout", "part rest"),
        ("stdout", "next"),
    ]


def test_line_that_has_just_begun_is_not_shown_yet() -> None:
    folder = Folder(WINDOW)
    folder.add("A", 0, "stdout", "be", 1.0)
    assert folder.unfinished("A", 0.9) is None
    folder.add("A", 0, "stdout", "gun", 1.2)
    assert folder.unfinished("A", 1.1) == [Block("A", (0,), "stdout", "begun\n")]
    # Once it is shown, its next state is shown at once.
    folder.add("A", 0, "stdout", "\rnext", 1.3)
    assert folder.unfinished("A", 0.5) == [Block("A", (0,), "stdout", "next\n")]


def test_output_that_never_folds_as_a_whole_is_shown_without_end() -> None:
    """Ranks that print some lines alike, for long, while one has an unfinished line."""
    folder = Folder(WINDOW)
    folder.add("A", 2, "stdout", "unfinished", 0.0)
    for number in range(200):
        folder.add("A", 0, "stdout", f"first\nsame {number}\n", float(number))
        folder.add("A", 1, "stdout", f"other\nsame {number}\n", float(number))
        shown = {(line.ranks, line.text) for line in folder.due(number + 2 * WINDOW)}
        assert shown == {((0,), "first"), ((1,), "other"), ((0, 1), f"same {number}")}
