"""Rendering of results and errors of several ranks."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from monarch._notebook.running.execute import CellError, CellResult
from monarch.exceptions import MonarchError, SupervisionError
from monarch_kernel.calls.caused_errors import followed
from monarch_kernel.calls.cell_run import _reason
from monarch_kernel.output.bundles import Bundle, bundles_of_ranks, grouped
from monarch_kernel.output.cell_errors import MeshCellError, error_lines


def bundle_of_ranks(bundles: list[tuple[int, Bundle]], total: int) -> Bundle | None:
    """Return the one output for the values of ranks."""
    shown = bundles_of_ranks(bundles, total)
    assert len(shown) <= 1
    return shown[0] if shown else None


def result(text: str, **more: Any) -> Bundle:
    """Return the bundle of a text."""
    return {"text/plain": text, **more}


def tagged(rank: int, bundle: Bundle) -> Bundle:
    """Return the bundle of one rank."""
    shown = bundle_of_ranks([(rank, bundle)], 4)
    assert shown is not None
    return shown


def failure(kind: str = "KeyError", text: str = "'x'", line: int = 2, source: str = "d['x']") -> CellError:
    return CellError(kind, text, line, source, f"Traceback: {kind}: {text}", False)


def test_equal_results_form_one_group() -> None:
    groups = grouped([(0, result("1")), (1, result("2")), (2, result("1"))])
    assert [(group.ranks, group.bundle) for group in groups] == [([0, 2], result("1")), ([1], result("2"))]


def test_results_with_one_different_form_are_two_groups() -> None:
    groups = grouped([(0, result("x", **{"text/html": "<b>1</b>"})), (1, result("x", **{"text/html": "<b>2</b>"}))])
    assert [group.ranks for group in groups] == [[0], [1]]


def test_no_results_show_nothing() -> None:
    assert bundle_of_ranks([], 2) is None


def test_equal_results_are_shown_once_with_their_ranks() -> None:
    bundle = bundle_of_ranks([(rank, result("{'a': 1}")) for rank in range(8)], 8)
    assert bundle is not None
    assert bundle["text/plain"].count("{'a': 1}") == 1 and "ranks 0-7" in bundle["text/plain"]
    assert bundle["text/html"].count("&#x27;a&#x27;") == 1


def test_picture_stands_below_its_ranks() -> None:
    page = tagged(2, result("<Figure>", **{"image/png": "AAAA"}))["text/html"]
    assert re.search(r"rank 2</span><div><img [^>]*AAAA'/></div>", page)


def test_unequal_results_are_shown_side_by_side() -> None:
    bundle = bundle_of_ranks([(0, result("a")), (1, result("b")), (2, result("a"))], 3)
    assert bundle is not None
    assert bundle["text/plain"].splitlines() == ["[ranks 0,2] a", "[rank 1] b"]
    assert "flex" in bundle["text/html"] and "rank 1" in bundle["text/html"]


def test_multiline_results_start_below_their_label() -> None:
    bundle = bundle_of_ranks([(0, result("a\nb"))], 1)
    assert bundle is not None and bundle["text/plain"] == "[rank 0]\na\nb"


def test_html_of_many_different_results_is_bounded() -> None:
    bundle = bundle_of_ranks([(rank, result(str(rank))) for rank in range(300)], 300)
    assert bundle is not None
    assert "236 more" in bundle["text/html"] and len(bundle["text/plain"].splitlines()) == 300


@pytest.mark.parametrize("text", ["<script>alert(1)</script>", "a & b", "'\"<>&"])
def test_text_is_escaped_in_html(text: str) -> None:
    for bundle in (bundle_of_ranks([(0, result(text))], 1), bundle_of_ranks(
        [(0, result(text)), (1, result("other"))], 2
    ), tagged(3, {"text/plain": text})):  # fmt: skip
        assert bundle is not None
        assert text in bundle["text/plain"]
        page = bundle["text/html"]
        assert text not in page and "<script" not in page


def test_html_and_pictures_of_ranks_are_kept() -> None:
    assert "<b>bold</b>" in tagged(1, {"text/plain": "b", "text/html": "<b>bold</b>"})["text/html"]
    page = tagged(1, {"text/plain": "figure", "image/png": "QUJD"})["text/html"]
    assert "data:image/png;base64,QUJD" in page and "rank 1" in page
    assert "<svg/>" in tagged(1, {"text/plain": "figure", "image/svg+xml": "<svg/>"})["text/html"]


def test_bundle_without_text_is_shown() -> None:
    assert tagged(0, {"text/html": "<i>x</i>"})["text/plain"].startswith("[rank 0]")


def test_equal_errors_are_one_line() -> None:
    lines = error_lines("cell [12]", {rank: failure() for rank in range(7)} | {7: failure("ValueError", "bad", 5)}, 8)
    assert lines[0] == "cell [12] failed on all 8 ranks"
    assert any("ranks 0-6" in line and "KeyError: 'x'" in line for line in lines)
    assert any("rank 7" in line and "ValueError: bad" in line for line in lines)
    assert [line.strip() for line in lines if "d['x']" in line] == [f"cell [12] line {line}: d['x']" for line in (2, 5)]


def test_error_names_the_rank() -> None:
    assert error_lines("cell [1]", {3: failure()}, 4)[0] == "cell [1] failed on rank 3"


def test_reason_of_a_missing_result_is_never_empty() -> None:
    """A text is shown as it is; that of a mesh failure is in a field, without the name of the internal call."""
    assert _reason(SupervisionError("cells.run() failed: m has no supervisor", reason="m has no supervisor")) == (
        "m has no supervisor"
    )
    assert _reason(MonarchError("no room for the results\nmore")) == "no room for the results"


@pytest.mark.parametrize("text", ["", "\n", "\nmore", "one\ntwo"])
def test_error_texts_of_any_form_are_shown(text: str) -> None:
    lines = error_lines("cell [1]", {0: failure("AssertionError", text, 0, "")}, 1)
    assert lines[1].strip().startswith("rank 0: AssertionError")
    assert not lines[1].rstrip().endswith(":")


def test_cell_error_has_errors_and_results() -> None:
    error = MeshCellError("cell [3]", {2: failure(), 1: failure("OSError", "no", 1)}, 4, "results")
    assert error.results == "results" and set(error.errors) == {1, 2}
    shown = "\n".join(error._render_traceback_())
    assert shown.startswith("MeshCellError: cell [3] failed on ranks 1-2")
    assert "Traceback of rank 1" in shown and "OSError: no" in shown


@pytest.mark.parametrize("cause", ["error", "interrupt", None])
def test_broken_collective_follows_from_failed_ranks(cause: str | None) -> None:
    broken = replace(failure("RuntimeError", "gloo: Connection closed by peer"), broken=True)
    errors = {0: broken, 1: replace(failure(), interrupted=cause == "interrupt") if cause else broken}
    outcomes = followed({rank: CellResult(None, None, error, 0.0) for rank, error in errors.items()})
    lines = error_lines("cell [1]", {rank: each.error for rank, each in outcomes.items() if each.error}, 2)
    if cause is None:
        assert lines[0] == "cell [1] failed on all 2 ranks" and "Connection closed by peer" in lines[1]
    else:
        assert lines[0] == "cell [1] failed on rank 1; rank 0 waited for it in a collective"
        assert "rank 0: GroupError: a connection of the collective was closed because rank 1 has failed" in lines[-2]
