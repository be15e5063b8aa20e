"""Making distributed tensors, and getting their values back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import monarch
from monarch.distributed import Mesh
from monarch.exceptions import ArgumentError, AxisError, ShapeError

AXES = st.sampled_from([None, "dp", "mp", "both"])


@st.composite
def sharded(draw: st.DrawFn) -> tuple[list[int], list[Any], list[Any], torch.dtype]:
    """A shape, two specs for it and a dtype."""
    shape = draw(st.lists(st.integers(1, 7), min_size=1, max_size=3))

    def spec() -> list[Any]:
        entries: list[Any] = [None] * len(shape)
        for axis in ("dp", "mp"):
            dim = draw(st.integers(-1, len(shape) - 1))
            if dim >= 0:
                entries[dim] = axis if entries[dim] is None else (entries[dim], axis)
        return entries

    return shape, spec(), spec(), draw(st.sampled_from([torch.float32, torch.int64, torch.bfloat16, torch.bool]))


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sharded())
def test_any_shape_and_spec_goes_there_and_back(mesh: Any, case: Any) -> None:
    shape, spec, other, dtype = case
    value = (torch.arange(numpy.prod(shape)).reshape(shape) % 5).to(dtype)
    tensor = monarch.distribute(value, mesh, spec)
    assert tensor.spec == spec and torch.equal(tensor.full_tensor(), value)
    moved = tensor.redistribute(other)
    assert moved.spec == other and torch.equal(moved.full_tensor(), value)


def test_arrays_and_mapped_files_are_distributed(mesh: Any, tmp_path: Path) -> None:
    array = numpy.arange(24.0).reshape(6, 4)
    assert (monarch.distribute(array, mesh, ["dp", None]).numpy() == array).all()
    torch.save(torch.from_numpy(array), tmp_path / "values.pt")
    mapped = torch.load(tmp_path / "values.pt", mmap=True)
    assert (monarch.distribute(mapped, mesh, [None, "mp"]).numpy() == array).all()
    # torch takes neither negative strides nor another order of bytes.
    assert monarch.distribute(array[::-1], mesh, ["dp", None]).tolist() == array[::-1].tolist()
    assert monarch.distribute(array.astype(">f8"), mesh, ["dp", None]).tolist() == array.tolist()
    for value, why in (
        (torch.eye(2).to_sparse(), "of layout torch.sparse_coo"),
        (torch.eye(2, device="meta"), "on the meta device"),
    ):
        with pytest.raises(ArgumentError, match=f"expected a dense tensor, got one {why}"):
            monarch.distribute(value, mesh, ["dp", None])


def test_arrow_arrays_and_tables_are_distributed(mesh: Any) -> None:
    arrow = pytest.importorskip("pyarrow")
    numbers = arrow.array([1, 2, 3, 4])
    pairs = arrow.FixedSizeListArray.from_arrays(numbers, 2)
    cubes = arrow.FixedShapeTensorArray.from_numpy_ndarray(numpy.arange(16.0).reshape(2, 2, 2, 2))
    halves = arrow.table({"a": arrow.array([1, 2], arrow.float32()), "b": arrow.array([3, 4], arrow.float32())})
    table = arrow.concat_tables([halves, halves])
    rows = [[1, 3], [2, 4], [1, 3], [2, 4]]
    for value, expected in (
        (numbers, [1, 2, 3, 4]),
        (numbers.slice(1, 2), [2, 3]),
        (numbers.dictionary_encode(), [1, 2, 3, 4]),
        (arrow.chunked_array([numbers, numbers]), [1, 2, 3, 4, 1, 2, 3, 4]),
        (pairs, [[1, 2], [3, 4]]),
        (arrow.chunked_array([pairs, pairs]), [[1, 2], [3, 4], [1, 2], [3, 4]]),
        (cubes, numpy.arange(16.0).reshape(2, 2, 2, 2).tolist()),
        (arrow.Tensor.from_numpy(numpy.array(rows)), rows),
        (table, rows),
        (halves.to_batches()[0], rows[:2]),
        (arrow.table({"pairs": pairs}), [[[1, 2]], [[3, 4]]]),
    ):
        tensor = monarch.distribute(value, mesh, ["dp", *[None] * (numpy.ndim(expected) - 1)])
        assert tensor.tolist() == expected
    assert monarch.distribute(table, mesh, ["dp", None]).dtype is torch.float32
    assert monarch.distribute(table.slice(0, 0), mesh, ["dp", None]).shape == (0, 2)
    missing = monarch.distribute(arrow.array([1.0, None]), mesh, ["dp"]).tolist()
    assert missing[0] == 1 and missing[1] != missing[1]


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda a: a.table({"x": [1.0], "y": [1]}), "'x' of double and 'y' of int64; convert them with table.cast"),
        (lambda a: a.table({"x": [1, None]}), "1 values of type int64 are missing in column 'x'; fill them"),
        (lambda a: a.table({"x": ["a"]}), "got values of type string in column 'x'"),
        (lambda a: a.table({}), "the table has no columns"),
        (lambda a: a.table({"x": [1]}).to_reader(), "got RecordBatchReader; convert it first"),
        (lambda a: a.array([[1.0, 2.0], None], a.list_(a.float64(), 2)), r"1 values of type fixed_size_list.* missing"),
        (lambda a: a.array([1, None]).dictionary_encode(), "1 values of type int64 are missing; fill"),
        (lambda a: a.array([[1], [2, 3]]), "got values of type list<item: int64>; convert them with cast"),
        (lambda a: a.SparseCOOTensor.from_dense_numpy(numpy.eye(2)), "expected dense values, got SparseCOOTensor"),
    ],
)
def test_values_of_arrow_that_are_no_numbers_are_refused(mesh: Any, make: Any, why: str) -> None:
    value = make(pytest.importorskip("pyarrow"))
    with pytest.raises(ArgumentError, match=why):
        monarch.distribute(value, mesh)


def test_tensors_are_made_on_the_ranks(mesh: Any) -> None:
    assert torch.equal(monarch.zeros(5, 3, mesh=mesh, spec=["dp", None]).full_tensor(), torch.zeros(5, 3))
    assert torch.equal(monarch.ones((4,), mesh=mesh, spec=["mp"], dtype=torch.int32).full_tensor(), torch.ones(4).int())
    assert torch.equal(monarch.full((3, 5), 7, mesh=mesh, spec=[None, "dp"]).full_tensor(), torch.full((3, 5), 7))
    for arguments in ((11,), (3, 20, 4), (0, 1, 0.125)):
        tensor = monarch.arange(*arguments, mesh=mesh, spec=[("dp", "mp")])
        assert torch.equal(tensor.full_tensor(), torch.arange(*arguments))
    assert monarch.empty(2, 2, mesh=mesh).shape == (2, 2)


@pytest.mark.parametrize("make", [monarch.rand, monarch.randn])
def test_drawn_tensors_do_not_depend_on_the_spec(mesh: Any, make: Any) -> None:
    drawn: list[torch.Tensor] = []
    for spec in (None, ["dp", None, None], [None, "mp", "dp"], [("dp", "mp"), None, None]):
        torch.manual_seed(5)
        drawn.append(make(70, 33, 41, mesh=mesh, spec=spec).full_tensor())
    assert all(torch.equal(each, drawn[0]) for each in drawn)
    assert abs(drawn[0].mean().item() - (0.5 if make is monarch.rand else 0)) < 0.02
    assert drawn[0].unique().numel() > 0.9 * drawn[0].numel() or make is monarch.rand


def test_parts_are_made_by_a_function_on_ranks(mesh: Any) -> None:
    tensor = monarch.from_local(lambda: torch.full((2, 3), float(monarch.current_rank()["dp"])), mesh, ["dp", None])
    assert tensor.shape == (4, 3) and tensor.sum(1).tolist() == [0, 0, 3, 3]
    with pytest.raises(ShapeError, match="rank 0 made a shard of shape"):
        monarch.from_local(lambda: torch.ones(2 + 3 * monarch.current_rank()["dp"]), mesh, ["dp"])


def test_fetch_returns_the_part_of_a_rank(mesh: Any) -> None:
    value = torch.arange(24.0).reshape(6, 4)
    tensor = monarch.distribute(value, mesh, ["dp", "mp"])
    assert torch.equal(monarch.fetch(tensor, dp=1, mp=0), value[3:, :2])
    assert torch.equal(monarch.fetch(tensor, mp=1), value[:3, 2:])
    assert torch.equal(monarch.fetch(tensor), value)
    with pytest.raises(AxisError, match="no axis 'gpus'"):
        monarch.fetch(tensor, gpus=1)


def test_functions_get_the_parts_of_their_rank(mesh: Any) -> None:
    tensor = monarch.distribute(torch.arange(8.0), mesh, ["dp"]) * 10
    sums = mesh.execute(lambda part, factor: part.sum().item() * factor, tensor, factor=2)
    assert sums.values() == [120, 120, 440, 440]
    assert mesh.execute(lambda x: x * 2, 4).values() == [8] * 4


def test_slices_and_process_meshes_hold_tensors(mesh: Any, procs: Any) -> None:
    part = mesh.slice(dp=1)
    assert part.size() == 2 and mesh.size("dp") == 2
    tensor = monarch.distribute(torch.arange(4.0), part, ["mp"])
    assert tensor.mesh == part and (tensor * 2).sum().item() == 12
    other = procs({"gpus": 2})
    assert monarch.ones(4, mesh=other, spec=["gpus"]).sum().item() == 4


def test_wrong_meshes_and_shapes_are_named() -> None:
    with pytest.raises(ArgumentError, match="expected a Mesh"):
        monarch.zeros(2, mesh=None)
    with pytest.raises(ArgumentError, match="expected 2 names"):
        Mesh(shape=(2, 2), mesh_dim_names=("dp",))
    with pytest.raises(ArgumentError, match="distinct names"):
        Mesh(shape=(2, 2), mesh_dim_names=("dp", "dp"))
    with pytest.raises(ArgumentError, match="positive sizes"):
        Mesh(shape=(0, 2))
