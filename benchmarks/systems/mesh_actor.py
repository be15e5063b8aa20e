"""The worker as an actor."""

from __future__ import annotations

from typing import Any

from monarch.actor import Actor, endpoint
from systems.base import Worker


class BenchActor(Actor):
    def __init__(self) -> None:
        self.worker = Worker()

    @endpoint
    def echo(self, value: Any) -> Any:
        return value

    @endpoint
    def ready(self) -> int:
        return self.worker.ready()

    @endpoint
    def cpu(self) -> float:
        return self.worker.cpu()

    @endpoint
    def touch(self, array: Any) -> float:
        return self.worker.touch(array)

    @endpoint
    def keep(self, kind: str, size: int) -> int:
        return self.worker.keep(kind, size)

    @endpoint
    def fetch(self) -> Any:
        return self.worker.fetch()
