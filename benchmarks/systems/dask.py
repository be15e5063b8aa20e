"""Dask distributed: a local cluster of processes with one thread each, and one actor on each."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

from systems import base


class DaskPool(base.Pool):
    def __init__(self, cluster: Any, client: Any, count: int, torch: bool) -> None:
        self._cluster, self._client = cluster, client
        cluster.scale(count)
        client.wait_for_workers(count, timeout=120)
        while len(addresses := list(client.scheduler_info(n_workers=-1)["workers"])[:count]) < count:
            # The client learns of them a moment later.
            time.sleep(0.01)
        self._futures = [
            client.submit(base.Worker, workers=[address], allow_other_workers=False, actor=True, pure=False)
            for address in addresses
        ]
        self._workers = [future.result() for future in self._futures]
        self.greet(torch)

    def one(self, method: str, *args: Any) -> Any:
        return getattr(self._workers[0], method)(*args).result()

    def all(self, method: str, *args: Any) -> list[Any]:
        return [future.result() for future in [getattr(worker, method)(*args) for worker in self._workers]]

    def flight_one(self, values: Sequence[Any]) -> None:
        worker = self._workers[0]
        for future in [worker.echo(value) for value in values]:
            future.result()

    def flight_all(self, values: Sequence[Any]) -> None:
        for future in [worker.echo(value) for value in values for worker in self._workers]:
            future.result()

    def close(self) -> None:
        self._workers = self._futures = []
        self._cluster.scale(0)
        while self._client.scheduler_info(n_workers=-1)["workers"]:
            time.sleep(0.01)


class Dask(base.System):
    def start(self) -> None:
        import dask
        import distributed

        dask.config.set({"distributed.logging.distributed": "critical"})
        for name in ("", ".nanny", ".worker", ".scheduler", ".client", ".core"):
            logging.getLogger(f"distributed{name}").setLevel(logging.CRITICAL)
        self._cluster = distributed.LocalCluster(
            n_workers=0, threads_per_worker=1, processes=True, dashboard_address=None, memory_limit=0
        )
        self._client = distributed.Client(self._cluster, direct_to_workers=True)

    def spawn(self, count: int, torch: bool) -> base.Pool:
        return DaskPool(self._cluster, self._client, count, torch)

    def stop(self) -> None:
        self._client.close(timeout=5)
        self._cluster.close(timeout=10)


SYSTEM = Dask()
