"""Ray: one actor a worker process; a large argument is put into its object store once, as its manual advises."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from systems import base


class RayPool(base.Pool):
    def __init__(self, count: int, torch: bool) -> None:
        import ray

        self._ray = ray
        kind = ray.remote(base.Worker)
        self._workers = [kind.options(num_cpus=0).remote() for _ in range(count)]
        self.greet(torch)

    def one(self, method: str, *args: Any) -> Any:
        return self._ray.get(getattr(self._workers[0], method).remote(*args))

    def all(self, method: str, *args: Any) -> list[Any]:
        if args and getattr(args[0], "nbytes", 0) > 100_000:
            args = (self._ray.put(args[0]),)
        return self._ray.get([getattr(worker, method).remote(*args) for worker in self._workers])

    def flight_one(self, values: Sequence[Any]) -> None:
        worker = self._workers[0]
        self._ray.get([worker.echo.remote(value) for value in values])

    def flight_all(self, values: Sequence[Any]) -> None:
        self._ray.get([worker.echo.remote(value) for value in values for worker in self._workers])

    def close(self) -> None:
        for worker in self._workers:
            self._ray.kill(worker)


class Ray(base.System):
    def start(self) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        import ray

        ray.init(include_dashboard=False, log_to_driver=False, logging_level="error", object_store_memory=4 << 30)

    def spawn(self, count: int, torch: bool) -> base.Pool:
        return RayPool(count, torch)

    def states(self, ranks: int) -> base.Task:
        from systems.ray_tasks import States

        return States(ranks)

    def failures(self, kind: str) -> base.Task:
        from systems.ray_failures import failures

        return failures(kind)

    def training(self, model: str, hand: bool = False) -> base.Task:
        from systems.ray_tasks import Training

        return Training(model)

    def stop(self) -> None:
        import ray

        ray.shutdown()


SYSTEM = Ray()
