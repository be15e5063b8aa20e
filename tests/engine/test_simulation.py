"""``monarch.simulate``: memory, collectives and time of a program without devices."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import monarch
from monarch.distributed import Mesh
from monarch.exceptions import ArgumentError

WIDTH, ROWS, MB = 2048, 4096, 1e6


def trained(mesh: Any, steps: int, optimizer: Any = torch.optim.AdamW) -> Any:
    model = monarch.module_to_mesh(nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)], nn.GELU()), mesh)
    opt = optimizer(model.parameters(), lr=1e-3)
    x = monarch.ones(ROWS, WIDTH, mesh=mesh, spec=["dp", None])
    for _ in range(steps):
        opt.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        opt.step()
        print(f"{loss.item():.3f}")
    return model, opt


def test_gloo_buffers_are_counted_and_waits_take_no_memory() -> None:
    size = 8 << 20
    for device, buffers in (("cpu", 2 << 20), ("h100", 0)):
        with monarch.simulate(hosts=1, gpus=2, device=device) as simulation:
            mesh = Mesh(shape=(2,), mesh_dim_names=("dp",))
            terms = monarch.ones(2, 1 << 20, 2, mesh=mesh, spec=["dp", None, None]).sum(0)
            total = terms.redistribute([None, None])
        found = simulation.forecast()
        # The term of the sum, the result, and the segments of the ring that sends it.
        assert found.peak == 2 * size + buffers
        assert sum(found.owners.values()) == found.peak and found.owners.get("collectives", 0) == buffers
        del terms, total


def test_gathered_parameters_count_the_copy_of_gloo() -> None:
    with monarch.simulate(hosts=1, gpus=4, device="cpu") as simulation:
        mesh = Mesh(shape=(4,), mesh_dim_names=("dp",))
        _whole = monarch.ones(4, 1 << 18, mesh=mesh, spec=["dp", None]).replicate()
    # The part, the result of four parts, and its flat copy.
    assert simulation.forecast().peak == 9 << 20


def test_forecast_of_many_hosts_names_owners_and_collectives(tmp_path: Path) -> None:
    with monarch.simulate(hosts=16, gpus=8, device="h100") as simulation:
        mesh = Mesh(shape=(64, 2), mesh_dim_names=("dp", "mp"))
        assert mesh.size() == 128
        trained(mesh, 2)
    found = simulation.forecast()
    parameters = 4 * (WIDTH * WIDTH + WIDTH) * 4
    assert found.owners["parameters"] == found.owners["gradients"] == parameters
    assert found.owners["optimizer"] == 2 * parameters
    assert sum(found.owners.values()) == found.peak and found.fits
    # Each step combines all gradients along dp, and nothing along mp.
    assert found.bytes_along("dp") == pytest.approx(2 * parameters, rel=0.01) and found.bytes_along("mp") == 0
    assert all("test_simulation.py" in row.line for row in found.collectives)
    assert found.step_seconds is not None and 0 < found.step_seconds < found.seconds
    # Two products of a layer forward and backward; the first layer needs no gradient of its input.
    assert found.flops >= 2 * (2 * 3 * 4 - 2) * (ROWS // 64) * WIDTH * WIDTH
    assert "assumptions: h100" in repr(found) and "<svg" in found._repr_html_()
    trace = json.loads(found.chrome_trace(tmp_path / "trace.json").read_text())
    assert {each["ph"] for each in trace["traceEvents"]} == {"X", "C"}


def test_simulation_says_what_does_not_fit_and_ends() -> None:
    with monarch.simulate(hosts=1, gpus=2, device="h100") as simulation:
        mesh = Mesh(shape=(2,), mesh_dim_names=("dp",))
        big = monarch.zeros(600_000, 100_000, mesh=mesh, spec=["dp", None])
        with pytest.raises(ArgumentError, match="4 ranks exceed the 2 devices"):
            Mesh(shape=(4,), mesh_dim_names=("dp",))
        with pytest.raises(ArgumentError, match="runs no functions"):
            mesh.execute(os.getpid)
    found = simulation.forecast()
    assert found.peak == 600_000 // 2 * 100_000 * 4 and not found.fits and "does not fit in" in repr(found)
    del big
    with pytest.raises(ArgumentError, match="expected one of a100"):
        monarch.simulate(device="abacus")


def test_recorded_steps_run_as_they_are_in_a_simulation() -> None:
    with monarch.simulate(hosts=1, gpus=2, device="h100") as simulation:
        mesh = Mesh(shape=(2,), mesh_dim_names=("dp",))

        @monarch.compile
        def step(x: Any) -> Any:
            return (x @ x.T).sum()

        assert str(step(monarch.ones(8, 8, mesh=mesh, spec=["dp", None])).item()) == "nan"
    assert simulation.forecast().flops > 0
