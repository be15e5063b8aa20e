"""Values of cells: ranks cut large ones, and values shown as equal are equal."""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

import pytest

from kernels import Notebook
from monarch._notebook.showing.bounded import ALL, ITEMS, TEXT, bounded
from monarch._notebook.showing.show import bundle_of


@pytest.mark.parametrize(
    "value", [[1, [2, {3}]], {"a": (1, 2)}, "text", list(range(ITEMS)), Counter("abc"), frozenset({1}), None, dict]
)
def test_small_values_are_shown_in_full(value: Any) -> None:
    assert bounded(value) is value


def test_recursive_value_is_shown() -> None:
    value: dict[str, Any] = {}
    value["self"] = value
    assert bounded(value) is value


@pytest.mark.parametrize(
    ("value", "rest"),
    [
        ([1] * 10**6, "999000 more items"),
        (tuple(range(5000)), "4000 more items"),
        (set(range(5000)), "4000 more items"),
        (frozenset(range(5000)), "4000 more items"),
        ({key: key for key in range(5000)}, "4000 more items"),
        ({"a": [list(range(5000))]}, "4000 more items"),
        ({frozenset(range(5000)): 1}, "4000 more items"),
        ("x " * TEXT, f"{TEXT} more characters"),
        ([b"x" * 2 * TEXT], f"{TEXT} more bytes"),
        (deque(range(10**5)), "100000 items in all"),
        (Counter(range(10**5)), "100000 items in all"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_large_values_show_a_part_and_a_count(value: Any, rest: str) -> None:
    text = bundle_of(value)["text/plain"]
    assert rest in text and len(text) < 25_000


def test_many_small_parts_are_bounded_together() -> None:
    assert len(repr(bounded([[1] * 900] * 900))) < 20 * ALL
    inner: list[Any] = []
    inner.append(inner)
    assert "1 items" in repr(bounded([inner] * 5000))


def test_large_cell_value_is_shown_in_part(notebook: Notebook) -> None:
    cell = notebook.mesh("[1] * 10**6").ok()
    assert cell.shown.startswith("[ranks 0-3]") and "… 999000 more items" in cell.shown
    # The digest is only for comparison, not a display format.
    assert all("digest" not in bundle for bundle in cell.bundles)


def test_values_that_differ_in_a_cut_part_are_shown_apart(notebook: Notebook) -> None:
    shown = notebook.mesh("[1] * 5000 + [rank // 2]").ok().shown
    assert "[ranks 0-1]" in shown and "[ranks 2-3]" in shown


def test_out_variable_keeps_its_value_when_the_cell_fails(notebook: Notebook) -> None:
    notebook.mesh("rank * 5", "--out res").ok()
    assert notebook.mesh("undefined", "--out res").status == "error"
    assert notebook.run("list(res.values())").ok().shown == "[0, 5, 10, 15]"
    assert notebook.mesh("1 / rank", "--out res").status == "error"
    assert notebook.run("list(res.values())").ok().shown == "[0, 5, 10, 15]"
