"""A cell that runs on ranks: sent, awaited, and what came of it on each."""

from __future__ import annotations

import re
import signal
import time
from dataclasses import replace
from typing import Any

from monarch._actors.actormesh import ActorMesh
from monarch._actors.call import Endpoint
from monarch._actors.cells import FUNCTION
from monarch._actors.services import ask, send_signal
from monarch._cells.execute import CellError, CellResult
from monarch._core.ranks import describe_ranks
from monarch._core.region import Region
from monarch._wire.messages import Dead
from monarch.exceptions import ActorError, CallTimeoutError, DeviceMeshError

_BUSY = "monarch._cells.busy"
_GROUPS = "monarch._actors.membership"
STOPPED = "a stop has ended a collective half way; use the group again to make it anew"
_INSIDE = "monarch._cells.inside:run_in_actor"


_DEAD = "SupervisionError"
_BROKEN = re.compile(r"gloo|NCCL|Connection (closed|reset) by peer")
"""What torch says of a collective whose connections are gone."""


def _freed(result: CellResult, dead: list[int]) -> CellResult:
    """What a rank has raised that waited for dead ones in a collective: of all that do so the same, and why."""
    error = result.error
    if error is None or error.kind not in ("RuntimeError", "DistBackendError") or not _BROKEN.search(error.text):
        return result
    text = f"a collective was broken off by the death of {describe_ranks(dead)}"
    trace = error.trace.rpartition(f"{error.kind}: ")[0]
    return replace(result, error=replace(error, kind="GroupError", text=text, trace=f"{trace}{error.kind}: {text}"))


class Running:
    """Calls that ranks may still be at, to be awaited or stopped.

    Args:
        name: what the frames of their code call its file, if it is a cell.
        futures: of the calls.
    """

    def __init__(self, name: str, futures: list[Any]) -> None:
        self.name = name
        self.futures = futures

    @property
    def done(self) -> bool:
        """Whether all ranks have ended."""
        return all(future.done for future in self.futures)

    def at_work(self) -> list[tuple[int, ActorMesh, int]]:
        """The ranks that have not answered: each with its actor, and the port where the answer is awaited."""
        found: list[tuple[int, ActorMesh, int]] = []
        for future in self.futures:
            mesh: ActorMesh | None = future._runtime.meshes.get(future.actor)
            if mesh is None:
                # Nobody holds it any more, so nobody can stop it.
                continue
            for peer in future.waits_for():
                rank = mesh._state.procs.rank_of(peer.proc)
                found.append((rank, mesh._view(Region((), rank, (), ())), future.port))
        return found

    def missing(self) -> list[tuple[int, ActorMesh]]:
        """The ranks that have not answered, each with its actor."""
        return [(rank, member) for rank, member, _ in self.at_work()]

    def interrupt(self) -> None:
        """Raises KeyboardInterrupt in what they run; a signal would go to whatever else is in their main threads."""
        for _, member, port in self.at_work():
            ask(member, "monarch._actors.interrupts:interrupt", member._key, port)

    def doing(self) -> list[tuple[int, Any]]:
        """What the ranks do that have not answered: a future for each."""
        return [(rank, ask(each, f"{_BUSY}:doing_in_actor", self.name, each._key)) for rank, each in self.missing()]

    def abort(self) -> list[tuple[int, Any]]:
        """Closes the connections of collectives that they may wait in: of each a future, of how many there were."""
        return [(rank, ask(mesh, f"{_GROUPS}:spoil", STOPPED)) for rank, mesh in self.missing()]

    def wait(self, until: float | None = None) -> bool:
        """Waits for all ranks, until a time of the monotonic clock; whether all have ended."""
        for future in self.futures:
            left = None if until is None else max(0.0, until - time.monotonic())
            try:
                future.exception(left)
            except CallTimeoutError:
                return False
        return True


class Run(Running):
    """One cell on some ranks.

    Args:
        name: what tracebacks call the cell.
        source: its text.
        views: the namespaces that it runs in; their ranks together are those of the cell.
        port: takes what is displayed meanwhile.
        inside: whether the views are of any actors, inside which the cell runs, and not of namespaces.
    """

    def __init__(self, name: str, source: str, views: list[ActorMesh], port: Any, inside: bool = False) -> None:
        self.views = views
        self.source = source
        self._inside = inside
        self.ranks = [view._region.base_rank(position) for view in views for position in range(len(view))]
        endpoints = [Endpoint[..., Any](view, _INSIDE, None, FUNCTION) if inside else view.run for view in views]
        super().__init__(name, [endpoint.call(source, name, port) for endpoint in endpoints])

    def at_work(self) -> list[tuple[int, ActorMesh, int]]:
        return [
            (view._region.base_rank(position), view._member(position), future.port)
            for view, future in zip(self.views, self.futures, strict=True)
            for waiting in [{peer.proc for peer in future.waits_for()}]
            for position in range(len(view))
            if future.targets[position].proc in waiting
        ]

    def interrupt(self) -> None:
        if self._inside:
            super().interrupt()
        else:
            # Namespaces live in the main threads; and a signal reaches them whatever the thread that receives does.
            for _, mesh in self.missing():
                send_signal(mesh, signal.SIGINT)

    def doing(self) -> list[tuple[int, Any]]:
        if self._inside:
            return super().doing()
        return [(rank, ask(mesh, f"{_BUSY}:doing", self.name)) for rank, mesh in self.missing()]

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
            for position, (rank, value) in enumerate(zip(ranks, values, strict=True)):
                found[rank] = value if value is not None else self._failed(failed, future.targets[position].dead)
        dead = [rank for rank, result in found.items() if result.error is not None and result.error.kind == _DEAD]
        if dead:
            found = {rank: _freed(result, sorted(dead)) for rank, result in found.items()}
        return found

    def _failed(self, error: BaseException | None, dead: Dead | None) -> CellResult:
        """A rank that gave no answer: it has died, or was given up when others had."""
        if dead is None:
            text = str(error).splitlines()[0].partition("failed: ")[2] if error is not None else "no answer"
            return CellResult(None, None, CellError(type(error).__name__, text, 0, "", str(error), False), 0.0)
        at = re.search(rf" at {re.escape(self.name)} line (\d+)$", dead.reason)
        line = int(at[1]) if at is not None else 0
        lines = self.source.splitlines()
        source = lines[line - 1].strip() if 0 < line <= len(lines) else ""
        text = f"the process {dead.reason[: at.start()] if at is not None else dead.reason}"
        # Its last words, and who is alive.
        more = "\n".join(str(error).splitlines()[1:])
        return CellResult(None, None, CellError(type(error).__name__, text, line, source, more, False), 0.0)
