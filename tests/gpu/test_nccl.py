"""NCCL groups that a Stop, a failure or a death ends in the middle of a step, or while they connect.

On a machine with one GPU its two ranks look to NCCL as if they were on two hosts, and it connects them by sockets.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from books import installed, own
from kernels import Cell, Notebook
from leaks import wait_until
from monarch.actor import Actor, current_rank, endpoint
from monarch.exceptions import ActorError, MonarchError
from monarch_kernel.output.waiting import MARK

__all__ = ["installed", "own"]


def share_a_gpu(rank: int, gpus: int) -> None:
    """Let NCCL take the ranks of one GPU, which it refuses within a host."""
    if gpus < 2:
        os.environ["NCCL_HOSTID"] = f"host{rank}"


class Trainer(Actor):
    def __init__(self) -> None:
        from torch.nn.parallel import DistributedDataParallel

        self.rank = current_rank().rank
        share_a_gpu(self.rank, torch.cuda.device_count())
        self.device = torch.device("cuda", torch.cuda.current_device())
        torch.manual_seed(0)
        self.model = DistributedDataParallel(torch.nn.Linear(64, 64).to(self.device), device_ids=[self.device.index])
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    @endpoint
    def backend(self) -> str:
        import torch.distributed as dist

        return str(dist.get_backend_config())

    @endpoint
    def step(self, fails: str = "", waits: bool = False) -> float:
        """Train; the last rank may raise or die before its backward pass, in which the other one waits for it."""
        self.optimizer.zero_grad()
        result = self.model(torch.full((2, 64), 1.0 + self.rank, device=self.device)).sum()
        if fails == "raises" and self.rank == 1:
            raise ValueError("here")
        if fails == "dies" and self.rank == 1:
            threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGKILL)).start()
            threading.Event().wait(60)
        result.backward()
        if waits:
            torch.cuda.synchronize()
        self.optimizer.step()
        return self.total()

    def total(self) -> float:
        return float(sum(each.detach().double().sum() for each in self.model.parameters()))

    @endpoint
    def weights(self) -> float:
        return self.total()


def values(future: Any) -> list[Any]:
    return list(future.get(120).values())


@pytest.mark.parametrize("waits", [True, False], ids=["waits for the GPU", "steps at once"])
def test_training_goes_on_with_the_same_model_after_a_failure(procs: Callable[..., Any], waits: bool) -> None:
    trainers = procs(2).spawn("trainers", Trainer)
    assert all("cuda:nccl" in each for each in values(trainers.backend.call()))
    one, other = values(trainers.step.call())
    assert one == other
    for _ in range(2):
        with pytest.raises(ActorError, match="here"):
            trainers.step.call("raises", waits).get(120)
        one, other = values(trainers.step.call())
        assert one == other


@pytest.mark.parametrize("waits", [True, False], ids=["waits for the GPU", "steps at once"])
def test_a_death_keeps_the_optimizer_from_unreduced_gradients(procs: Callable[..., Any], waits: bool) -> None:
    trainers = procs(2).spawn("trainers", Trainer)
    before = values(trainers.step.call())[0]
    with pytest.raises(MonarchError, match="rank 1"):
        trainers.step.call("dies", waits).get(120)
    assert trainers.slice(gpus=0).weights.call_one().get(120) == before


BEGIN = """import os, torch.distributed as dist
if torch.cuda.device_count() < 2:
    os.environ["NCCL_HOSTID"] = f"host{rank}"
