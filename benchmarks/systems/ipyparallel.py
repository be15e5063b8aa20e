"""ipyparallel: a local controller with engines, one direct view for all of them and one for the first."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from systems import base


class EnginePool(base.Pool):
    def __init__(self, cluster: Any, count: int, torch: bool) -> None:
        from systems import ipyparallel_engine as engine

        self._engine = engine
        self._cluster = cluster
        client = cluster.connect_client_sync()
        cluster.start_engines_sync(count)
        client.wait_for_engines(count, timeout=120, interactive=False)
        ids = sorted(client.ids)[-count:]
        self._first, self._all = client[ids[0]], client[ids]
        self.greet(torch)

    def one(self, method: str, *args: Any) -> Any:
        return self._first.apply_sync(self._engine.invoke, method, *args)

    def all(self, method: str, *args: Any) -> list[Any]:
        return self._all.apply_sync(self._engine.invoke, method, *args)

    def flight_one(self, values: Sequence[Any]) -> None:
        for result in [self._first.apply_async(self._engine.invoke, "echo", value) for value in values]:
            result.get()

    def flight_all(self, values: Sequence[Any]) -> None:
        for result in [self._all.apply_async(self._engine.invoke, "echo", value) for value in values]:
            result.get()

    def close(self) -> None:
        self._cluster.stop_engines_sync()


class Ipyparallel(base.System):
    def start(self) -> None:
        import ipyparallel

        self._cluster = ipyparallel.Cluster(log_level=logging.ERROR)
        self._cluster.start_controller_sync()

    def spawn(self, count: int, torch: bool) -> base.Pool:
        return EnginePool(self._cluster, count, torch)

    def stop(self) -> None:
        self._cluster.stop_cluster_sync()


SYSTEM = Ipyparallel()
