"""The program behind ``gpu.py``: prints one line of JSON for each figure; none without a GPU.

``python benchmarks/gpu_program.py profile`` prints instead what a rank and its GPU do in recorded steps and in the same
steps op by op, by torch's profiler.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import monarch
from monarch.actor import Actor, endpoint, this_host
from monarch.distributed import Mesh
from monarch.rdma import RDMABuffer

SIZE = 256 << 20
WIDTH, ROWS, STEPS = 2048, 4096, 20
"""Of the model, of a batch, and steps of each figure."""


class Rank(Actor):
    """One end of each transfer."""

    @endpoint
    def name(self) -> str:
        return torch.cuda.get_device_name()

    @endpoint
    def share(self, device: str) -> RDMABuffer:
        self.kept = torch.full((SIZE,), 7, dtype=torch.uint8, device=device)
        return RDMABuffer(self.kept)

    @endpoint
    def read(self, buffer: RDMABuffer, device: str, rounds: int) -> tuple[list[float], list[float]]:
        """Return GB/s of reads, and of copies within this process from a GPU to the same kind of memory."""
        here = torch.zeros(SIZE, dtype=torch.uint8, device=device)
        source = torch.ones(SIZE, dtype=torch.uint8, device="cuda")
        ours = _speeds(lambda: buffer.read_into(here).get(), rounds)
        assert bool((here == 7).all())
        return ours, _speeds(lambda: here.copy_(source), rounds)

    @endpoint
    def send(self, other: Any, rounds: int) -> tuple[list[float], list[float]]:
        """Return GB/s of a tensor that goes to another rank in a message, and of a copy within this process."""
        tensor, copy = torch.full((SIZE,), 7, dtype=torch.uint8, device="cuda"), None

        def clone() -> None:
            nonlocal copy
            copy = tensor.clone()

        return _speeds(lambda: other.take.call_one(tensor).get(), rounds), _speeds(clone, rounds)

    @endpoint
    def take(self, tensor: torch.Tensor) -> str:
        return tensor.device.type


def _speeds(work: Callable[[], Any], rounds: int) -> list[float]:
    found: list[float] = []
    for turn in range(rounds + 2):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        work()
        torch.cuda.synchronize()
        if turn >= 2:
            found.append(SIZE / 1e9 / (time.perf_counter() - begun))
    return found


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(each for _ in range(4) for each in (nn.Linear(WIDTH, WIDTH), nn.GELU())))


def stepper(trained: Any, batch: Any) -> Callable[..., Any]:
    """Return a function that does one step, and returns the loss."""
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-4, fused=True)

    def step(batch: Any = batch) -> Any:
        optimizer.zero_grad()
        loss = trained(batch).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step


def rates(step: Callable[..., Any], rounds: int) -> list[float]:
    """Return steps per second, in several rounds that end with the value of the loss."""
    found: list[float] = []
    for turn in range(rounds + 2):
        begun = time.perf_counter()
        for _ in range(STEPS):
            loss = step()
        loss.item()
        if turn >= 2:
            found.append(STEPS / (time.perf_counter() - begun))
    return found


def alone(rounds: int) -> list[float]:
    """Return the figures of the loop within one process."""
    return rates(stepper(model().cuda(), torch.ones(ROWS, WIDTH, device="cuda")), rounds)


def train(rounds: int, about: str) -> None:
    mesh = Mesh(shape=(1,), mesh_dim_names=("dp",))
    floor = mesh.execute(alone, rounds).values()[0]
    step = stepper(monarch.module_to_mesh(model(), mesh), monarch.ones(ROWS, WIDTH, mesh=mesh, spec=["dp", None]))
    batch = monarch.ones(ROWS, WIDTH, mesh=mesh, spec=["dp", None])
    recorded = monarch.compile(step)
    note = f"4 layers of {WIDTH}, {ROWS} rows, AdamW, float32, one rank; floor: the loop within one process; {about}"
    for name, each in (("op by op", step), ("recorded", lambda: recorded(batch))):
        told = {"name": f"training steps, {name}", "ours": rates(each, rounds), "floor": floor, "note": note}
        print(json.dumps(told | {"unit": "steps/s"}))
    mesh.stop().get(30)


def begin() -> None:
    """Begin to profile this rank."""
    # Each call has globals of its own there.
    profiler: Any = torch.profiler
    profiler.running = torch.profiler.profile()
    profiler.running.start()


def end() -> str:
    """Return the ops that took longest since then, on the CPU and on the GPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    profiler: Any = torch.profiler
    profiler.running.stop()
    found = profiler.running.key_averages()
    keys = ["self_cpu_time_total", *(["self_cuda_time_total"] if torch.cuda.is_available() else [])]
    return "\n".join(f"by {key}\n{found.table(sort_by=key, row_limit=15)}" for key in keys)


def profile() -> None:
    mesh = Mesh(shape=(1,), mesh_dim_names=("dp",))
    step = stepper(monarch.module_to_mesh(model(), mesh), monarch.ones(ROWS, WIDTH, mesh=mesh, spec=["dp", None]))
    batch = monarch.ones(ROWS, WIDTH, mesh=mesh, spec=["dp", None])
    recorded = monarch.compile(step)
    for name, each in (("op by op", step), ("recorded", lambda: recorded(batch))):
        for _ in range(4):
            each().item()
        mesh.execute(begin)
        begun = time.perf_counter()
        for _ in range(STEPS):
            loss = each()
        issued = time.perf_counter() - begun
        loss.item()
        took = time.perf_counter() - begun
        print(f"{name}: {took / STEPS * 1e3:.2f} ms a step, of which the program takes {issued / STEPS * 1e3:.2f} ms")
        print(mesh.execute(end).values()[0], flush=True)
    mesh.stop().get(30)


def main() -> None:
    if sys.argv[1] == "profile":
        profile()
        return
    if not torch.cuda.is_available():
        return
    rounds = int(sys.argv[1])
    # Two ranks, which share a single GPU.
    ranks = this_host().spawn_procs({"gpus": 2}).spawn("ranks", Rank)
    first, second = ranks.slice(gpus=0), ranks.slice(gpus=1)
    about = f"{first.name.call_one().get()}, {torch.cuda.device_count()} in this machine"
    buffer = first.share.call_one("cuda").get()
    for where, device in (("GPU", "cuda"), ("CPU", "cpu")):
        ours, floor = second.read.call_one(buffer, device, rounds).get()
        note = f"floor: a copy within one process; {about}"
        print(
            json.dumps(
                {"name": f"read 256 MB, GPU to {where}", "ours": ours, "floor": floor, "unit": "GB/s", "note": note}
            )
        )
    ours, floor = first.send.call_one(second, rounds).get()
    note = "floor: one copy within one GPU; a message takes two"
    print(
        json.dumps(
            {"name": "256 MB as an argument, rank to rank", "ours": ours, "floor": floor, "unit": "GB/s", "note": note}
        )
    )
    train(rounds, about)


if __name__ == "__main__":
    main()
