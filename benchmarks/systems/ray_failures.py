"""Deaths of workers and of the controller, with actors of Ray."""

from __future__ import annotations

import os
import signal
import sys
import time

import ray

from systems import base
from systems.survivors import survivors

_WAIT = 60


class Mortal:
    """A worker that can be killed."""

    def pid(self) -> int:
        import torch

        torch.ones(2).sum()
        return os.getpid()

    def hang(self) -> None:
        time.sleep(_WAIT)


class Pending(base.Task):
    def run(self, count: int) -> list[float]:
        return [self._once() for _ in range(count)]

    def _once(self) -> float:
        workers = [ray.remote(Mortal).options(num_cpus=0).remote() for _ in range(4)]
        pids = ray.get([worker.pid.remote() for worker in workers])
        pending = [worker.hang.remote() for worker in workers]
        time.sleep(0.3)

        def kill() -> None:
            os.kill(pids[2], signal.SIGKILL)
            try:
                ray.get(pending)
            except ray.exceptions.RayActorError:
                pass

        seconds = base.timed(kill)
        for worker in workers:
            ray.kill(worker)
        return seconds


class Healed(base.Task):
    def __init__(self) -> None:
        kind = ray.remote(Mortal).options(num_cpus=0, max_restarts=-1)
        self._workers = [kind.remote() for _ in range(8)]
        self._pids = self._ask()

    def _ask(self) -> list[int]:
        return ray.get([worker.pid.remote() for worker in self._workers])

    def run(self, count: int) -> list[float]:
        return [base.timed(self._once) for _ in range(count)]

    def _once(self) -> None:
        dead = self._pids[5]
        os.kill(dead, signal.SIGKILL)
        while True:
            try:
                self._pids = self._ask()
            except ray.exceptions.RayActorError:
                continue
            if self._pids[5] != dead:
                return

    def close(self) -> None:
        for worker in self._workers:
            ray.kill(worker)


_PROGRAM = """
import time
import ray
ray.init(include_dashboard=False, log_to_driver=False, logging_level="error")
@ray.remote(num_cpus=0)
class A:
    def echo(self, value): return value
workers = [A.remote() for _ in range(4)]
ray.get([worker.echo.remote(1) for worker in workers])
print("ready", flush=True)
time.sleep(600)
"""


class Survivors(base.Task):
    def run(self, count: int) -> list[float]:
        return [float(survivors(sys.executable, _PROGRAM)) for _ in range(count)]


def failures(kind: str) -> base.Task:
    """Return the task of a kind."""
    tasks = {"pending": Pending, "healed": Healed, "survivors": Survivors}
    if kind not in tasks:
        raise base.Unsupported("no such task")
    return tasks[kind]()
