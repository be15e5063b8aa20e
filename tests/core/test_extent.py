"""Extents and points."""

from __future__ import annotations

import copy
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch._core.shapes.extent import Extent, Point
from monarch.exceptions import AxisError, MonarchError, PointError, ShapeError

MESH = Extent(["hosts", "gpus"], [2, 4])
SIZES = st.dictionaries(st.sampled_from("abcde"), st.integers(1, 5), max_size=4)


def test_extent_is_mapping_of_label_to_size() -> None:
    assert dict(MESH) == {"hosts": 2, "gpus": 4}
    assert (MESH.labels, MESH.sizes, MESH.nelements) == (("hosts", "gpus"), (2, 4), 8)
    assert MESH["gpus"] == 4
    assert "hosts" in MESH
    assert "racks" not in MESH
    assert MESH.get("racks") is None
    assert repr(MESH) == "{'hosts': 2, 'gpus': 4}"


def test_extents_are_equal_if_their_axes_are_in_same_order() -> None:
    same = Extent.of({"hosts": 2, "gpus": 4})
    assert same == MESH
    assert hash(same) == hash(MESH)
    assert Extent.of({"gpus": 4, "hosts": 2}) != MESH
    assert MESH == {"hosts": 2, "gpus": 4}
    assert MESH != {"hosts": 2}


def test_extent_of_no_axes_has_one_point() -> None:
    point = Extent.of({}).point(0)
    assert (point.rank, dict(point), repr(point)) == (0, {}, "{}")


def test_point_shows_each_coordinate_beside_its_size() -> None:
    assert repr(MESH.point(1)) == "{'hosts': 0/2, 'gpus': 1/4}"


def test_point_unpacks_as_keyword_arguments() -> None:
    def place(hosts: int, gpus: int) -> tuple[int, int]:
        return hosts, gpus

    point = MESH.point(6)
    assert place(**point) == (1, 2)
    assert point.size("gpus") == 4
    assert point.extent is MESH
    assert point == {"hosts": 1, "gpus": 2}


def test_points_are_equal_if_rank_and_extent_are() -> None:
    assert MESH.point(3) == Point(3, Extent.of({"hosts": 2, "gpus": 4}))
    assert hash(MESH.point(3)) == hash(Point(3, Extent.of({"hosts": 2, "gpus": 4})))
    assert MESH.point(3) != MESH.point(2)
    assert MESH.point(3) != Point(3, Extent.of({"ranks": 8}))


@given(SIZES)
def test_rank_of_is_inverse_of_point(sizes: dict[str, int]) -> None:
    extent = Extent.of(sizes)
    assert [extent.rank_of(**extent.point(rank)) for rank in range(extent.nelements)] == list(range(extent.nelements))


def test_negative_coordinates_count_from_end() -> None:
    assert MESH.rank_of(hosts=-1, gpus=-2) == 6


@given(SIZES)
def test_extents_and_points_survive_pickling_and_copying(sizes: dict[str, int]) -> None:
    extent = Extent.of(sizes)
    last = extent.point(extent.nelements - 1)
    assert pickle.loads(pickle.dumps(extent)) == extent
    assert pickle.loads(pickle.dumps(last)) == last
    assert copy.deepcopy(last) == last


def test_many_pickled_points_share_their_extent() -> None:
    points = [MESH.point(rank) for rank in range(8)]
    assert len(pickle.dumps(points)) < len(pickle.dumps(points[0])) + 8 * 20


def test_extents_and_points_are_immutable() -> None:
    with pytest.raises(AttributeError, match="'sizes'"):
        MESH.sizes = (1,)
    with pytest.raises(AttributeError, match="'rank'"):
        del MESH.point(0).rank


@pytest.mark.parametrize(
    ("labels", "sizes", "said"),
    [
        (["hosts", "gpus"], [2], "['hosts', 'gpus'] do not fit sizes [2]"),
        (["hosts", "hosts"], [2, 3], "hosts=2, hosts=3 cannot be the axes of a mesh; axis names must be unique"),
        (["hosts", "my gpus"], [2, 3], "hosts=2, my gpus=3 cannot be the axes of a mesh; 'my gpus'"),
        ([""], [2], "'' cannot name an axis"),
        ([3], [2], "3 cannot name an axis"),
        (["hosts", "gpus"], [2, 0], "hosts=2, gpus=0 cannot be the axes of a mesh; the size of axis 'gpus'"),
        (["gpus"], [-1], "at least 1"),
        (["gpus"], [2.0], "must be an int"),
        ("ab", [1, 2], "write ['ab']"),
    ],
)
def test_invalid_extent_is_rejected(labels: list[str], sizes: list[int], said: str) -> None:
    with pytest.raises(ShapeError) as caught:
        Extent(labels, sizes)
    assert said in str(caught.value)


def test_unknown_axis_error_lists_axes_and_nearest() -> None:
    for wrong in (lambda: MESH["gpu"], lambda: MESH.point(0)["gpu"], lambda: MESH.rank_of(gpu=1)):
        with pytest.raises(AxisError) as caught:
            wrong()
        text = "no axis 'gpu'; this mesh has hosts=2, gpus=4 (did you mean 'gpus'?)"
        assert str(caught.value) == text
        assert isinstance(caught.value, (MonarchError, KeyError, TypeError))


def test_missing_axis_error_lists_axes() -> None:
    with pytest.raises(AxisError, match=r"no coordinate for axis 'gpus'.*hosts=2, gpus=4"):
        MESH.rank_of(hosts=1)


@pytest.mark.parametrize("rank", [-1, 8])
def test_rank_out_of_range_error_lists_axes(rank: int) -> None:
    with pytest.raises(PointError, match=rf"no rank {rank}; this mesh has ranks 0-7 \(hosts=2, gpus=4\)"):
        MESH.point(rank)


@pytest.mark.parametrize("gpus", [4, -5])
def test_coordinate_out_of_range_error_lists_axes(gpus: int) -> None:
    with pytest.raises(PointError, match=f"{gpus} is out of range along axis 'gpus'.*hosts=2, gpus=4"):
        MESH.rank_of(hosts=0, gpus=gpus)
