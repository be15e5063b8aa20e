"""The program behind ``gpu.py``: prints one line of JSON for each figure; none without a GPU."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from monarch.actor import Actor, endpoint, this_host
from monarch.rdma import RDMABuffer

SIZE = 256 << 20


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


def main() -> None:
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
        print(json.dumps({"name": f"read 256 MB, GPU to {where}", "ours": ours, "floor": floor, "note": note}))
    ours, floor = first.send.call_one(second, rounds).get()
    note = "floor: one copy within one GPU; a message takes two"
    print(json.dumps({"name": "256 MB as an argument, rank to rank", "ours": ours, "floor": floor, "note": note}))


if __name__ == "__main__":
    main()
