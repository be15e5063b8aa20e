"""A cell that runs on ranks: sent, awaited, and its outcome on each rank."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast

from monarch._kernel_api import (
    ActorMesh,
    Answers,
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
    host_of,
    interrupt,
    is_dict,
    request,
    run_in_actor,
    split_proc,
    state_of,
    states,
    tell_proc,
)
from monarch.exceptions import ActorError, CallTimeoutError, DeviceMeshError, GroupError, MonarchError
from monarch_kernel.calls.delivery import await_delivery, deliver
from monarch_kernel.calls.record import ahead_of
from monarch_kernel.source.cell import Source

STOPPED = "a stop aborted a collective; the next use of the group recreates it"


def _reason(error: BaseException) -> str:
    """Return in one line why a call has no result of a live rank."""
    reason = error.reason if isinstance(error, DeviceMeshError) else ""
    return reason or str(error).partition("\n")[0]


def has_waited(error: CellError) -> bool:
    """Return whether an error only says that others left a collective."""
    return error.freed or error.broken


def ended_from_outside(error: CellError) -> bool:
    """Return whether an error only says that a rank was ended from outside, or that others left a collective."""
    return error.interrupted or error.cut_off or has_waited(error)


def _freed(result: CellResult, dead: list[int]) -> CellResult:
    """Return the same error for all ranks that waited for dead ones in a collective, with the reason."""
    error = result.error
    if error is None:
        return result
    if not has_waited(error):
        # A rank that entered a collective after the death names the dead rank itself.
        late = error.kind == GroupError.__name__
        return replace(result, error=replace(error, freed=True)) if late else result
    return _instead(result, f"a collective was aborted by the death of {describe_ranks(dead)}")


def _followed(outcomes: dict[int, CellResult]) -> dict[int, CellResult]:
    """Return outcomes in which the broken collectives of some ranks follow from the failures of others.

    Connections that a failing rank closes may be noticed before the news of its failure.
    """
    causes = sorted(
        rank
        for rank, result in outcomes.items()
        if result.error is not None and not (has_waited(result.error) or result.error.cut_off)
    )
    if not causes:
        return outcomes
    have = "has" if len(causes) == 1 else "have"
    text = f"a connection of the collective was closed, and {describe_ranks(causes)} {have} failed"
    return {rank: _instead(result, text) if _only_broke(result) else result for rank, result in outcomes.items()}


def _only_broke(result: CellResult) -> bool:
    return result.error is not None and result.error.broken and not result.error.freed


def _instead(result: CellResult, text: str) -> CellResult:
    """Return the result of a rank that was freed from a collective, with a reason in place of torch's error."""
    assert result.error is not None
    kind = GroupError.__name__
    trace = result.error.trace.rpartition(f"{result.error.kind}: ")[0]
    error = replace(result.error, kind=kind, text=text, trace=f"{trace}{kind}: {text}", freed=True)
    return replace(result, error=error)


class Task(NamedTuple):
    """An unanswered call of one rank."""

    rank: int
    proc: str
    key: str
    """Key of the actor's mesh."""
    port: int
    """The port that awaits the answer."""


