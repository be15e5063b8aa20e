"""A cell that runs on ranks: sent, awaited, and what came of it on each."""

from __future__ import annotations

import time
from typing import Any

from monarch._actors.actormesh import ActorMesh
from monarch._actors.call import Endpoint
from monarch._actors.cells import FUNCTION
from monarch._actors.services import send_signal
from monarch._cells.execute import CellError, CellResult
from monarch.exceptions import ActorError, CallTimeoutError, DeviceMeshError

_INSIDE = "monarch._cells.execute:run_in_actor"


class Run:
    """One cell on some ranks.

    Args:
        name: what tracebacks call the cell.
        source: its text.
        views: the namespaces that it runs in; their ranks together are those of the cell.
        port: takes what is displayed meanwhile.
        inside: whether the views are of any actors, inside which the cell runs, and not of namespaces.
    """

    def __init__(self, name: str, source: str, views: list[ActorMesh], port: Any, inside: bool = False) -> None:
        self.name = name
        self.views = views
        self.ranks = [view._region.base_rank(position) for view in views for position in range(len(view))]
        endpoints = [Endpoint[..., Any](view, _INSIDE, None, FUNCTION) if inside else view.run for view in views]
        self.futures: list[Any] = [endpoint.call(source, name, port) for endpoint in endpoints]

    @property
    def done(self) -> bool:
        """Whether all ranks have ended."""
        return all(future.done for future in self.futures)

    def missing(self) -> list[tuple[int, ActorMesh]]:
        """The ranks where it still runs, each with its namespace."""
        found: list[tuple[int, ActorMesh]] = []
        for view, future in zip(self.views, self.futures, strict=True):
            waiting = {peer.proc for peer in future.waits_for()}
            for position in range(len(view)):
                if future.targets[position].proc in waiting:
                    found.append((view._region.base_rank(position), view._member(position)))
        return found

    def signal(self, number: int) -> None:
        """Sends a signal to the ranks where it still runs."""
        for _, mesh in self.missing():
            send_signal(mesh, number)

    def wait(self, until: float | None = None) -> bool:
        """Waits for all ranks, until a time of the monotonic clock; whether all have ended."""
        for future in self.futures:
            left = None if until is None else max(0.0, until - time.monotonic())
            try:
                future.exception(left)
            except CallTimeoutError:
                return False
        return True

    def results(self) -> dict[int, CellResult]:
        """What came of it on each rank that has ended; what cannot be had is an error of that rank."""
        found: dict[int, CellResult] = {}
        for view, future in zip(self.views, self.futures, strict=True):
            ranks = [view._region.base_rank(position) for position in range(len(view))]
            if not future.done:
                continue
            failed: BaseException | None = None
            try:
                values: list[Any] = list(future.get().values())
            except (ActorError, DeviceMeshError) as error:
                failed = error
                values = list(error.results.values()) if error.results is not None else [None] * len(ranks)
            for rank, value in zip(ranks, values, strict=True):
                found[rank] = value if value is not None else _failed(failed)
        return found


def _failed(error: BaseException | None) -> CellResult:
    text = str(error).splitlines()[0].partition("failed: ")[2] if error is not None else "no answer"
    return CellResult(None, None, CellError(type(error).__name__, text, 0, "", str(error), False), 0.0)
