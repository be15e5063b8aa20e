"""Selection texts: they select the same members again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch._core.shapes.extent import Extent
from monarch._core.shapes.ranks import parse_ranks
from monarch._core.shapes.region import Region
from monarch._core.shapes.selection import called, selection

SIZES = st.dictionaries(st.sampled_from("abcd"), st.integers(1, 5), max_size=4)
MESH = Region.full(Extent.of({"hosts": 2, "gpus": 4}))


def read(text: str) -> dict[str, int | slice]:
    """Return the axes of a text, as ``slice`` takes them."""
    axes: dict[str, int | slice] = {}
    for part in text.split(", ") if text else ():
        label, _, what = part.partition("=")
        numbers = [int(number) for number in what.split(":")]
        axes[label] = slice(*numbers) if len(numbers) > 1 else numbers[0]
    return axes


@st.composite
def views(draw: st.DrawFn) -> tuple[Region, Region]:
    """A mesh and a view that was sliced from it several times."""
    whole = part = Region.full(Extent.of(draw(SIZES)))
    for _ in range(draw(st.integers(0, 3))):
        for label in part.labels:
            size = part.extent[label]
            first = draw(st.integers(0, size - 1))
            if draw(st.booleans()):
                part = part.slice(**{label: first})
            else:
                last, step = draw(st.integers(first + 1, size)), draw(st.integers(1, 3))
                part = part.slice(**{label: slice(first, last, step)})
    return whole, part


@given(views())
def test_selection_text_selects_the_same_members(both: tuple[Region, Region]) -> None:
    whole, part = both
    assert whole.slice(**read(selection(whole, part))).base_ranks() == part.base_ranks()


@given(views(), st.data())
def test_selection_of_view_is_relative_to_it(both: tuple[Region, Region], data: st.DataObject) -> None:
    _, whole = both
    members = whole.base_ranks()
    first, count, stride = data.draw(st.tuples(st.sampled_from(members), st.integers(1, 20), st.integers(1, 5)))
    part = Region(("all",), first, (count,), (stride,))
    there = [rank for rank in part.base_ranks() if rank in members]
    text = selection(whole, part)
    if text.startswith("rank"):
        assert [members[rank] for rank in parse_ranks(text.split()[1])] == there
    else:
        assert whole.slice(**read(text)).base_ranks() == there


@pytest.mark.parametrize(
    ("part", "text"),
    [
        (MESH, "m"),
        (MESH.slice(gpus=1), "m[gpus=1]"),
        (MESH.slice(hosts=1, gpus=slice(1, 3)), "m[hosts=1, gpus=1:3]"),
        (MESH.slice(gpus=slice(0, 4, 2)), "m[gpus=0:3:2]"),
        (MESH.flatten("all"), "m"),
        (MESH.rename(gpus="x").slice(x=3), "m[gpus=3]"),
        (MESH.flatten("all").slice(all=slice(3, 6)), "m[ranks 3-5]"),
        (MESH.split(gpus=("a", "b"), a=2).slice(a=1), "m[gpus=2:4]"),
    ],
)
def test_selection_text_of_views(part: Region, text: str) -> None:
    assert called("m", MESH, part) == text


def test_selection_of_removed_members_is_gone() -> None:
    assert selection(Region.full(Extent.of({"gpus": 2})), Region.full(Extent.of({"gpus": 4})).slice(gpus=3)) == "gone"
