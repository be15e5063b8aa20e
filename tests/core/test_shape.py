"""Shapes, slices of ranks, selections, and the pairs of a mesh of values."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest

import monarch
from monarch import Extent, NDSlice, Selection, Shape, ValueMesh

GRID = NDSlice(offset=0, sizes=[2, 3], strides=[3, 1])
SHAPE = Shape(["x", "y"], GRID)


def test_slice_maps_positions_coordinates_and_ranks() -> None:
    part = NDSlice(offset=5, sizes=[2, 2], strides=[10, 2])
    assert list(part) == [5, 7, 15, 17] and len(part) == 4 and part.ndim == 2
    assert part.nditem([1, 1]) == part[3] == part.get(3) == 17 and part[1:3] == (7, 15)
    assert part.coordinates(15) == [1, 0] and part.index(15) == 2
    assert NDSlice.new_row_major([2, 3]) == GRID and hash(GRID) == hash(NDSlice.new_row_major([2, 3]))
    assert pickle.loads(pickle.dumps(part)) == part


@pytest.mark.parametrize("ranks", [[], [4], [0, 2, 4], [0, 1, 3, 7], [5, 4, 3], [1, 1]])
def test_slices_from_a_list_have_its_ranks_in_order(ranks: list[int]) -> None:
    assert [rank for part in NDSlice.from_list(ranks) for rank in part] == ranks


def test_shape_selects_as_a_mesh_does() -> None:
    row = SHAPE.at("x", 1)
    assert row.labels == ["y"] and row.ndslice == NDSlice(offset=3, sizes=[3], strides=[1]) and str(row) == "{y=3}"
    assert SHAPE.select("y", slice(1, 3)).ranks() == [1, 2, 4, 5] and SHAPE.index(x=1, y=0).ranks() == [3]
    assert SHAPE.coordinates(4) == {"x": 1, "y": 1} and SHAPE.extent == {"x": 2, "y": 3} and len(SHAPE) == 6
    assert Shape.of(SHAPE.region) == SHAPE == pickle.loads(pickle.dumps(SHAPE)) and Shape.unity().ranks() == [0]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: SHAPE.at("z", 0),
        lambda: SHAPE.at("x", 2),
        lambda: SHAPE.at("x", -1),
        lambda: SHAPE.coordinates(9),
        lambda: SHAPE.select("y", slice(2, 2)),
        lambda: Shape(["x"], GRID),
        lambda: NDSlice(offset=0, sizes=[2], strides=[1, 1]),
        lambda: Selection.from_string("(("),
        lambda: Selection.from_string("0:2,"),
        lambda: ValueMesh(SHAPE, [1]),
        lambda: ValueMesh.from_indexed(SHAPE, [(0, 1)]),
    ],
)
def test_wrong_shapes_are_value_errors(wrong: Callable[[], Any]) -> None:
    with pytest.raises(ValueError):
        wrong()


@pytest.mark.parametrize("text", ["*", "?", "3", "0:4", "0:8:2,*", "(*,0:2)|(?,3)", "1 & 2"])
def test_selections_keep_their_text(text: str) -> None:
    assert str(Selection.from_string(text)) == text
    assert str(Selection.all()) == "*" and str(Selection.any()) == "?"


def test_value_meshes_take_shapes_and_indexed_values() -> None:
    mesh = ValueMesh(SHAPE, "abcdef")
    assert mesh.item(x=1, y=1) == "e" and mesh.slice(x=1).values() == ["d", "e", "f"]
    assert ValueMesh.from_indexed(SHAPE, [(5 - rank, rank) for rank in range(6)]).values() == [5, 4, 3, 2, 1, 0]


def test_labels_and_sizes_equal_lists_and_tuples() -> None:
    extent = Extent(["x", "y"], [2, 3])
    assert extent.labels == ["x", "y"] and extent.labels == ("x", "y") and extent.sizes == [2, 3]
    assert extent.labels != ["y", "x"] and hash(extent.labels) == hash(("x", "y"))
    assert pickle.loads(pickle.dumps(extent.labels)) == extent.labels


MISTAKES: dict[str, Callable[[Any], Any]] = {
    "sum": lambda mesh: sum(mesh),
    "max": lambda mesh: max(mesh),
    "min": lambda mesh: min(mesh),
    "sorted": lambda mesh: sorted(mesh),
    "attribute": lambda mesh: [each.loss for each in mesh],
    "twice": lambda mesh: [each * 2 for each in mesh],
    "mean": lambda mesh: [each / 2 for each in mesh],
    "key": lambda mesh: [each["loss"] for each in mesh],
    "format": lambda mesh: [f"{each:.2f}" for each in mesh],
    "float": lambda mesh: [float(each) for each in mesh],
    "compare": lambda mesh: [each > 0 for each in mesh],
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_pairs_taken_for_values_say_so(mistake: Callable[[Any], Any]) -> None:
    with pytest.raises((TypeError, AttributeError), match=r"\.values\(\)"):
        mistake(ValueMesh(SHAPE, range(6)))


def test_pairs_are_tuples_for_everything_else() -> None:
    mesh = ValueMesh(SHAPE, range(6))
    pairs = list(mesh)
    assert pairs == list(mesh.items()) == pickle.loads(pickle.dumps(pairs))
    assert [value for _, value in mesh] == mesh.values() == [pair[1] for pair in mesh] == [0, 1, 2, 3, 4, 5]
    assert dict(mesh)[pairs[4][0]] == 4 and isinstance(pairs[0], tuple) and pairs[0][:1] == (pairs[0][0],)
    assert max(mesh, key=lambda pair: pair[1])[1] == 5 and "0/2" in f"{pairs[0]}"


def test_the_names_are_public() -> None:
    assert {"NDSlice", "Selection", "Shape"} <= set(monarch.__all__)
