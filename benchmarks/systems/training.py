"""The training step that every system runs: a small MLP under DistributedDataParallel, with gloo."""

from __future__ import annotations

import sys
from typing import Any

from systems.base import timed

RANKS = 2
MODELS = {"small": (64, 2, 16), "large": (512, 4, 128)}
"""By model: width, number of layers, and samples of a rank in a batch."""


class Trainer:
    """One rank of it.

    Args:
        model: one of ``MODELS``.
        rank: in the group; each has other data.
        group: the process group, if it is not the default one.
    """

    def __init__(self, model: str, rank: int, group: Any = None) -> None:
        import torch
        from torch.nn.parallel import DistributedDataParallel

        torch.set_num_threads(1)
        width, layers, batch = MODELS[model]
        torch.manual_seed(0)
        parts = [part for _ in range(layers) for part in (torch.nn.Linear(width, width), torch.nn.ReLU())]
        self._model = DistributedDataParallel(torch.nn.Sequential(*parts[:-1]), process_group=group)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.01)
        torch.manual_seed(1 + rank)
        self._inputs, self._targets = torch.randn(batch, width), torch.randn(batch, width)
        self._loss = torch.nn.MSELoss()

    def step(self) -> float:
        """Take a step; return its loss."""
        self._optimizer.zero_grad()
        loss = self._loss(self._model(self._inputs), self._targets)
        loss.backward()
        self._optimizer.step()
        return float(loss.detach())


def main(model: str) -> None:
    """The torchrun program: rank 0 reads numbers of steps, and writes the seconds of so many and the last loss."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    first = dist.get_rank() == 0
    trainer = Trainer(model, dist.get_rank())
    asked = torch.zeros(1, dtype=torch.int64)
    loss = 0.0

    def steps() -> None:
        nonlocal loss
        for _ in range(int(asked)):
            loss = trainer.step()

    while True:
        if first:
            asked[0] = int(sys.stdin.readline() or 0)
        dist.broadcast(asked, 0)
        if not int(asked):
            break
        seconds = timed(steps)
        if first:
            print(seconds, loss, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