x = torch.full((4,), rank + 1.0, device='cuda')
dist.all_reduce(x)
x[0].item(), dist.get_backend_config()"""
"""A collective in the default group, of NCCL on one GPU too."""


@pytest.fixture
def book(own: Callable[..., Notebook]) -> Notebook:
    """A notebook with a mesh of two ranks, whose groups have NCCL."""
    found = own()
    found.guard = 40.0
    found.run("%mesh up 2").ok()
    shown = found.mesh(BEGIN).ok().shown
    assert "3.0" in shown and "cuda:nccl" in shown, shown
    return found


def until_said(cell: Cell, *parts: str) -> None:
    """Wait until the line of a running cell says something."""

    def said() -> list[str]:
        displays = cell.contents("display_data", "update_display_data")
        return [each["data"].get("text/plain", "") for each in displays if MARK in each["metadata"]]

    cell.until(lambda: any(all(part in text for part in parts) for text in said()), f"{parts} in {said()}")


def test_a_stop_frees_a_rank_whose_group_connects(book: Notebook) -> None:
    """It is in a call of NCCL that waits for the others, which no abort ends."""
    making = "g = dist.new_group([0, 1], backend='nccl')"
    cell = book.send(f"%%mesh\nif rank == 0:\n    {making}")
    until_said(cell, "rank 0 waits for rank 1, which finished without calling new_group()")
    book.interrupt()
    assert "stopped" in cell.wait().text
    again = f"{making}\nx.fill_(rank + 1)\ndist.all_reduce(x, group=g)\nx[0].item()"
    assert book.mesh(again).ok().shown == "[ranks 0-1] 3.0"


def test_a_stop_frees_a_rank_in_the_first_collective_of_a_group(book: Notebook) -> None:
    book.mesh("g = dist.new_group([0, 1])").ok()
    cell = book.send(
        "%%mesh\nif rank == 0:\n    print('begun')\n    dist.all_reduce(x, group=g)\n    torch.cuda.synchronize()"
    )
    cell.until(lambda: "begun" in cell.text)
    book.interrupt()
    assert "stopped" in cell.wait().text
    assert book.mesh("x.fill_(rank + 1); dist.all_reduce(x); x[0].item()").ok().shown == "[ranks 0-1] 3.0"


def test_stop_frees_a_rank_in_one_of_several_groups(book: Notebook) -> None:
    """The abort of the others waits for the GPU, and so for this collective."""
    book.mesh("groups = [dist.new_group([0, 1]) for _ in range(3)]\nfor g in groups: dist.all_reduce(x, group=g)").ok()
    cell = book.send("%%mesh\nif rank == 0:\n    dist.all_reduce(x, group=groups[1])\n    torch.cuda.synchronize()")
    until_said(cell, "rank 0 waits for rank 1", "waiting for its GPU")
    book.interrupt()
    assert "stopped" in cell.wait().text
    again = "x.fill_(rank + 1)\nfor g in groups: dist.all_reduce(x, group=g)\nx[0].item()"
    assert book.mesh(again).ok().shown == "[ranks 0-1] 12.0"


def test_a_rank_that_misses_a_collective_is_named(book: Notebook) -> None:
    cell = book.send(
        "%%mesh\nif rank == 0:\n    dist.all_reduce(x)\n    torch.cuda.synchronize()\nelse:\n    torch.cuda._sleep(10)"
    )
    until_said(cell, "rank 0 waits for rank 1", "waiting for its GPU, which is in a collective")
    book.interrupt()
    assert "stopped" in cell.wait().text


def test_death_while_others_wait_in_a_collective_ends_the_cell(book: Notebook) -> None:
    dies = "import signal\nif rank == 1:\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    cell = book.send(f"%%mesh\n{dies}dist.all_reduce(x)\ntorch.cuda.synchronize()")
    assert "rank 1" in cell.wait().text
    assert cell.status == "error"
    book.run("%mesh heal").ok()
    assert "3.0" in book.mesh(BEGIN).ok().shown


def test_a_step_is_captured_in_a_cuda_graph(book: Notebook) -> None:
    code = """weight = torch.nn.Parameter(torch.ones(4, device='cuda'))
weight.grad = torch.ones_like(weight)
optimizer = torch.optim.AdamW([weight], capturable=True)
for _ in range(3):
    optimizer.step()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    optimizer.step()
before = weight[0].item()
graph.replay()
weight[0].item() < before"""
    assert book.mesh(code).ok().shown == "[ranks 0-1] True"


SECONDS = 3
SHORT = f"""from datetime import timedelta
short = dist.new_group(timeout=timedelta(seconds={SECONDS}))
y = torch.ones(1, device='cuda'); dist.all_reduce(y, group=short); y.item()"""


def test_paused_rank_does_not_time_out_the_others(book: Notebook) -> None:
    book.mesh(SHORT).ok()
    waits = "if rank == 1:\n    while not globals().get('go'): time.sleep(0.01)\n"
    book.mesh(
        f"import time\n{waits}y = torch.ones(1, device='cuda'); dist.all_reduce(y, group=short); y.item()",
        "--nowait --out h",
    ).ok()
    assert "paused rank 1" in book.run("%mesh pause mesh[1]").ok().stream()
    paused = time.monotonic()
    assert wait_until(lambda: time.monotonic() > paused + 2.5 * SECONDS, 4 * SECONDS)
    book.run("%%mesh [1] --in-frame\ngo = True").ok()
    book.run("%mesh resume").ok()
    assert "ranks 0-1: 2.0" in book.run("h.result()").ok().shown


def test_timeout_ends_a_collective(book: Notebook) -> None:
    book.mesh(SHORT).ok()
    misses = (
        "if rank == 0:\n    y = torch.ones(1, device='cuda'); dist.all_reduce(y, group=short); torch.cuda.synchronize()"
    )
    cell = book.mesh(misses)
    assert cell.status == "error" and f"timed out after {SECONDS} s" in cell.text, cell.text
    assert "3.0" in book.mesh("x.fill_(rank + 1); dist.all_reduce(x); x[0].item()").ok().shown
