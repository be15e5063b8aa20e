"""NCCL groups that a failure or a death ends in the middle of a step. These need two GPUs."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from monarch.actor import Actor, current_rank, endpoint
from monarch.exceptions import ActorError, MonarchError

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


class Trainer(Actor):
    def __init__(self) -> None:
        from torch.nn.parallel import DistributedDataParallel

        self.rank = current_rank().rank
        self.device = torch.device("cuda", torch.cuda.current_device())
        torch.manual_seed(0)
        self.model = DistributedDataParallel(torch.nn.Linear(64, 64).to(self.device), device_ids=[self.device.index])
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def step(self, fails: str = "") -> float:
        """Train; the last rank may raise or die before its backward pass, in which the other one waits for it."""
        self.optimizer.zero_grad()
        result = self.model(torch.full((2, 64), 1.0 + self.rank, device=self.device)).sum()
        if fails == "raises" and self.rank == 1:
            raise ValueError("here")
        if fails == "dies" and self.rank == 1:
            threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGKILL)).start()
            threading.Event().wait(60)
        result.backward()
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


def test_training_goes_on_with_the_same_model_after_a_failure(procs: Callable[..., Any]) -> None:
    trainers = procs(2).spawn("trainers", Trainer)
    one, other = values(trainers.step.call())
    assert one == other
    for _ in range(2):
        with pytest.raises(ActorError, match="here"):
            trainers.step.call("raises").get(120)
        one, other = values(trainers.step.call())
        assert one == other


def test_a_death_keeps_the_optimizer_from_unreduced_gradients(procs: Callable[..., Any]) -> None:
    trainers = procs(2).spawn("trainers", Trainer)
    before = values(trainers.step.call())[0]
    with pytest.raises(MonarchError, match="rank 1"):
        trainers.step.call("dies").get(120)
    assert trainers.slice(gpus=0).weights.call_one().get(120) == before
