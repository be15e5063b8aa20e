"""Fail fast: when ranks of a call fail, ranks that wait for them in a collective are freed, so that the call ends.

It costs nothing until something fails. ``_core/fail_fast.py`` makes the decisions.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from threading import RLock
from typing import TYPE_CHECKING, Any
from weakref import ref

from monarch._actors.interrupting import interrupt
from monarch._core.fail_fast import CallState, Command, FailFast, Free, Look, Tell
from monarch._core.roster import split_proc
from monarch._core.shapes.ranks import describe_ranks
from monarch._groups.pipelined import Failures
from monarch._node.future import Promise
from monarch._node.replies.owed import node_of_call
from monarch._node.services.asking import ServiceAnswers
from monarch._node.services.registry import request
from monarch._supervision.broken_groups import meshes_of_calls, spoil_groups
from monarch._supervision.freeing import expect, free, standing

if TYPE_CHECKING:
    from monarch._node.peers.peer import Peer
    from monarch._node.replies.owed import WatchedCall

_AT_ONCE = 8
"""Calls to one actor examined at a time, oldest first: it handles them in order, or a few at once."""


class _Member:
    """A watched call. Weakly held once all of its ranks have answered: the program may have dropped it before."""

    def __init__(self, call: WatchedCall, first: int) -> None:
        self.first = first
        """The number of its first task."""
        self.actor, self.port, self.view = call.actor, call.port, call.view
        self.targets = call.targets
        self._ref = ref(call)
        self._call: WatchedCall | None = call
        """The call, as long as it waits. Set to None once."""

    def call(self) -> WatchedCall | None:
        """Return the call; None if it has ended, and nobody holds it."""
        return self._call or self._ref()

    def waits_for(self) -> list[Peer]:
        """Return the living procs that have not answered."""
        call = self.call()
        left = [peer for peer in call.waits_for() if peer.dead is None] if call is not None else []
        if not left and self.port:
            # Nobody else holds a broadcast.
            self._call = None
        return left


def _nothing() -> None:
    return None


class CallGroup:
    """Calls whose ranks belong together.

    Timers and replies run its methods, so none of them waits or runs user code.

    Args:
        calls: at least one.
        on_failure: called once, in the receiving thread, when ranks have failed while others still run.
        alike: whether the user sees them as one call, as for a cell: a rank that fails in one of them joins no
            collective in the others.
    """

    def __init__(
        self, calls: Sequence[WatchedCall], on_failure: Callable[[], None] | None = None, alike: bool = False
    ) -> None:
        self._node = node_of_call(calls[0])
        self._on_failure = on_failure
        self._lock = RLock()
        # All of these with the lock.
        self._calls: list[_Member] = []
        self._by_call: dict[int, _Member] = {}
        """The same by identity of the call, which may be reused once the call is gone."""
        self._waiting: deque[_Member] = deque()
        """Calls that may still have outstanding ranks."""
        self._tasks: list[tuple[_Member, int]] = []
        """Each rank of each call, by its number in the state machine."""
        self._machine: FailFast | None = None
        """Set once a rank has failed."""
        self._failed: set[int] = set()
        self._causes: set[str] = set()
        """Processes that failed while none of their calls was freed: errors of freed ones follow from others."""
        self._freed_tasks = 0
        self._freed_procs: set[str] = set()
        """Of so many freed tasks."""
        self._answers: list[ServiceAnswers] = []
        """Of the last look."""
        self._serial = 0
        """Of the timer that counts."""
        self._expected: set[int] = set()
        """Ranks told that others are about to be freed."""
        self._expecting: set[int] = set()
        """Those of them that have not confirmed."""
        self._announced: list[ServiceAnswers] = []
        self._to_free: set[int] = set()
        """Ranks to free once all have confirmed."""
        self._alike = alike
        self.over = False
        """Whether the watch is over. Set once; read without the lock."""
        self.ended: Promise[None] = Promise(self._node, "the end of a call that has failed")
        """Done when the watch is over."""
        self._take(calls)

    def join(self) -> None:
        """Start the watch; some ranks may already have failed."""
        self._look_back([call for each in self._calls if (call := each.call()) is not None])

    def add(self, calls: Sequence[WatchedCall]) -> bool:
        """Watch more calls, unless it is over."""
        with self._lock:
            if self.over:
                return False
            self._take(calls)
        self._look_back(calls)
        return True

    def _take(self, calls: Sequence[WatchedCall]) -> None:
        due = self._machine.due if self._machine is not None else 0.0
        for call in calls:
            if self._member(call) is not None:
                continue
            if self._machine is not None:
                self._machine.add(len(self._calls), len(call.targets), time.monotonic(), call.port)
            member = self._by_call[id(call)] = _Member(call, len(self._tasks))
            self._calls.append(member)
            self._waiting.append(member)
            self._tasks += [(member, position) for position in range(len(call.targets))]
        if self._machine is not None and self._machine.due < due:
            self._schedule()

    def _member(self, call: WatchedCall) -> _Member | None:
        member = self._by_call.get(id(call))
        return member if member is not None and member.call() is call else None

    def _waits(self) -> bool:
        """Return whether any rank has not answered; with the lock. Finished calls are dropped."""
        while self._waiting and not self._waiting[0].waits_for():
            self._waiting.popleft()
        return bool(self._waiting)

    def _look_back(self, calls: Sequence[WatchedCall]) -> None:
        for call in calls:
            call.party = self
        for call in calls:
            for position in call.failed_positions():
                self.failed(call, position)

    def failed(self, call: WatchedCall, position: int) -> None:
        """Note that the code of a rank has raised."""
        with self._lock:
            if self._machine is None:
                if self.over or not self._waits():
                    return
                ports = [each.port for each in self._calls]
                self._machine = FailFast(len(self._tasks), time.monotonic(), self._numbers(), ports)
                self._schedule()
            member = self._member(call)
            assert member is not None
            task = member.first + position
            self._failed.add(task)
            if self._proc(task) not in self._freed():
                self._causes.add(self._proc(task))
            self._machine.failed(task)

    def _numbers(self) -> list[int]:
        """Return the number of the call of each task."""
        if self._alike:
            return [0] * len(self._tasks)
        return [number for number, call in enumerate(self._calls) for _ in call.targets]

    @property
    def frees(self) -> bool:
        """Whether ranks are about to be freed, or were freed and have not ended."""
        with self._lock:
            return self._machine is not None and self._machine.frees

    @property
    def cut_generation(self) -> int:
        """The newest generation of groups that lost ranks while others still run; 0 if none."""
        with self._lock:
            return self._machine.generation if self._machine is not None and self._machine.freed else 0

    def completed(self) -> None:
        """Handle the end of a call: groups that lost ranks are broken for the others too."""
        with self._lock:
            if self._machine is not None and not self._waits():
                self._finish()

    def _finish(self) -> None:
        """End the watch, since nobody is left to free; with the lock."""
        machine, self._machine = self._machine, None
        self.over = True
        self.ended.complete(_nothing)
        self._forget()
        for each in self._announced:
            each.close()
        if machine is not None and machine.freed:
            meshes = meshes_of_calls(self._node, self._calls)
            spoil_groups(self._node, meshes, self._reason(), machine.generation)

    def _forget(self) -> None:
        answers, self._answers = self._answers, []
        for each in answers:
            each.close()

    def _proc(self, task: int) -> str:
        call, position = self._tasks[task]
        return call.targets[position].proc

    def _freed(self) -> set[str]:
        """Return the processes of ranks that were freed; with the lock."""
        freed = self._machine.freed if self._machine is not None else set[int]()
        if len(freed) != self._freed_tasks:
            self._freed_tasks, self._freed_procs = len(freed), {self._proc(task) for task in freed}
        return self._freed_procs

    def _reason(self) -> str:
        ranks = sorted({split_proc(proc)[1] for proc in self._causes})
        return (
            f"the collective cannot complete because {describe_ranks(ranks)} failed before joining it; "
            f"the next use of the group recreates it"
        )

    # Examining ranks

    def _schedule(self) -> None:
        assert self._machine is not None
        self._serial += 1
        serial = self._serial
        self._node.receive_loop.call_later(max(0.0, self._machine.due - time.monotonic()), lambda: self._tick(serial))

    def _tick(self, serial: int) -> None:
        failed = False
        with self._lock:
            machine = self._machine
            if machine is None or serial != self._serial or self._node.closed:
                return
            self._note_ended(machine)
            # Do not wait any longer for ranks that have not confirmed.
            self._expecting.clear()
            self._free()
            for command in machine.tick(time.monotonic()):
                if isinstance(command, Look):
                    self._forget()
                    self._answers = self._ask(self._to_look_at(command.positions), standing, (), self._heard)
                elif isinstance(command, Tell):
                    failed = True
            if machine.over:
                self._finish()
            else:
                self._schedule()
        if failed and self._on_failure is not None:
            self._on_failure()

    def _note_ended(self, machine: FailFast) -> None:
        for call in self._calls:
            waiting = {peer.proc for peer in call.waits_for()}
            for position, peer in enumerate(call.targets):
                if peer.proc not in waiting:
                    machine.ended(call.first + position)

    def _to_look_at(self, tasks: Sequence[int]) -> list[int]:
        """Select the calls that an actor may be handling, and one failure per proc of finished calls."""
        seen: dict[tuple[bool, str, str], int] = {}
        kept: list[int] = []
        for task in tasks:
            call, proc, failed = self._tasks[task][0], self._proc(task), task in self._failed
            alone = failed and not call.waits_for()
            key = (failed, "" if alone else call.actor, proc)
            seen[key] = seen.get(key, 0) + 1
            if seen[key] <= (1 if alone else _AT_ONCE):
                kept.append(task)
        return kept

    def _heard(self, task: int, standing: Any) -> None:
        """Take the position that a rank reports."""
        if not isinstance(standing, CallState):
            return
        with self._lock:
            machine = self._machine
            if machine is None:
                return
            before = machine.due
            commands = machine.standing(task, standing, time.monotonic())
            if machine.due < before:
                self._schedule()
            for command in commands:
                self._carry_out(command, machine)
            if machine.over:
                self._finish()

    def _carry_out(self, command: Command, machine: FailFast) -> None:
        if isinstance(command, Tell):
            return
        if isinstance(command, Free):
            self._to_free.update(command.positions)
            uid = split_proc(self._proc(command.positions[0]))[0]
            self._node.part(Failures).free(uid, machine.generation)
            self._announce(machine)
            self._free()
        else:
            self._tell(command.positions, interrupt, ())

    def _announce(self, machine: FailFast) -> None:
        """Announce to all that ranks are about to be freed, which may close the others' connections.

        Closed connections may overtake messages, so nobody is freed before all have confirmed or the next look is due.
        """
        tasks = self._to_look_at(machine.watched)
        living = {n for n in tasks if self._tasks[n][0].targets[self._tasks[n][1]].dead is None}
        new = living - self._expected
        self._expected |= new
        self._expecting |= new
        if new:
            args = self._reason(), machine.generation
            self._announced += self._ask(sorted(new), expect, args, self._knows)

    def _knows(self, task: int, _: Any) -> None:
        with self._lock:
            self._expecting.discard(task)
            self._free()

    def _free(self) -> None:
        machine = self._machine
        if machine is None or not self._to_free or self._expecting:
            return
        tasks, self._to_free = sorted(self._to_free), set()
        for number in sorted({machine.generation_of(task) for task in tasks}):
            of_generation = [task for task in tasks if machine.generation_of(task) == number]
            self._tell(of_generation, free, (self._reason(), number))

    def _tell(self, tasks: Sequence[int], service: Callable[..., Any], args: tuple[Any, ...]) -> None:
        for each in self._ask(tasks, service, args):
            each.close()

    def _ask(
        self,
        tasks: Sequence[int],
        service: Callable[..., Any],
        args: tuple[Any, ...],
        heard: Callable[[int, Any], None] = lambda task, answer: None,
    ) -> list[ServiceAnswers]:
        """Ask the ranks of tasks for a service that gets the call's actor, caller and port before other args."""
        made: list[ServiceAnswers] = []
        places_of: dict[_Member, dict[str, int]] = {}
        for task in tasks:
            places_of.setdefault(self._tasks[task][0], {})[self._proc(task)] = task
        for call, places in places_of.items():
            # A broadcast has no waiting caller and may come from any process.
            named = (call.actor, self._node.proc if call.port else "", call.port)
            made.append(
                ServiceAnswers(
                    self._node,
                    list(places),
                    request(service, *named, *args),
                    lambda proc, answer, places=places: heard(places[proc], answer),
                )
            )
        return made
