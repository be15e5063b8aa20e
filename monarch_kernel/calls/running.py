"""Calls that may still run, to be awaited or stopped."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

from monarch._kernel_api import (
    Gather,
    ServiceAnswers,
    current_node,
    host_of,
    interrupt,
    is_dict,
    request,
    states,
)
from monarch.exceptions import CallTimeoutError
from monarch_kernel.calls.delivery import deliver
from monarch_kernel.calls.record import ahead_of

STOPPED = "a stop aborted a collective; the next use of the group recreates it"


class PendingCall(NamedTuple):
    """An unanswered call of one rank."""

    rank: int
    proc: str
    key: str
    """Key of the actor's mesh."""
    port: int
    """The port that awaits the answer."""


class _Ends:
    """Waits for ranks to end calls whose wait a death has ended."""

    def __init__(self, calls: RunningCalls) -> None:
        self._calls = calls
        self.thread: Any = None
        """See Waiter."""

    @property
    def done(self) -> bool:
        """Whether all ranks have ended."""
        return not self._calls.count()


class RunningCalls:
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

    def tasks(self) -> dict[int, PendingCall]:
        """Return the unanswered calls, by a number that each call of a rank keeps."""
        tasks: dict[int, PendingCall] = {}
        first = 0
        for future in self.futures:
            waiting = {peer.proc for peer in future.waits_for()}
            for position, peer in enumerate(future.targets if waiting else ()):
                if peer.proc in waiting:
                    rank = future.base_rank(position)
                    tasks[first + position] = PendingCall(rank, peer.proc, future.actor, future.port)
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
        tasks: Iterable[PendingCall],
        service: Callable[..., Any],
        args: tuple[Any, ...] = (),
        heard: Callable[[str, int, Any], None] = lambda proc, port, answer: None,
    ) -> list[ServiceAnswers]:
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
            ServiceAnswers(
                node,
                procs,
                request(service, key, node.proc, port, *args),
                lambda proc, answer, port=port: heard(proc, port, answer),
                urgent=True,
            )
            for (key, port), procs in calls.items()
        ]

    def states(
        self, tasks: Iterable[PendingCall], heard: Callable[[str, str, int, float, float], None]
    ) -> list[ServiceAnswers]:
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
        answers = [
            ServiceAnswers(node, [f"{host}/agent"], states(sorted(procs)), take) for host, procs in hosts.items()
        ]
        node.hosts.hurry(hosts)
        return answers

    def interrupt(self, tasks: Collection[PendingCall] | None = None) -> None:
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

    def settle(self, seconds: float | None) -> bool:
        """Wait for ranks that still run after a death has ended the wait for them; return whether they have ended.

        Args:
            seconds: how long to wait; None for no bound.
        """
        if not self.count():
            return True
        ends = _Ends(self)
        # A Stop may wait for them too, in another thread.
        mine = [future for future in self.futures if future.waiter is None]
        for future in mine:
            future.waiter = ends
        try:
            return current_node().receive_loop.wait(ends, seconds)
        finally:
            for future in mine:
                if future.waiter is ends:
                    future.waiter = None

    def wait(self, until: float | None = None) -> bool:
        """Wait for all ranks until a time of the monotonic clock; return whether all have ended."""
        for future in self.futures:
            left = None if until is None else max(0.0, until - time.monotonic())
            try:
                future.exception(left)
            except CallTimeoutError:
                return False
        return True
