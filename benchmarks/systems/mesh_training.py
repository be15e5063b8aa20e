"""Training with actors: a call from the controller for each step."""

from __future__ import annotations

from collections import deque
from typing import Any

from monarch.actor import Actor, current_rank, endpoint, this_host
from systems import base
from systems.training import RANKS, Trainer


class Rank(Actor):
    """A rank of the training."""

    @endpoint
    def prepare(self, model: str) -> None:
        from monarch.distributed import group

        self._trainer = Trainer(model, current_rank().rank, group())

    @endpoint
    def step(self) -> float:
        return self._trainer.step()


class Training(base.Task):
    def __init__(self, model: str) -> None:
        try:
            import monarch.distributed  # noqa: F401
        except ImportError:
            raise base.Unsupported("it has no process groups of CPUs") from None
        self._procs = this_host().spawn_procs({"gpus": RANKS})
        self._ranks = self._procs.spawn("ranks", Rank)
        self._ranks.prepare.call(model).get()
        self.run(1)

    def run(self, count: int, ahead: int = 1) -> list[float]:
        loss = 0.0

        def steps() -> None:
            nonlocal loss
            calls: deque[Any] = deque()
            for _ in range(count):
                calls.append(self._ranks.step.call())
                if len(calls) == ahead:
                    loss = calls.popleft().get().item(gpus=0)
            while calls:
                loss = calls.popleft().get().item(gpus=0)

        return [base.timed(steps), loss]

    def close(self) -> None:
        self._procs.stop().get(timeout=60)
