"""Copies of states, and training, with actors of Ray."""

from __future__ import annotations

from collections import deque
from typing import Any

import ray

from systems import base, state
from systems.training import RANKS, Trainer


class Source(state.Weights):
    def offer(self) -> list[Any]:
        """Put the state into the object store as arrays, which are read there without a copy."""
        return [ray.put({name: tensor.numpy() for name, tensor in self.state.items()})]


class Target(state.Weights):
    def take(self, arrays: dict[str, Any]) -> None:
        import torch

        for name, tensor in self.state.items():
            tensor.copy_(torch.from_numpy(arrays[name]))


class States(base.Task):
    def __init__(self, ranks: int) -> None:
        self._source = ray.remote(Source).options(num_cpus=0).remote()
        self._targets = [ray.remote(Target).options(num_cpus=0).remote() for _ in range(ranks)]
        self._value = 0.0
        self.run(2)

    def run(self, count: int) -> list[float]:
        return [self._once() for _ in range(count)]

    def _once(self) -> float:
        self._value += 1.0
        ray.get(self._source.fill.remote(self._value))
        seconds = base.timed(self._copy)
        if not all(ray.get([target.check.remote(self._value) for target in self._targets])):
            raise ValueError("not what the source has")
        return seconds

    def _copy(self) -> None:
        offered = ray.get(self._source.offer.remote())[0]
        ray.get([target.take.remote(offered) for target in self._targets])

    def close(self) -> None:
        for worker in (self._source, *self._targets):
            ray.kill(worker)


class Rank:
    """A rank of the training."""

    def __init__(self, model: str, rank: int, port: int) -> None:
        import torch.distributed as dist

        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
        self._trainer = Trainer(model, rank)

    def step(self) -> float:
        return self._trainer.step()

    def steps(self, count: int) -> float:
        loss = 0.0
        for _ in range(count):
            loss = self._trainer.step()
        return loss


class Training(base.Task):
    def __init__(self, model: str) -> None:
        port = base.free_port()
        kind = ray.remote(Rank).options(num_cpus=0)
        self._ranks = [kind.remote(model, rank, port) for rank in range(RANKS)]
        self.run(1)

    def run(self, count: int, ahead: int = 1, loop: bool = False) -> list[float]:
        loss = 0.0

        def at_once() -> None:
            nonlocal loss
            loss = ray.get([rank.steps.remote(count) for rank in self._ranks])[0]

        def steps() -> None:
            nonlocal loss
            calls: deque[list[Any]] = deque()
            for _ in range(count):
                calls.append([rank.step.remote() for rank in self._ranks])
                if len(calls) == ahead:
                    loss = ray.get(calls.popleft())[0]
            while calls:
                loss = ray.get(calls.popleft())[0]

        return [base.timed(at_once if loop else steps), loss]

    def close(self) -> None:
        for rank in self._ranks:
            ray.kill(rank)