class Running:
    """Calls that may still run, to be awaited or stopped.

    Args:
        name: file name in the frames of their code, for a cell.
        futures: the futures of the calls.
        main: keys of actors that run cells in main threads, where a signal always reaches them.
    """

    def __init__(self, name: str, futures: list[Gather[Any]], main: frozenset[str] = frozenset()) -> None:
        self.name = name
        self.futures = futures
        self.main = main

    @property
    def done(self) -> bool:
        """Whether all ranks have ended."""
        # For each message that arrives while a cell waits, so without a generator.
        for future in self.futures:  # noqa: SIM110
            if not future.done:
                return False
        return True

    def tasks(self) -> dict[int, Task]:
        """Return the unanswered calls, by a number that each call of a rank keeps."""
        tasks: dict[int, Task] = {}
        first = 0
        for future in self.futures:
            waiting = {peer.proc for peer in future.waits_for()}
            for position, peer in enumerate(future.targets if waiting else ()):
                if peer.proc in waiting:
                    rank = future.base_rank(position)
                    tasks[first + position] = Task(rank, peer.proc, future.actor, future.port)
            first += len(future.targets)
        return tasks

    def missing(self) -> list[int]:
        """Return the ranks that have not answered."""
        return sorted({task.rank for task in self.tasks().values()})

    def count(self) -> int:
        """Return the number of unanswered calls."""
        return sum(len(future.waits_for()) for future in self.futures)

    def ask(
        self,
        tasks: Iterable[Task],
        service: Callable[..., Any],
        args: tuple[Any, ...] = (),
        heard: Callable[[str, int, Any], None] = lambda proc, port, answer: None,
    ) -> list[Answers]:
        """Ask the processes of some calls for a service, in one message for all ranks of a call.

        Args:
            tasks: the calls.
            service: called with the actor, the caller and the port of the call, then ``args``.
            args: more arguments.
            heard: called with process, port and answer, in the receiving thread.
        """
        node = current_node()
        calls: dict[tuple[str, int], list[str]] = {}
        for task in tasks:
            calls.setdefault((task.key, task.port), []).append(task.proc)
        return [
            Answers(
                node,
                procs,
                request(service, key, node.proc, port, *args),
                lambda proc, answer, port=port: heard(proc, port, answer),
                urgent=True,
            )
            for (key, port), procs in calls.items()
        ]

    def states(self, tasks: Iterable[Task], heard: Callable[[str, str, int, float, float], None]) -> list[Answers]:
        """Ask the host agents for the states of processes.

        Args:
            tasks: the calls.
            heard: called in the receiving thread with process, state letter, pid, and seconds with and without a CPU.
        """
        hosts: dict[str, set[str]] = {}
        for task in tasks:
            hosts.setdefault(host_of(task.proc), set()).add(task.proc)

        def take(_: str, answer: Any) -> None:
            # Anything else is an error of the agent.
            if is_dict(answer):
                for proc, state in answer.items():
                    heard(proc, *state)

        node = current_node()
        answers = [Answers(node, [f"{host}/agent"], states(sorted(procs)), take) for host, procs in hosts.items()]
        node.hosts.hurry(hosts)
        return answers

    def interrupt(self, tasks: Collection[Task] | None = None) -> None:
        """Raise KeyboardInterrupt in these calls, but not in earlier calls that they wait for."""
        meant = list(self.tasks().values() if tasks is None else tasks)
        node = current_node()
        # After a death, an earlier call that these wait for may be given up too, and would get their signal.
        given_up = {future.port for future in self.futures if future.done}
        queued = {
            (future.port, proc) for future in self.futures for each in ahead_of(node, [future]) for proc in each.procs
        }
        signalled = [
            task
            for task in meant
            if task.key in self.main and (task.port, task.proc) not in queued and task.port not in given_up
        ]
        if signalled:
            deliver([task.proc for task in signalled], signal.SIGINT)
        # For these, a signal would hit whatever else runs in the main thread.
        for each in self.ask([task for task in meant if task not in signalled], interrupt):
            each.close()

    def wait(self, until: float | None = None) -> bool:
        """Wait for all ranks until a time of the monotonic clock; return whether all have ended."""
        for future in self.futures:
            left = None if until is None else max(0.0, until - time.monotonic())
            try:
                future.exception(left)
            except CallTimeoutError:
                return False
        return True


def _drop(future: Gather[Any]) -> None:
    """Take a call from the queues of the ranks that have not begun it."""
    node = current_node()
    for peer in future.waits_for():
        tell_proc(node, peer.proc, drop, future.actor, node.proc, future.port)


def _take_back(running: Running) -> None:
    """End calls that were sent to some of the ranks only."""
    for future in running.futures:
        _drop(future)
    running.interrupt()


class Run(Running):
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
        source: Source,
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
                f"late interrupt could reach this cell; run it again, and if this repeats, check whether the agent is "
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
            _take_back(Running(name, futures))
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
                outcomes[rank] = value if value is not None else self._failed(failed, death, gone)
        if dead:
            outcomes = {rank: _freed(result, sorted(dead)) for rank, result in outcomes.items()}
        return _followed(outcomes)

    def _advised(self, error: BaseException | None) -> str:
        """Return the lines below a death; its advice, to replace the dead ranks, may have been followed since."""
        lines = str(error).splitlines()[1:]
        advice = error.advice.splitlines() if isinstance(error, DeviceMeshError) else []
        procs = [peer.proc for future in self.futures for peer in future.targets if peer.dead is not None]
        ranks = sorted(rank for proc in procs for _, rank in [split_proc(proc)] if self._procs.proc(rank) != proc)
        if lines and len(ranks) == len(procs):
            have = "has a new process" if len(ranks) == 1 else "have new processes"
            lines = [*lines[: len(lines) - len(advice)], f"{describe_ranks(ranks)} {have} by now; run the cell again"]
        return "\n".join(lines)

    def _failed(self, error: BaseException | None, dead: Dead | None, gone: list[int]) -> CellResult:
        """Return the result of a rank without an answer: it died, or was interrupted because others died."""
        if dead is None and gone:
            text = f"interrupted because {describe_ranks(gone)} died"
            return CellResult(None, None, CellError("Interrupted", text, 0, "", "", True, cut_off=True), 0.0)
        if dead is None:
            text = _reason(error) if error is not None else "no answer"
            return CellResult(None, None, CellError(type(error).__name__, text, 0, "", str(error), False), 0.0)
        here = dead.at is not None and self.name == f"cell [{dead.at.number}]"
        line = dead.at.line if dead.at is not None and here else 0
        lines = self.source.typed.splitlines()
        source = lines[line - 1].strip() if 0 < line <= len(lines) else ""
        # Its last output, and the ranks that are alive.
        more = self._advised(error)
        failed = CellError(
            type(error).__name__,
            f"the process {describe(dead.cause, None if here else dead.at)}",
            line,
            source,
            more,
            False,
            reached=line,
        )
        return CellResult(None, None, failed, 0.0)
