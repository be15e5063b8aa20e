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
    def prepare(self, model: str, port: int) -> None:
        """Create the process group like torch's own scripts if there is a port for it; else take the mesh's."""
        rank = current_rank().rank
        if port:
            import torch.distributed as dist

            dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
            self._trainer = Trainer(model, rank)
        else:
            from monarch.distributed import group

            self._trainer = Trainer(model, rank, group())

    @endpoint
    def step(self) -> float:
        return self._trainer.step()

    @endpoint
    def steps(self, count: int) -> float:
        loss = 0.0
        for _ in range(count):
            loss = self._trainer.step()
        return loss


class Summer(Actor):
    """A rank without a process group."""

    @endpoint
    def ready(self) -> None:
        import torch

        torch.set_num_threads(1)

    @endpoint
    def total(self) -> float:
        import torch
        import torch.distributed as dist

        from monarch.distributed import group

        total = torch.ones(1)
        dist.all_reduce(total, group=group())
        return total.item()


class FirstSums(base.Task):
    """New ranks create the process group of their mesh."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks

    def run(self, count: int) -> list[float]:
        return [self._once() for _ in range(count)]

    def _once(self) -> float:
        procs = this_host().spawn_procs({"gpus": self._ranks})
        mesh = procs.spawn("summers", Summer)
        mesh.ready.call().get()
        totals: list[float] = []
        seconds = base.timed(lambda: totals.extend(mesh.total.call().get().values()))
        procs.stop().get(timeout=60)
        if set(totals) != {self._ranks}:
            raise ValueError(f"wrong sums: {totals}")
        return seconds

    def close(self) -> None:
        """Nothing is kept between the runs."""


class Training(base.Task):
    def __init__(self, model: str, hand: bool = False) -> None:
        try:
            import monarch.distributed  # noqa: F401
        except ImportError:
            raise base.Unsupported("it has no process groups of CPUs") from None
        self._procs = this_host().spawn_procs({"gpus": RANKS})
        self._ranks = self._procs.spawn("ranks", Rank)
        self._ranks.prepare.call(model, base.free_port() if hand else 0).get()
        self.run(1)

    def run(self, count: int, ahead: int = 1, loop: bool = False) -> list[float]:
        loss = 0.0

        def at_once() -> None:
            nonlocal loss
            loss = self._ranks.steps.call(count).get().item(gpus=0)

        def steps() -> None:
            nonlocal loss
            calls: deque[Any] = deque()
            for _ in range(count):
                calls.append(self._ranks.step.call())
                if len(calls) == ahead:
                    loss = calls.popleft().get().item(gpus=0)
            while calls:
                loss = calls.popleft().get().item(gpus=0)

        return [base.timed(at_once if loop else steps), loss]

    def close(self) -> None:
        self._procs.stop().get(timeout=60)
