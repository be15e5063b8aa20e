"""Wrong arguments of functions of distributed tensors: each error says what is wrong, where, and what to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import monarch
from monarch.distributed import Mesh
from monarch.exceptions import ArgumentError, AxisError, MeshOpError, PointError


def quantized() -> torch.Tensor:
    make: Any = torch.quantize_per_tensor
    return make(torch.ones(3), 1.0, 0, torch.qint8)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_wrong_values_and_specs_name_the_argument(mesh: Any) -> None:
    plain, x = torch.ones(4, 4), monarch.ones(4, 2, mesh=mesh)
    wrong: Any = "float32"
    with pytest.raises(ArgumentError, match=r"sharding_spec: expected an axis, .* or None for dim 0, got 3"):
        monarch.distribute(plain, mesh, [3, None])
    with pytest.raises(ArgumentError, match=r"a quantized one; use tensor.dequantize\(\)"):
        monarch.distribute(quantized(), mesh)
    with pytest.raises(ArgumentError, match=r"dtype: expected a torch.dtype such as torch.float32, got 'float32'"):
        monarch.zeros(2, mesh=mesh, dtype=wrong)
    with pytest.raises(
        ArgumentError, match=r"dtype: expected a floating-point or complex dtype for randn, got torch.int64"
    ):
        monarch.randn(2, mesh=mesh, dtype=torch.int64)
    with pytest.raises(ArgumentError, match="from_local: expected a function or a rank-local tensor, got list"):
        monarch.from_local([plain], mesh, ["dp", None])  # type: ignore[arg-type]
    with pytest.raises(PointError, match=r"fetch: dp: expected an int such as 0, got slice"):
        monarch.fetch(x, dp=slice(0, 2))  # type: ignore[arg-type]


def test_wrong_sizes_and_meshes_name_the_argument(mesh: Any) -> None:
    wrong: Any = "8"
    with pytest.raises(ArgumentError, match="expected at least one host and device, got hosts='8', gpus=2"):
        monarch.simulate(hosts=wrong, gpus=2)
    with pytest.raises(ArgumentError, match=r"procs: expected a mesh of processes .*, got '8'"):
        Mesh(procs=wrong)
    with pytest.raises(AxisError, match="no axis 2; this mesh has 2: dp, mp"):
        mesh.size(2)
    assert mesh.size(-1) == 2


def test_paths_and_timeouts_of_checkpoints_are_checked(mesh: Any) -> None:
    x, none = monarch.ones(4, mesh=mesh), None
    wrong: Any = none
    with pytest.raises(ArgumentError, match="path: expected the path of a folder, got None"):
        monarch.save({"x": x}, wrong)
    with pytest.raises(ArgumentError, match="path: expected the path of a folder, got None"):
        monarch.load(wrong, {"x": x})
    with pytest.raises(ArgumentError, match="timeout: expected seconds above 0, got None"):
        monarch.save({"x": x}, "checkpoints", timeout=wrong)


def test_rank_local_tensors_are_not_saved_as_that_of_one_rank(mesh: Any, tmp_path: Any) -> None:
    x = monarch.ones(4, mesh=mesh)
    with pytest.raises(ArgumentError, match=r"'own' is a rank-local tensor, which has a different value on each rank"):
        monarch.save({"x": x, "own": mesh.rank_tensor("dp")}, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["reduce", "reduce_", "slice_mesh"])
def test_functions_of_rank_local_tensors_refuse_others(mesh: Any, name: str) -> None:
    function: Any = getattr(monarch, name)
    options = {"dp": 0} if name == "slice_mesh" else {}
    with pytest.raises(
        MeshOpError, match=rf"{name}: expected rank-local tensors, got one that is sharded over .*to_local"
    ):
        function([monarch.ones(4, mesh=mesh, spec=["dp"])], **options)
    with pytest.raises(MeshOpError, match=rf"{name}: expected rank-local tensors, got a plain tensor"):
        function(torch.ones(4), **options)
