"""Training with a recorded step on distributed tensors."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import torch

import monarch
from monarch.distributed import Mesh
from systems import base
from systems.training import MODELS, RANKS


class Recorded(base.Task):
    """The model, seeds and data of ``systems.training``.

    Args:
        model: one of its ``MODELS``.
    """

    def __init__(self, model: str) -> None:
        width, layers, batch = MODELS[model]
        self._mesh = Mesh(shape=(RANKS,), mesh_dim_names=("dp",))
        self._mesh.execute(torch.set_num_threads, 1)
        torch.manual_seed(0)
        parts = [part for _ in range(layers) for part in (torch.nn.Linear(width, width), torch.nn.ReLU())]
        module = monarch.module_to_mesh(torch.nn.Sequential(*parts[:-1]), self._mesh)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
        data: list[list[torch.Tensor]] = []
        for rank in range(RANKS):
            torch.manual_seed(1 + rank)
            data.append([torch.randn(batch, width), torch.randn(batch, width)])
        self._batch = [
            monarch.distribute(torch.cat(each), self._mesh, ["dp", None]) for each in zip(*data, strict=True)
        ]

        @monarch.compile
        def step(inputs: Any, targets: Any) -> Any:
            optimizer.zero_grad()
            errors = (module(inputs) - targets).square().mean(1)
            errors.mean().backward()
            optimizer.step()
            return errors

        self._step = step
        self.run(1)

    def run(self, count: int, look: bool = False) -> list[float]:
        issued: list[float] = []
        loss = 0.0

        def steps() -> None:
            nonlocal loss
            errors: Any = None
            for _ in range(count):
                begin = time.thread_time()
                errors = self._step(*self._batch)
                issued.append(time.thread_time() - begin)
                if look:
                    loss = float(monarch.fetch(errors, dp=0).mean())
            loss = float(monarch.fetch(errors, dp=0).mean())

        return [base.timed(steps), loss, median(issued)]

    def close(self) -> None:
        self._mesh.stop().get(timeout=60)
