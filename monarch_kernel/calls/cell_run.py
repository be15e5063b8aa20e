"""A cell that runs on ranks: sent, and its outcome on each rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

from monarch._kernel_api import (
    ActorMesh,
    CallGroup,
    CellError,
    CellResult,
    Dead,
    Gather,
    at_once,
    called,
    current_node,
    describe,
    describe_ranks,
    drop,
    endpoint_of,
    run_in_actor,
    split_proc,
    state_of,
    tell_proc,
)
from monarch.exceptions import ActorError, DeviceMeshError, MonarchError
from monarch_kernel.calls.caused_errors import followed, freed
from monarch_kernel.calls.delivery import await_delivery
from monarch_kernel.calls.running import RunningCalls
from monarch_kernel.source.cell import CellSource, as_typed


def _reason(error: BaseException) -> str:
    """Return in one line why a call has no result of a live rank."""
    reason = error.reason if isinstance(error, DeviceMeshError) else ""
    return reason or str(error).partition("\n")[0]


def _drop(future: Gather[Any]) -> None:
    """Take a call from the queues of the ranks that have not begun it."""
    node = current_node()
    for peer in future.waits_for():
        tell_proc(node, peer.proc, drop, future.actor, node.proc, future.port)


def _take_back(running: RunningCalls) -> None:
    """End calls that were sent to some of the ranks only."""
    for future in running.futures:
        _drop(future)
    running.interrupt()


class Run(RunningCalls):
    """One cell on some ranks.

    Args:
        name: the name of the cell in tracebacks.
        source: its text and code.
        views: the namespaces that it runs in; together they hold the ranks of the cell.
        port: receives its displays.
        inside: whether the views are of user actors, inside which the cell runs, rather than of namespaces.
        on_failure: called once if ranks fail while others still run, in the receiving thread.
    """

    def __init__(
        self,
        name: str,
        source: CellSource,
        views: list[ActorMesh],
        port: Any,
        inside: bool = False,
        on_failure: Callable[[Run], None] | None = None,
    ) -> None:
        self.source = source
        self._procs = state_of(views[0]).procs
        self.told: set[int] = set()
        """Ranks whose errors were shown while others still ran."""
        late = await_delivery()
        if late:
            raise MonarchError(
                f"the cell was not run: the host agent of {', '.join(late)} has not acknowledged the last Stop, so a "
                f"late interrupt could reach this cell; retry, and if it happens again, check whether the agent is "
                f"suspended"
            )
        endpoints = [endpoint_of(view, run_in_actor) if inside else view.run for view in views]
        futures: list[Gather[Any]] = []
        try:
            with at_once(), called(name):
                for endpoint in endpoints:
                    futures.append(cast("Gather[Any]", endpoint.call(source.code, name, port, source.shown)))
        except BaseException:
            # The ranks of the other views do not run it.
            _take_back(RunningCalls(name, futures))
            raise
        super().__init__(name, futures, frozenset() if inside else frozenset(future.actor for future in futures))
        # As sent: a resize changes the views.
        self._ranks_of = [[future.base_rank(position) for position in range(len(future.targets))] for future in futures]
        """The ranks of each of the futures."""
        self.ranks = [rank for ranks in self._ranks_of for rank in ranks]
        for future in futures:
            # When a rank dies, the others are interrupted. Those that have not begun are told at once: an interrupt of
            # the cell before would let them begin.
            future.goes_on = False
            future.on_loss = partial(_drop, future)
            if any(peer.dead is not None for peer in future.targets):
                _drop(future)
        CallGroup(self.futures, (lambda: on_failure(self)) if on_failure is not None else None, alike=True).join()

    def failures(self) -> dict[int, CellError]:
        """Return the errors of ranks that have failed so far; others may still run."""
        errors: dict[int, CellError] = {}
        for future, ranks in zip(self.futures, self._ranks_of, strict=True):
            for position, result in future.outcomes().items():
                if result.error is not None:
                    errors[ranks[position]] = result.error
        return errors

    def results(self) -> dict[int, CellResult]:
        """Return the outcome on each finished rank; a missing result is an error of that rank."""
        outcomes: dict[int, CellResult] = {}
        dead: list[int] = []
        for future, ranks in zip(self.futures, self._ranks_of, strict=True):
            if not future.done:
                continue
            failed: BaseException | None = None
            try:
                values: list[Any] = list(future.get().values())
            except (ActorError, DeviceMeshError) as error:
                failed = error
                values = list(error.results.values()) if error.results is not None else [None] * len(ranks)
            gone = [ranks[position] for position, peer in enumerate(future.targets) if peer.dead is not None]
            for position, (rank, value) in enumerate(zip(ranks, values, strict=True)):
                death = future.targets[position].dead
                if value is None and death is not None:
                    dead.append(rank)
                runs = future.targets[position] in future.waits_for()
                outcomes[rank] = value if value is not None else self._failed(failed, death, gone, runs)
        if dead:
            outcomes = {rank: freed(result, sorted(dead)) for rank, result in outcomes.items()}
        return followed(outcomes)

    def _below(self, error: BaseException | None) -> tuple[str, str]:
        """Return the lines below a death, and its advice to replace the dead ranks, which may be followed by now."""
        lines = str(error).splitlines()[1:]
        advice = error.advice if isinstance(error, DeviceMeshError) else ""
        lines = lines[: len(lines) - len(advice.splitlines())]
        procs = [peer.proc for future in self.futures for peer in future.targets if peer.dead is not None]
        ranks = sorted(rank for proc in procs for _, rank in [split_proc(proc)] if self._procs.proc(rank) != proc)
        if advice and len(ranks) == len(procs):
            have = "has a new process" if len(ranks) == 1 else "have new processes"
            advice = f"{describe_ranks(ranks)} {have} now; run the cell again"
        return "\n".join(lines), advice

    def _failed(self, error: BaseException | None, dead: Dead | None, gone: list[int], runs: bool) -> CellResult:
        """Return the result of a rank without an answer: it died, or was interrupted because others died."""
        if dead is None and gone:
            text = f"interrupted because {describe_ranks(gone)} died"
            if runs:
                text += ", but still running; Stop interrupts again, %mesh kill replaces the process"
            return CellResult(None, None, CellError("Interrupted", text, 0, "", "", True, cut_off=True), 0.0)
        if dead is None:
            text = _reason(error) if error is not None else "no answer"
            return CellResult(None, None, CellError(type(error).__name__, text, 0, "", str(error), False), 0.0)
        here = dead.at is not None and self.name == f"cell [{dead.at.number}]"
        line = dead.at.line if dead.at is not None and here else 0
        lines = self.source.typed.splitlines()
        source = as_typed(lines[line - 1]) if 0 < line <= len(lines) else ""
        # Its last output, and the ranks that are alive.
        more, advice = self._below(error)
        failed = CellError(
            type(error).__name__,
            f"the process {describe(dead.cause, None if here else dead.at)}",
            line,
            source,
            more,
            False,
            reached=line,
            hint=advice,
        )
        return CellResult(None, None, failed, 0.0)
