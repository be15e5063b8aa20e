"""torch's own samples: all that its DTensor computes on sharded tensors, distributed tensors compute too."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import monarch
import opinfo
from leaks import Kit
from monarch.distributed import Mesh
from monarch.exceptions import MonarchError

pytest.importorskip("expecttest", reason="torch's samples of ops need expecttest")

KNOWN = Path(__file__).with_name("unsupported_ops.json")
"""What does not run, by cause. ``MONARCH_WRITE_OPS=1`` writes it again."""
FEW = ["add", "matmul", "sum", "softmax_", "cumsum", "cat", "nn_functional_linear", "squeeze", "fft_hfft", "fft_rfft"]
"""Ops of the quick test."""
PARTS = 8
"""Tests of all ops on a mesh."""


LIMIT = 120.0
"""Seconds for all samples of an op, on a machine that is busy with others."""
LOST = "torch's DTensor ends its process, or never ends"
"""A cause."""


class Meshes:
    """The meshes of these tests by their number of axes, made at first use."""

    def __init__(self) -> None:
        self._made: dict[int, Any] = {}

    def __call__(self, ndim: int) -> Any:
        if ndim not in self._made:
            self._made[ndim] = Mesh(shape=(2,) * ndim, mesh_dim_names=("dp", "mp")[:ndim])
            assert self._made[ndim].execute(len, "ready").values()
        return self._made[ndim]

    def end(self, ndim: int) -> None:
        """End one whose ranks have died or do not answer, so that the next use makes another one."""
        self._made.pop(ndim).stop().get(60)

    def end_all(self) -> None:
        for ndim in list(self._made):
            self.end(ndim)


@pytest.fixture(scope="module")
def meshes() -> Iterator[Meshes]:
    made = Meshes()
    for ndim in (1, 2):
        made(ndim)
    yield made
    made.end_all()


def bounded(function: Callable[[], Any]) -> Any:
    """Return what a function returns within the limit; raise TimeoutError, or the error that it raises.

    Its thread ends when the mesh does.
    """
    found: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            found.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(LIMIT)
    if errors:
        raise errors[0]
    if not found:
        raise TimeoutError(f"no result after {LIMIT:g} s")
    return found[0]


def whole(tensor: Any) -> Any:
    return tensor.full_tensor() if isinstance(tensor, monarch.Tensor) else tensor


def compared(meshes: Meshes, ndim: int, name: str) -> tuple[list[str], dict[str, str]]:
    """Return what only DTensor computes, and the cause of what neither does, by sample."""
    mesh = meshes(ndim)
    try:
        outcomes = bounded(lambda: mesh.execute(opinfo.by_dtensor, name).values()[0])
    except (MonarchError, TimeoutError):
        # gloo aborts a process that gets another size than it expects, for example.
        meshes.end(ndim)
        return [], {"all": LOST}
    by_dtensor = {tuple(each[:2]): each[2] for each in outcomes}
    missing: list[str] = []
    neither: dict[str, str] = {}

    def distribute(tensor: Any, placements: Any) -> Any:
        return monarch.distribute(tensor, mesh, placements)

    try:
        ours = bounded(lambda: list(opinfo.outcomes(name, ndim, distribute, whole)))
    except (MonarchError, TimeoutError) as error:
        meshes.end(ndim)
        return [f"{name}: {error}"], {}
    for at, division, found in ours:
        if found in ("ok", "no sample"):
            continue
        if by_dtensor[at, division] == "ok":
            missing.append(f"{name}, sample {at}, {division}: {found}")
        else:
            neither[f"{at}, {division}"] = found
    return missing, neither


@pytest.mark.parametrize("ndim", [1, 2])
def test_ops_that_dtensor_computes_compute_here(meshes: Meshes, ndim: int) -> None:
    for name in opinfo.ops():
        if name in FEW:
            missing, _ = compared(meshes, ndim, name)
            assert not missing, "\n".join(missing)


@pytest.mark.slow
@pytest.mark.skipif("MONARCH_ALL_OPS" not in os.environ, reason="takes an hour: make test-ops")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("ndim", [1, 2])
@pytest.mark.parametrize("part", range(PARTS))
def test_all_ops_that_dtensor_computes_compute_here(meshes: Meshes, ndim: int, part: int, leaks: Kit) -> None:
    missing: list[str] = []
    causes: dict[str, list[str]] = {}
    for name in list(opinfo.ops())[part::PARTS]:
        wrong, neither = compared(meshes, ndim, name)
        missing += wrong
        for cause in sorted({opinfo.cause_of(found) for found in neither.values()}):
            causes.setdefault(cause, []).append(name)
    # There may be a new mesh.
    meshes(ndim)
    leaks.rebase()
    for cause, names in sorted(causes.items()):
        print(f"{cause}: {', '.join(names)}")
    if os.environ.get("MONARCH_WRITE_OPS"):
        opinfo.add_known(KNOWN, f"{ndim}-D", causes)
    assert not missing, "\n".join(missing)
