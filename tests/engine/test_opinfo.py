"""torch's own samples: all that its DTensor computes on divided tensors, tensors of a mesh compute too."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import monarch
import opinfo
from monarch.distributed import Mesh

pytest.importorskip("expecttest", reason="torch's samples of ops need expecttest")

KNOWN = Path(__file__).with_name("unsupported_ops.json")
"""What does not run, by cause. ``MONARCH_WRITE_OPS=1`` writes it again."""
FEW = ["add", "matmul", "sum", "softmax_", "cumsum", "cat", "nn_functional_linear", "squeeze", "fft_hfft", "fft_rfft"]
"""Ops of the quick test."""
PARTS = 8
"""Tests of all ops on a mesh."""


@pytest.fixture(scope="module")
def meshes() -> Iterator[Callable[[int], Any]]:
    made = {ndim: Mesh(shape=(2,) * ndim, mesh_dim_names=("dp", "mp")[:ndim]) for ndim in (1, 2)}
    for mesh in made.values():
        assert mesh.execute(len, "ready").values()
    yield made.__getitem__
    for mesh in made.values():
        mesh.stop().get(30)


def whole(tensor: Any) -> Any:
    return tensor.full_tensor() if isinstance(tensor, monarch.Tensor) else tensor


def compared(mesh: Any, name: str) -> tuple[list[str], dict[str, str]]:
    """Return what only DTensor computes, and the cause of what neither does, by sample."""
    by_dtensor = {tuple(each[:2]): each[2] for each in mesh.execute(opinfo.by_dtensor, name).values()[0]}
    missing: list[str] = []
    neither: dict[str, str] = {}

    def distribute(tensor: Any, placements: Any) -> Any:
        return monarch.distribute(tensor, mesh, placements)

    for at, division, found in opinfo.outcomes(name, mesh.ndim, distribute, whole):
        if found in ("ok", "no sample"):
            continue
        if by_dtensor[at, division] == "ok":
            missing.append(f"{name}, sample {at}, {division}: {found}")
        else:
            neither[f"{at}, {division}"] = found
    return missing, neither


@pytest.mark.parametrize("ndim", [1, 2])
def test_ops_that_dtensor_computes_compute_here(meshes: Callable[[int], Any], ndim: int) -> None:
    for name in opinfo.ops():
        if name in FEW:
            missing, _ = compared(meshes(ndim), name)
            assert not missing, "\n".join(missing)


@pytest.mark.slow
@pytest.mark.skipif("MONARCH_ALL_OPS" not in os.environ, reason="takes an hour: make test-ops")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("ndim", [1, 2])
@pytest.mark.parametrize("part", range(PARTS))
def test_all_ops_that_dtensor_computes_compute_here(meshes: Callable[[int], Any], ndim: int, part: int) -> None:
    missing: list[str] = []
    causes: dict[str, list[str]] = {}
    for name in list(opinfo.ops())[part::PARTS]:
        wrong, neither = compared(meshes(ndim), name)
        missing += wrong
        for cause in sorted({opinfo.cause_of(found) for found in neither.values()}):
            causes.setdefault(cause, []).append(name)
    for cause, names in sorted(causes.items()):
        print(f"{cause}: {', '.join(names)}")
    assert not missing, "\n".join(missing)
    if os.environ.get("MONARCH_WRITE_OPS"):
        opinfo.add_known(KNOWN, f"{ndim}-D", causes)
