"""Regions, against numpy arrays of ranks."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch._core.shapes.extent import Extent
from monarch._core.shapes.mesh_view import MakesViews
from monarch._core.shapes.region import Region
from monarch.exceptions import AxisError, PointError, ShapeError

MESH = Region.full(Extent.of({"hosts": 2, "gpus": 4}))
SIZES = st.dictionaries(st.sampled_from("abcd"), st.integers(1, 6), max_size=4)
BOUNDS = st.none() | st.integers(-8, 8)


def ranks(region: Region) -> np.ndarray[Any, Any]:
    """The base ranks in the shape of the region."""
    return np.array(region.base_ranks(), dtype=int).reshape(region.sizes)


def whole(sizes: dict[str, int]) -> tuple[Region, np.ndarray[Any, Any]]:
    region = Region.full(Extent.of(sizes))
    return region, np.arange(region.nelements).reshape(tuple(sizes.values()))


@st.composite
def slices(draw: st.DrawFn, sizes: dict[str, int]) -> dict[str, int | slice]:
    """An index for some of the axes, none of them out of range or empty."""
    chosen: dict[str, int | slice] = {}
    for label, size in sizes.items():
        kind = draw(st.sampled_from(["all", "one", "some"]))
        if kind == "one":
            chosen[label] = draw(st.integers(-size, size - 1))
        elif kind == "some":
            bounds = slice(draw(BOUNDS), draw(BOUNDS), draw(st.none() | st.integers(1, 4)))
            if len(range(size)[bounds]):
                chosen[label] = bounds
    return chosen


@st.composite
def views(draw: st.DrawFn) -> tuple[Region, np.ndarray[Any, Any]]:
    """A region sliced up to three times, and its expected base ranks."""
    region, array = whole(draw(SIZES))
    for _ in range(draw(st.integers(0, 3))):
        chosen = draw(slices(dict(region.extent)))
        array = array[tuple(chosen.get(label, slice(None)) for label in region.labels)]
        region = region.slice(**chosen)
    return region, array


@given(views())
def test_slice_of_slice_matches_numpy(view: tuple[Region, np.ndarray[Any, Any]]) -> None:
    region, array = view
    assert region.sizes == array.shape
    assert region.ndim == array.ndim
    assert len(region) == region.size() == array.size
    assert region.base_ranks() == array.ravel().tolist()


@given(views())
def test_position_of_is_inverse_of_base_rank(view: tuple[Region, np.ndarray[Any, Any]]) -> None:
    region, array = view
    places = {region.base_rank(position): position for position in range(len(region))}
    assert list(places) == array.ravel().tolist()
    for rank in range(-3, int(array.max()) + 4):
        assert region.position_of(rank) == places.get(rank)


@given(views(), st.data())
def test_split_is_reshape(view: tuple[Region, np.ndarray[Any, Any]], data: st.DataObject) -> None:
    region, array = view
    factors: dict[str, tuple[int, ...]] = {}
    for label, size in region.extent.items():
        outer = data.draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
        factors[label] = (outer, size // outer)
    names = {label: (f"{label}_out", label) for label in factors}
    split = region.split(**names, **{f"{label}_out": counts[0] for label, counts in factors.items()})
    assert split.labels == tuple(name for label in region.labels for name in names[label])
    shape = [count for label in region.labels for count in factors[label]]
    assert np.array_equal(ranks(split), array.reshape(shape))


@given(views())
def test_flatten_is_reshape_where_ranks_are_evenly_spaced(
    view: tuple[Region, np.ndarray[Any, Any]],
) -> None:
    region, array = view
    if len(set(np.diff(array.ravel()).tolist())) <= 1:
        flat = region.flatten("ranks")
        assert flat.labels == ("ranks",)
        assert flat.base_ranks() == array.ravel().tolist()
    else:
        with pytest.raises(ShapeError, match="flatten"):
            region.flatten("ranks")


@given(views())
def test_rename_moves_no_rank(view: tuple[Region, np.ndarray[Any, Any]]) -> None:
    region, array = view
    renamed = region.rename(**{label: f"new_{label}" for label in region.labels})
    assert renamed.labels == tuple(f"new_{label}" for label in region.labels)
    assert np.array_equal(ranks(renamed), array)


@given(views())
def test_region_survives_wire_and_pickling(view: tuple[Region, np.ndarray[Any, Any]]) -> None:
    region, _ = view
    unpacked = Region.unpack([list(part) if isinstance(part, tuple) else part for part in region.pack()])
    assert unpacked == region
    assert hash(unpacked) == hash(region)
    assert pickle.loads(pickle.dumps(region)) == region


def test_two_axes_can_swap_names() -> None:
    assert MESH.rename(hosts="gpus", gpus="hosts").extent == {"gpus": 2, "hosts": 4}


def test_split_infers_the_missing_size() -> None:
    assert MESH.split(gpus=("pairs", "gpus"), pairs=2).extent == {"hosts": 2, "pairs": 2, "gpus": 2}
    assert MESH.split(gpus=("pairs", "side"), side=1).extent == {"hosts": 2, "pairs": 4, "side": 1}
    assert MESH.split(gpus=("a", "b"), a=2, b=2).extent == {"hosts": 2, "a": 2, "b": 2}
    assert MESH.split(gpus=("ranks",)).extent == {"hosts": 2, "ranks": 4}


def test_ranks_of_huge_region_are_not_expanded() -> None:
    huge = Region.full(Extent.of({"a": 10**6, "b": 10**6})).slice(a=slice(1, None, 3), b=7).split(a=("c", "d"), c=3)
    assert huge.position_of(huge.base_rank(300_000)) == 300_000


def test_size_counts_along_axes_it_is_given() -> None:
    assert (MESH.size(), MESH.size("gpus"), MESH.size(["hosts", "gpus"]), MESH.size([])) == (8, 4, 8, 1)


def test_base_ranks_are_computed_once() -> None:
    assert MESH.base_ranks() is MESH.base_ranks()


def test_region_is_immutable() -> None:
    with pytest.raises(AttributeError, match="'offset'"):
        MESH.offset = 1


WRONG: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: MESH.slice(gpu=1), AxisError, "did you mean 'gpus'?"),
    (lambda: MESH.slice(gpus=4), PointError, "4 is out of range along axis 'gpus'"),
    (lambda: MESH.slice(gpus=-5), PointError, "-5 is out of range along axis 'gpus'"),
    (lambda: MESH.slice(gpus=slice(1, 1)), ShapeError, "the range 1:1 of axis 'gpus' is empty"),
    (lambda: MESH.slice(gpus=slice(9, None, 2)), ShapeError, "the range 9::2 of axis 'gpus' is empty"),
    (lambda: MESH.slice(gpus=slice(None, None, -1)), ShapeError, "the range ::-1 of axis 'gpus' needs"),
    (lambda: MESH.slice(gpus=slice(None, None, 0)), ShapeError, "a step of at least 1"),
    (lambda: MESH.slice(gpus=slice("a", None)), ShapeError, "needs int bounds"),
    (lambda: MESH.slice(gpus=[0, 2]), ShapeError, "cannot be sliced with [0, 2]"),  # pyright: ignore
    (lambda: MESH.slice(gpus=None), ShapeError, "cannot be sliced with None"),  # pyright: ignore
    (lambda: MESH.split(gpu=("a", "b"), a=2), AxisError, "did you mean 'gpus'?"),
    (lambda: MESH.split(gpus=("a", "b")), ShapeError, "the size of all but one of a, b"),
    (lambda: MESH.split(gpus=("a", "b"), a=3), ShapeError, "choose sizes that multiply to 4"),
    (lambda: MESH.split(gpus=("a", "b"), a=2, b=4), ShapeError, "choose sizes that multiply to 4"),
    (lambda: MESH.split(gpus=("a", "b"), a=0), ShapeError, "choose sizes that multiply to 4"),
    (lambda: MESH.split(gpus=("a", "b"), a=2, c=2), ShapeError, "c=2 does not match a new axis"),
    (lambda: MESH.split(gpus="ab"), ShapeError, "give the new axes as a tuple"),
    (lambda: MESH.split(gpus=()), ShapeError, "give the new axes as a tuple"),
    (lambda: MESH.slice(gpus=slice(0, 3)).flatten("ranks"), ShapeError, "flatten before slicing"),
    (lambda: MESH.rename(gpu="x"), AxisError, "did you mean 'gpus'?"),
    (lambda: MESH.size("racks"), AxisError, "no axis 'racks'"),
    (lambda: MESH.size(["hosts", "racks"]), AxisError, "no axis 'racks'"),
    (lambda: MESH.base_rank(8), PointError, "no rank 8"),
    (lambda: MESH.base_rank(-1), PointError, "no rank -1"),
]


@pytest.mark.parametrize(("wrong", "kind", "said"), WRONG)
def test_every_error_names_axes_and_problem(wrong: Callable[[], object], kind: type[Exception], said: str) -> None:
    with pytest.raises(kind) as caught:
        wrong()
    assert said in str(caught.value)
    assert "hosts=2, gpus=" in str(caught.value)


def test_duplicate_axis_name_error_lists_axes() -> None:
    for wrong in (lambda: MESH.rename(gpus="hosts"), lambda: MESH.split(gpus=("hosts", "b"), b=1)):
        with pytest.raises(ShapeError, match=r"hosts=2, hosts=4.*must be unique"):
            wrong()


def test_mesh_without_axes_says_so() -> None:
    with pytest.raises(AxisError, match=r"this mesh has no axes \(one point\)"):
        MESH.slice(hosts=0, gpus=0).slice(gpus=0)


@pytest.mark.parametrize(
    "packed",
    [
        (("a",), 0, (2,)),
        (("a",), -1, (2,), (1,)),
        ((), -1, (), ()),
        ((), 0, (), (1,)),
        (("a",), 0, (2,), (0,)),
        (("a", "b"), 0, (2, 3), (2, 1)),
        (("a",), "0", (2,), (1,)),
        (("a",), 0, (2,), ("1",)),
        7,
    ],
)
def test_invalid_packed_region_is_rejected(packed: Any) -> None:
    with pytest.raises(ShapeError):
        Region.unpack(packed)


class Mesh(MakesViews):
    """A minimal mesh."""

    def __init__(self, region: Region) -> None:
        self._region = region

    def _view(self, region: Region) -> Mesh:
        return Mesh(region)


def test_every_mesh_has_methods_that_make_views() -> None:
    mesh = Mesh(MESH)
    view = mesh.slice(gpus=slice(0, 4, 2)).split(gpus=("pairs", "gpus"), pairs=2).rename(hosts="nodes")
    assert isinstance(view, Mesh)
    assert view.extent == {"nodes": 2, "pairs": 2, "gpus": 1}
    assert view.sizes == {"nodes": 2, "pairs": 2, "gpus": 1}
    assert (len(view), view.ndim, view.size("nodes")) == (4, 3, 2)
    assert [dict(point) for point in mesh.slice(hosts=1).coordinates] == [{"gpus": n} for n in range(4)]
    assert mesh.flatten("ranks").sizes == {"ranks": 8}


def test_axis_may_have_the_name_of_an_argument() -> None:
    mesh = Mesh(Region.full(Extent.of({"self": 2, "name": 3, "label": 1})))
    assert mesh.slice(self=0, name=slice(0, 2)).sizes == {"name": 2, "label": 1}
    assert mesh.rename(self="axes").extent.rank_of(axes=1, name=2, label=0) == 5
