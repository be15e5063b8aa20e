"""Tables, and values in their cells."""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from monarch._core.text.tables import html_table, same_value, text_table, value_text

HEADERS = ["ranks", "host", "pid"]
ROWS: list[tuple[object, ...]] = [("0-3", "alpha", 17), ("4-7", "b", 4321)]
CELLS = st.none() | st.integers() | st.text(max_size=12) | st.floats()


class Cells(HTMLParser):
    """Collects the texts of table cells, and how often each tag was opened and closed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.opened: list[str] = []
        self.closed: list[str] = []
        self.caption = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.opened.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        self.closed.append(tag)

    def handle_data(self, data: str) -> None:
        if self.opened[-1] == "caption":
            self.caption += data
        else:
            self.rows[-1][-1] += data


def test_columns_are_aligned_with_numbers_to_right() -> None:
    assert text_table(HEADERS, ROWS).splitlines() == [
        "ranks  host    pid",
        "0-3    alpha    17",
        "4-7    b      4321",
    ]


def test_table_may_have_no_headers_and_short_rows() -> None:
    assert text_table([], [("a", "b"), ("ccc", None)]) == "a    b\nccc"
    assert text_table(["x", "y", "z"], [("a", "b"), ("c", "d")]) == "x  y  z\na  b\nc  d"
    assert text_table([], []) == ""


def test_row_of_one_cell_spans_columns() -> None:
    assert text_table(["a", "b"], [("1", "2"), ("a long remark",)]) == "a  b\n1  2\na long remark"
    assert 'colspan="2"' in html_table(["a", "b"], [("1", "2"), ("a long remark",)])


@pytest.mark.parametrize(("limit", "first", "last"), [(4, 2, 2), (5, 3, 2), (1, 1, 0), (0, 0, 0)])
def test_long_table_is_cut_in_the_middle(limit: int, first: int, last: int) -> None:
    lines = text_table(["n"], [(n,) for n in range(100)], limit).splitlines()
    assert [line.strip() for line in lines[1 : 1 + first]] == [str(n) for n in range(first)]
    assert lines[1 + first] == f"… {100 - limit} more rows"
    assert [line.strip() for line in lines[2 + first :]] == [str(n) for n in range(100 - last, 100)]


def test_table_below_limit_is_not_cut() -> None:
    assert "more" not in text_table(["n"], [(n,) for n in range(40)])


def test_cell_is_one_short_line() -> None:
    table = text_table(["x"], [("a\nb\x1b[31mc",), ("y" * 10_000,)])
    assert table.splitlines()[1] == "a b [31mc"
    assert len(table.splitlines()) == 3
    assert max(map(len, table.splitlines())) <= 100


def test_html_is_escaped() -> None:
    html = html_table(["<th>"], [("<script>alert(1)</script>",)], title="a & <b>")
    assert "<script" not in html
    found = Cells(html)
    assert found.rows == [["<th>"], ["<script>alert(1)</script>"]]
    assert found.caption == "a & <b>"


def test_html_sets_no_colors() -> None:
    html = html_table(HEADERS, ROWS)
    assert "color:inherit" in html
    assert "#" not in html
    assert "<style" not in html


@given(st.lists(st.lists(CELLS, min_size=2, max_size=2), max_size=6), st.text(max_size=8))
def test_table_has_the_size_of_its_cells(rows: list[list[Any]], title: str) -> None:
    assert len(text_table(["a", "b"], rows).split("\n")) == 1 + len(rows)
    found = Cells(html_table(["a", "b"], rows, title=title))
    assert [len(row) for row in found.rows] == [2] * (1 + len(rows))
    assert sorted(found.opened) == sorted(found.closed)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3.5, "3.5"),
        (None, "None"),
        ("a\nb", r"'a\nb'"),
        ([1, "x"], "[1, 'x']"),
        (torch.tensor(3.0), "Tensor float32[] = 3"),
        (torch.tensor([1, 2]), "Tensor int64[2] = [1, 2]"),
        (torch.zeros(2, 3), "Tensor float32[2, 3], mean 0, std 0, min 0, max 0"),
        (torch.zeros(0, 3), "Tensor float32[0, 3]"),
        (torch.ones(10, dtype=torch.bool), "Tensor bool[10], 10 of 10 True"),
        (torch.zeros(10, dtype=torch.complex64), "Tensor complex64[10]"),
        (torch.zeros(10, device="meta"), "Tensor float32[10] on meta"),
        (torch.nn.Parameter(torch.ones(8)), "Parameter float32[8], mean 1, std 0, min 1, max 1"),
        (np.arange(10), "ndarray int64[10], mean 4.5, std 2.872, min 0, max 9"),
        (np.array(["x"] * 10), "ndarray <U1[10]"),
        (np.array([1.0] * 8 + [np.nan]), "ndarray float64[9], mean 1, std 0, min 1, max 1, 1 non-finite"),
        (torch.eye(3).to_sparse(), "Tensor float32[3, 3], sparse_coo"),
        (torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)]), "Tensor float32[2, *, 3], nested"),
        (torch.nested.nested_tensor([torch.ones(2)] * 2, layout=torch.jagged), "NestedTensor float32[2, 2], nested"),
        (torch.quantize_per_tensor(torch.ones(2), 0.5, 0, torch.qint8), "Tensor qint8[2] = [1, 1]"),
        ({"w": torch.zeros(9)}, "{'w': Tensor float32[9], mean 0, std 0, min 0, max 0}"),
    ],
)
def test_value_is_shown_in_one_line(value: object, text: str) -> None:
    assert value_text(value) == text


@pytest.mark.parametrize(
    "value", ["x" * 10**6, list(range(10**6)), {n: [n] * 1000 for n in range(100)}, 10**500, b"x" * 10**6]
)
def test_long_value_is_cut(value: object) -> None:
    text = value_text(value)
    assert len(text) <= 100
    assert "..." in text or "…" in text


def test_tensor_subclass_is_not_computed_with() -> None:
    class Spread(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "__get__" not in repr(func):
                raise AssertionError(f"computed {func}")
            return super().__torch_function__(func, types, args, kwargs or {})

    assert value_text(torch.zeros(100).as_subclass(Spread)) == "Spread float32[100]"


def test_value_with_raising_repr_is_shown() -> None:
    class Broken:
        def __repr__(self) -> str:
            raise RuntimeError("no")

    assert "Broken" in value_text(Broken())
    assert "Broken" in value_text([Broken()])


def test_class_named_like_builtin_uses_its_own_repr() -> None:
    kind = type("deque", (), {"__repr__": lambda self: "mine"})  # pyright: ignore
    assert value_text(kind()) == "mine"


def test_values_are_shown_without_importing_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    value_text([1.5, np.ones(3)])
    assert "torch" not in sys.modules


def test_values_with_equal_text_may_differ() -> None:
    one, other = list(range(1000)), [*range(999), 0]
    text = value_text(one)
    assert text == value_text(other)
    assert same_value(one, list(range(1000)), text)
    assert not same_value(one, other, text)
    assert same_value(float("nan"), float("nan"), "nan")
    assert not same_value(True, np.True_, "True")


def test_comparing_runs_no_code_of_values() -> None:
    class Never:
        def __eq__(self, other: object) -> bool:
            raise AssertionError("compared")

        def __repr__(self) -> str:
            return "y" * 1000

    text = value_text([Never()])
    assert not same_value([Never()], [Never()], text)
