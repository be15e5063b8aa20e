"""Fail fast: when ranks of a call fail, those that wait for them in a collective are freed, so that the call ends.

It costs nothing as long as nothing fails. ``_core/fail_fast.py`` decides what to do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from threading import RLock
from typing import TYPE_CHECKING, Any

from monarch._actors.services import Answers
from monarch._core.fail_fast import Command, FailFast, Free, Look, Standing, Tell
from monarch._core.ranks import describe_ranks

if TYPE_CHECKING:
    from monarch._actors.gather import Gather

_STANDING = "monarch._actors.standing:standing"
_EXPECT = "monarch._actors.standing:expect"
_FREE = "monarch._actors.standing:free"
_SPOIL = "monarch._actors.membership:spoil_round"
_INTERRUPT = "monarch._actors.interrupts:interrupt"


class Party:
    """Calls whose ranks belong together: most often one call.

    Timers and replies run its methods, so none of them waits or runs code of the user.

    Args:
        gathers: the calls.
        on_failure: told once that ranks have failed while others still run, in the thread that receives.
    """

    def __init__(self, gathers: Sequence[Gather[Any]], on_failure: Callable[[], None] | None = None) -> None:
        self._gathers = gathers
        self._runtime = gathers[0]._runtime
        self._on_failure = on_failure
        self._tasks = [(gather, position) for gather in gathers for position in range(len(gather.targets))]
        self._lock = RLock()
        # All of these with the lock.
        self._machine: FailFast | None = None
        """There once a rank has failed."""
        self._failed: set[int] = set()
        self._answers: list[Answers] = []
        """Of the last look."""
        self._serial = 0
        """Of the timer that counts."""
        self._expected = False
        """Whether all know that some are freed."""

    def join(self) -> None:
        """Watches over the calls as one; some of their ranks may have failed by now."""
        for gather in self._gathers:
            gather.party = self
        for gather in self._gathers:
            for position in gather.failed_positions():
                self.failed(gather, position)

    def failed(self, gather: Gather[Any], position: int) -> None:
        """The code of a rank has raised."""
        with self._lock:
            if self._machine is None:
                if not any(each.waits_for() for each in self._gathers):
                    return
                self._machine = FailFast(len(self._tasks), time.monotonic())
                self._schedule()
            task = self._tasks.index((gather, position))
            self._failed.add(task)
            self._machine.failed(task)

    def completed(self) -> None:
        """One of the calls is about to end. Groups from which ranks were cut off are of no use to the others either."""
        with self._lock:
            if self._machine is None or any(each.waits_for() for each in self._gathers):
                return
            freed, number = self._machine.freed, self._machine.round
            self._forget()
        if freed:
            # Also those that were not called: they are of the same groups.
            meshes = {gather.view._state.procs for gather in self._gathers if gather.view is not None}
            ranks = [procs.proc(rank) for procs in meshes for rank in range(procs.size)]
            Answers(self._runtime, ranks, _SPOIL, (self._reason(), number)).close()

    def _forget(self) -> None:
        answers, self._answers = self._answers, []
        for each in answers:
            each.close()

    def _reason(self) -> str:
        freed = self._machine.freed if self._machine is not None else set[int]()
        # What others have raised since they were freed is no cause.
        causes = [self._tasks[task] for task in self._failed - freed or self._failed]
        ranks = sorted({gather.base_rank(position) for gather, position in causes})
        return (
            f"the collective could not end, since {describe_ranks(ranks)} failed before joining it; "
            f"use the group again to make it anew"
        )

    # Looking

    def _schedule(self) -> None:
        assert self._machine is not None
        self._serial += 1
        serial = self._serial
        self._runtime.pump.call_later(max(0.0, self._machine.due - time.monotonic()), lambda: self._tick(serial))

    def _tick(self, serial: int) -> None:
        told = False
        with self._lock:
            machine = self._machine
            if machine is None or serial != self._serial or self._runtime.closed:
                return
            waiting = {id(gather): {peer.proc for peer in gather.waits_for()} for gather in self._gathers}
            for task, (gather, position) in enumerate(self._tasks):
                if gather.done or gather.targets[position].proc not in waiting[id(gather)]:
                    machine.ended(task)
            for command in machine.tick(time.monotonic()):
                if isinstance(command, Look):
                    self._forget()
                    self._answers = self._ask(command.positions, _STANDING, (), self._heard)
                elif isinstance(command, Tell):
                    told = True
            if machine.over:
                self._forget()
            else:
                self._schedule()
        if told and self._on_failure is not None:
            self._on_failure()

    def _heard(self, task: int, standing: Any) -> None:
        """A rank says where it is."""
        if not isinstance(standing, Standing):
            return
        with self._lock:
            machine = self._machine
            assert machine is not None
            before = machine.due
            commands = machine.standing(task, standing, time.monotonic())
            if machine.due < before:
                self._schedule()
            for command in commands:
                self._carry_out(command)

    def _carry_out(self, command: Command) -> None:
        if isinstance(command, Tell):
            return
        if isinstance(command, Free):
            if not self._expected:
                self._expected = True
                self._tell(range(len(self._tasks)), _EXPECT, (self._reason(),))
            self._tell(command.positions, _FREE, (self._reason(),))
        else:
            self._tell(command.positions, _INTERRUPT, ())

    def _tell(self, tasks: Sequence[int], service: str, args: tuple[Any, ...]) -> None:
        for each in self._ask(tasks, service, args):
            each.close()

    def _ask(
        self,
        tasks: Sequence[int],
        service: str,
        args: tuple[Any, ...],
        heard: Callable[[int, Any], None] = lambda task, answer: None,
    ) -> list[Answers]:
        """Asks the ranks of some tasks for a service that gets the call's actor, caller and port before other args."""
        made: list[Answers] = []
        for gather in self._gathers:
            places = {
                gather.targets[self._tasks[task][1]].proc: task for task in tasks if self._tasks[task][0] is gather
            }
            if places:
                call = (gather.actor, self._runtime.proc, gather.port)
                made.append(
                    Answers(
                        self._runtime,
                        list(places),
                        service,
                        (*call, *args),
                        lambda proc, answer, places=places: heard(places[proc], answer),
                    )
                )
        return made
