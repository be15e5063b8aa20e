"""Distributed tensors: cost of an op and of a look, memory in the program, and steps beside DTensor by hand.

Run it alone: ``python benchmarks/tensors.py [ROUNDS]``. Ours and the loop by hand run in turns on the same two ranks.
"""

from __future__ import annotations

import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import monarch
from monarch.actor import Actor, endpoint
from monarch.distributed import Mesh, device_mesh

_now = time.perf_counter
OPS = 2_000
"""Ops of a round."""
STEPS = 60
"""Training steps of a round."""


def model() -> nn.Module:
    """Return the network of both loops."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 16))


class Echo(Actor):
    """A call to a rank, the floor of a look."""

    @endpoint
    def number(self) -> float:
        return 1.0


class ByHand(Actor):
    """The same steps on DTensors, written for a rank."""

    def __init__(self) -> None:
        self.model: Any = None

    @endpoint
    def prepare(self) -> None:
        from torch.distributed.tensor import Replicate, distribute_module, distribute_tensor

        torch.set_num_threads(1)
        mesh: Any = device_mesh()
        self.mesh = mesh
        self.model = distribute_module(model(), mesh)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, foreach=True)
        self.replicate = Replicate()
        self.distribute = distribute_tensor

    @endpoint
    def steps(self, count: int) -> float:
        from torch.distributed.tensor import Shard

        torch.manual_seed(1)
        batch = self.distribute(torch.randn(64, 256), self.mesh, [Shard(0)], src_data_rank=None)
        target = self.distribute(torch.randn(64, 16), self.mesh, [Shard(0)], src_data_rank=None)
        loss: Any = None
        for _ in range(count):
            loss = functional.mse_loss(self.model(batch), target)
            loss.backward()
            for parameter in self.model.parameters():
                if not parameter.grad.placements[0].is_replicate():
                    parameter.grad = parameter.grad.redistribute(placements=[self.replicate])
            self.optimizer.step()
            self.optimizer.zero_grad()
        return float(loss.full_tensor().item())


def issue_us(mesh: Any) -> float:
    """Return microseconds of the program for an elementwise op."""
    x = monarch.ones(64, 64, mesh=mesh, spec=["dp", None])
    x.sum().item()
    spent = 0.0
    for _ in range(OPS // 200):
        begin = _now()
        y = x
        for _ in range(200):
            y = y + 1
        spent += _now() - begin
        y.sum().item()
    return spent / OPS * 1e6


def look_ratio(mesh: Any, echo: Any) -> tuple[float, float]:
    """Return microseconds of ``item()`` after a flushed stream, and its ratio to a call to a rank."""
    x = monarch.ones((), mesh=mesh)
    x.item()
    looks: list[float] = []
    calls: list[float] = []
    one = echo.slice(dp=0)
    for _ in range(200):
        begin = _now()
        x.item()
        middle = _now()
        one.number.call_one().get()
        looks.append(middle - begin)
        calls.append(_now() - middle)
    look, call = statistics.median(looks), statistics.median(calls)
    return look * 1e6, look / call


def memory_mb(mesh: Any) -> float:
    """Return megabytes of the program for a tensor of 10 GB, whose parts no rank touches."""
    monarch.empty(8, 8, mesh=mesh, spec=["dp", None])
    tracemalloc.start()
    big = monarch.empty(50_000, 50_000, mesh=mesh, spec=["dp", None])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert big.numel() * 4 == 10_000_000_000
    return peak / 1e6


def our_steps(mesh: Any) -> Callable[[int], float]:
    """Return a function that makes steps in the program."""
    network = monarch.module_to_mesh(model(), mesh)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, foreach=True)

    def steps(count: int) -> float:
        torch.manual_seed(1)
        batch = monarch.distribute(torch.randn(64, 256), mesh, ["dp", None])
        target = monarch.distribute(torch.randn(64, 16), mesh, ["dp", None])
        loss: Any = None
        for _ in range(count):
            loss = functional.mse_loss(network(batch), target)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return float(loss.item())

    return steps


def main(rounds: int) -> None:
    """Print the figures, as medians over rounds."""
    torch.set_num_threads(1)
    mesh = Mesh(shape=(2,), mesh_dim_names=("dp",))
    echo, by_hand = mesh.procs.spawn("echo", Echo), mesh.procs.spawn("by_hand", ByHand)
    by_hand.prepare.call().get()
    ours = our_steps(mesh)
    found: dict[str, list[float]] = {}
    losses = ours(5), by_hand.steps.call(5).get().values()[0]
    assert abs(losses[0] - losses[1]) < 1e-4, losses
    for _ in range(rounds):
        found.setdefault("issue one op, us", []).append(issue_us(mesh))
        look, ratio = look_ratio(mesh, echo)
        found.setdefault("item() after a flushed stream, us", []).append(look)
        found.setdefault("item(), ratio to a call", []).append(ratio)
        begin = _now()
        ours(STEPS)
        middle = _now()
        by_hand.steps.call(STEPS).get()
        end = _now()
        found.setdefault("DDP step, ms", []).append((middle - begin) / STEPS * 1e3)
        found.setdefault("DDP step by hand, ms", []).append((end - middle) / STEPS * 1e3)
        found.setdefault("steps/s, ratio to by hand", []).append((end - middle) / (middle - begin))
    found["program's memory for 10 GB, MB"] = [memory_mb(mesh)]
    for name, values in found.items():
        low, high = min(values), max(values)
        print(f"{name}: {statistics.median(values):.3g} ({low:.3g} to {high:.3g})")
    mesh.stop().get(30)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
