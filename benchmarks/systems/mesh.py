"""This project and torchmonarch: both offer ``monarch.actor``, so one program serves for both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from systems import base


class MeshPool(base.Pool):
    def __init__(self, count: int, torch: bool) -> None:
        from monarch.actor import this_host
        from systems.mesh_actor import BenchActor

        self.procs = this_host().spawn_procs({"gpus": count})
        self.mesh = self.procs.spawn("bench", BenchActor)
        self.first = self.mesh.slice(gpus=0)
        self.greet(torch)

    def one(self, method: str, *args: Any) -> Any:
        return getattr(self.first, method).call_one(*args).get()

    def all(self, method: str, *args: Any) -> list[Any]:
        return list(getattr(self.mesh, method).call(*args).get().values())

    def flight_one(self, values: Sequence[Any]) -> None:
        for future in [self.first.echo.call_one(value) for value in values]:
            future.get()

    def flight_all(self, values: Sequence[Any]) -> None:
        for future in [self.mesh.echo.call(value) for value in values]:
            future.get()

    def close(self) -> None:
        self.procs.stop().get(timeout=60)


class Mesh(base.System):
    def start(self) -> None:
        from monarch.actor import this_host

        this_host()

    def spawn(self, count: int, torch: bool) -> base.Pool:
        return MeshPool(count, torch)

    def reads(self, size: int, transport: str = "") -> base.Task:
        from systems.mesh_memory import Reads

        return Reads(size, transport)

    def states(self, ranks: int) -> base.Task:
        from systems.mesh_memory import States

        return States(ranks)

    def groups(self, ranks: int) -> base.Task:
        from systems.mesh_training import FirstSums

        return FirstSums(ranks)

    def failures(self, kind: str) -> base.Task:
        from systems.mesh_failures import failures

        return failures(kind)

    def training(self, model: str, hand: bool = False) -> base.Task:
        from systems.mesh_training import Training

        return Training(model, hand)

    def recorded(self, model: str) -> base.Task:
        from systems.mesh_recorded import Recorded

        return Recorded(model)

    def stop(self) -> None:
        from monarch.actor import shutdown_context

        shutdown_context().get(timeout=60)


SYSTEM = Mesh()
