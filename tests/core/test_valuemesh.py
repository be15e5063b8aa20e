"""Meshes of values."""

from __future__ import annotations

import pickle
import threading
import time
from typing import Any

import pytest
import torch

from monarch._core.shapes.extent import Extent
from monarch._core.shapes.region import Region
from monarch._core.shapes.value_mesh import Deferred, ValueMesh
from monarch.exceptions import AxisError, PointError, ShapeError

MESH = Extent.of({"hosts": 2, "gpus": 4})


def mesh() -> ValueMesh[int]:
    """The value of each rank is ten times the rank."""
    return ValueMesh(MESH, range(0, 80, 10))


def test_iteration_gives_points_and_values_in_rank_order() -> None:
    assert list(mesh()) == list(mesh().items()) == [(MESH.point(rank), rank * 10) for rank in range(8)]
    assert list(mesh().values()) == list(range(0, 80, 10))
    assert len(mesh()) == 8


def test_value_is_indexed_by_rank_or_point() -> None:
    assert mesh().get(5) == mesh()[5] == mesh()[-3] == mesh().item(hosts=1, gpus=1) == 50
    assert mesh().slice(hosts=1).get(0) == 40
    assert mesh().slice(hosts=1, gpus=2).item() == 60


def test_range_of_ranks_is_mesh_along_one_axis() -> None:
    row = mesh().slice(hosts=1)[1:3]
    assert row.sizes == {"gpus": 2}
    assert list(row.values()) == [50, 60]
    flat = mesh()[1:-1:3]
    assert flat.sizes == {"ranks": 2}
    assert list(flat.values()) == [10, 40]


def test_indexing_by_axes_gives_value_or_mesh() -> None:
    assert mesh()["gpus", 1, "hosts", -1] == mesh()[{"hosts": 1, "gpus": 1}] == 50
    assert mesh()["gpus", 1].sizes == {"hosts": 2}
    assert list(mesh()[{"gpus": 1}].values()) == [10, 50]
    assert list(mesh()["gpus", 2:].values()) == [20, 30, 60, 70]
    assert mesh().slice(hosts=0)["gpus", 2] == 20


def test_views_have_values_of_their_places() -> None:
    view = mesh().split(gpus=("pairs", "gpus"), pairs=2).slice(gpus=1).rename(hosts="nodes")
    assert view.sizes == {"nodes": 2, "pairs": 2}
    assert list(view.values()) == [10, 30, 50, 70]
    assert mesh().flatten("ranks").get(6) == 60


def test_region_stands_for_its_extent() -> None:
    part = Region.full(MESH).slice(gpus=slice(1, 3))
    values = ValueMesh(part, "abcd")
    assert values.extent == {"hosts": 2, "gpus": 2}
    assert values.item(hosts=1, gpus=0) == "c"


def test_deferred_value_is_loaded_on_first_read_and_once() -> None:
    loads: list[int] = []

    def load(rank: int) -> str:
        loads.append(rank)
        return f"value {rank}"

    values = ValueMesh(MESH, [Deferred(lambda rank=rank: load(rank)) for rank in range(8)])
    part, cut = values.slice(hosts=1), values[5:7]
    assert loads == []
    assert part.get(1) == values.get(5) == cut[0] == "value 5"
    assert part[1] is values[5]
    assert loads == [5]
    assert list(values.values()) == [f"value {rank}" for rank in range(8)]
    assert sorted(loads) == list(range(8))


def test_threads_that_read_at_once_load_once() -> None:
    loads: list[int] = []

    def load() -> object:
        loads.append(1)
        time.sleep(0.05)
        return object()

    values = ValueMesh({}, [Deferred(load)])
    found: list[object] = []
    threads = [threading.Thread(target=lambda: found.append(values[0])) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(loads) == 1
    assert len(set(map(id, found))) == 1


def test_load_that_raised_is_retried() -> None:
    answers = [ValueError("not yet"), 7]

    def load() -> int:
        answer = answers.pop(0)
        if isinstance(answer, ValueError):
            raise answer
        return answer

    values = ValueMesh({}, [Deferred(load)])
    with pytest.raises(ValueError, match="not yet"):
        values.get(0)
    assert values.get(0) == 7


def test_pickling_loads_and_carries_only_view() -> None:
    values = ValueMesh(MESH, [Deferred(lambda rank=rank: rank) for rank in range(8)])
    copy = pickle.loads(pickle.dumps(values.slice(gpus=slice(1, None, 2))))
    assert copy.extent == {"hosts": 2, "gpus": 2}
    assert list(copy.values()) == [1, 3, 5, 7]
    big = ValueMesh({"ranks": 2}, [b"x" * 10_000, b"y"])
    assert len(pickle.dumps(big.slice(ranks=1))) < 1000


def test_map_keeps_axes() -> None:
    doubled = mesh().slice(gpus=slice(0, 4, 2)).map(lambda value: value * 2)
    assert doubled.sizes == {"hosts": 2, "gpus": 2}
    assert list(doubled.values()) == [0, 40, 80, 120]


def test_equality_is_identity() -> None:
    one = mesh()
    assert one == one
    assert one != mesh()
    assert len({one, mesh()}) == 2


@pytest.mark.parametrize(
    ("key", "kind", "said"),
    [
        (8, PointError, "no rank 8; this mesh has ranks 0-7 (hosts=2, gpus=4)"),
        (-9, PointError, "no rank -9"),
        (slice(9, None), ShapeError, "the range 9: of axis 'ranks' is empty"),
        (("gpu", 1), AxisError, "no axis 'gpu'; this mesh has hosts=2, gpus=4"),
        ({"gpus": 4}, PointError, "4 is out of range along axis 'gpus'"),
        ("gpus", ShapeError, "a mesh of hosts=2, gpus=4 cannot be indexed by 'gpus'"),
        ((0, 1), ShapeError, "a mesh of hosts=2, gpus=4 cannot be indexed by (0, 1)"),
        (1.5, ShapeError, "cannot be indexed by 1.5"),
    ],
)
def test_invalid_index_error_lists_axes(key: Any, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind) as caught:
        mesh()[key]
    assert said in str(caught.value)


def test_item_needs_every_axis() -> None:
    with pytest.raises(KeyError, match="no coordinate for axis 'gpus'"):
        mesh().item(hosts=0)


def test_value_count_must_match_rank_count() -> None:
    with pytest.raises(ShapeError, match="expected 8 values in rank order for a mesh of hosts=2, gpus=4, got 3"):
        ValueMesh(MESH, [1, 2, 3])


def test_equal_neighbours_are_shown_as_one() -> None:
    assert repr(ValueMesh({"gpus": 8}, [3.5] * 8)) == "ValueMesh(gpus=8)\nranks 0-7: 3.5"
    assert repr(ValueMesh(MESH, [1, 1, 1, 1, 2, 3, 3, 1])).splitlines() == [
        "ValueMesh(hosts=2, gpus=4)",
        "ranks 0-3 (hosts=0):      1",
        "rank 4 (hosts=1, gpus=0): 2",
        "ranks 5-6 (hosts=1):      3",
        "rank 7 (hosts=1, gpus=3): 1",
    ]
    assert repr(ValueMesh({}, ["x"])) == "ValueMesh()\nrank 0: 'x'"


def test_long_values_differing_after_cut_do_not_fold() -> None:
    values = ValueMesh({"gpus": 2}, ["a" * 1000 + "x" + "a" * 1000, "a" * 1000 + "y" + "a" * 1000])
    assert len(repr(values).splitlines()) == 3


def test_thousand_ranks_are_abbreviated() -> None:
    values = ValueMesh({"ranks": 1000}, [f"{rank} {'x' * 500}" for rank in range(1000)])
    lines = repr(values).splitlines()
    assert len(lines) < 40
    assert max(map(len, lines)) < 120
    assert lines[1].startswith("rank 0:")
    assert lines[-1].startswith("rank 999:")
    assert "… 968 more ranks" in lines
    assert len(values._repr_html_()) < 40_000


def test_one_differing_rank_of_thousand_is_shown() -> None:
    values = ValueMesh({"ranks": 1000}, [0] * 417 + [1] + [0] * 582)
    assert repr(values).splitlines()[1:] == ["ranks 0-416:   0", "rank 417:      1", "ranks 418-999: 0"]


def test_omitted_values_are_not_loaded_for_display() -> None:
    loads: list[int] = []

    def load(rank: int) -> int:
        loads.append(rank)
        return rank

    values = ValueMesh({"ranks": 1000}, [Deferred(lambda rank=rank: load(rank)) for rank in range(1000)])
    repr(values)
    assert len(loads) < 50


def test_failing_load_does_not_hide_other_values() -> None:
    def load() -> int:
        raise OSError("the segment is gone")

    text = repr(ValueMesh({"gpus": 2}, [1, Deferred(load)]))
    assert "rank 0: 1" in text
    assert "the segment is gone" in text


def test_html_is_escaped_and_folded() -> None:
    html = ValueMesh(MESH, ["<b>&</b>"] * 8)._repr_html_()
    assert "<b>" not in html
    assert "&lt;b&gt;&amp;&lt;/b&gt;" in html
    assert html.count("<tr>") == 2
    assert "ranks 0-7" in html
    assert "hosts=2, gpus=4" in html


def test_tensors_are_shown_by_shape_dtype_and_statistics() -> None:
    text = repr(ValueMesh({"gpus": 2}, [torch.zeros(100, 100), torch.ones(100, 100)]))
    assert "rank 0: Tensor float32[100, 100], mean 0, std 0, min 0, max 0" in text
    assert "rank 1: Tensor float32[100, 100], mean 1" in text


def test_values_of_a_slice_are_shown_with_ranks_of_their_mesh() -> None:
    mesh = ValueMesh.of(Extent(("procs",), (3,)), ["same", "same", "other"], lambda: [1, 2, 3])
    rows = ["ranks 1-2 at [0:2]: 'same'", "rank 3 at [2]:      'other'"]
    assert repr(mesh).splitlines() == ["ValueMesh(procs=3)", *rows]
    assert "rank 3 at [1]" in repr(mesh[1:]) and "ranks 1-2 at [0:2]" in repr(mesh.map(str.upper))
    strided = ValueMesh.of(Extent(("procs",), (2,)), [7, 7], lambda: [1, 3])
    assert "ranks 1,3 at [0:2]: 7" in repr(strided)
    whole = ValueMesh.of(Extent(("hosts", "gpus"), (2, 2)), [0, 1, 2, 3], lambda: range(4))
    assert "at [" not in repr(whole)
    assert "rank 2 at [0]" in repr(whole.slice(hosts=1)) and "rank 2 at [0]" in repr(whole[2:])
    assert mesh[0] == "same" and pickle.loads(pickle.dumps(mesh)).values() == mesh.values()
