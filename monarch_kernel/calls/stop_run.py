"""Stop: runs the ladder of ``monarch/_core/stop_ladder.py`` on the ranks where a cell still runs."""

from __future__ import annotations

import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from functools import partial
from typing import Any

from monarch._kernel_api import (
    Activity,
    Announce,
    Command,
    Ending,
    Free,
    Freed,
    Insist,
    Interrupt,
    Look,
    Replace,
    ServiceAnswers,
    StopLadder,
    ThreadState,
    current_node,
    describe_ranks,
    free,
    generation_now,
    host_of,
    meshes_of_calls,
    participle,
    prod,
    request,
    spoil_groups,
    starves,
    thread_state,
)
from monarch_kernel.calls.record import CallRecord
from monarch_kernel.calls.running import STOPPED, PendingCall, RunningCalls
from monarch_kernel.calls.stop_report import StopReport, activity_of_left

_COST = (
    "; to kill and restart, press Stop again when no cell runs, or run %mesh kill (variables and actor state are lost)"
)
_ANNOUNCED = (
    "ignored interrupts, so a new process replaces it now; its variables and actor state are lost",
    "ignored interrupts, so new processes replace them now; their variables and actor state are lost",
)
_HEARING = 0.1
"""Seconds for finished ranks to report whether they were freed."""
SUSPENDED = ("T", "t")
"""Letters of suspended processes in /proc."""
_STATES = {**dict.fromkeys(SUSPENDED, Activity.SUSPENDED), "D": Activity.DEVICE}
"""The activity of a silent process, by its state letter in /proc."""


def stop_ranks(
    run: RunningCalls,
    calls: CallRecord,
    restartable: bool = False,
    say: Callable[[str], object] = lambda text: None,
    spared: frozenset[str] = frozenset(),
) -> StopReport:
    """Stop a cell on the ranks where it still runs, within about 1.5 s for any number of them.

    Ranks that get no CPU have up to 3 s more.

    Args:
        run: the cell.
        calls: the calls of the notebook; they know which ranks the next stop restarts.
        restartable: whether ranks that swallow interrupts are restarted at once.
        say: tells the user that ranks are about to be restarted.
        spared: processes that neither this stop nor the next one restarts.
    """
    return _StopRun(run, calls, restartable, say, spared).run()


@contextmanager
def uninterrupted() -> Generator[None]:
    """Ignore a second Ctrl-C, which would cut off the ladder; the ladder ends soon by itself."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, lambda number, frame: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class _StopRun:
    """One stop. It waits for news of all ranks at once, which come from the receiving thread."""

    def __init__(
        self,
        running: RunningCalls,
        calls: CallRecord,
        restartable: bool,
        say: Callable[[str], object],
        spared: frozenset[str],
    ) -> None:
        self._running = running
        self._spared = spared
        self._doomed: frozenset[int] = frozenset()
        """The calls whose ranks get new processes."""
        self._calls = calls
        self._say = say
        self._tasks = running.tasks()
        again = {number for number, task in self._tasks.items() if calls.is_left(task.port, task.proc)}
        self._breaking = {number for number, task in self._tasks.items() if calls.is_cleaning(task.port, task.proc)}
        """Calls whose cleanup this stop breaks off, since the last one has left them to it."""
        here = current_node().host
        afar = {number for number, task in self._tasks.items() if host_of(task.proc) != here}
        self._ladder = StopLadder(self._tasks, restartable, again, afar)
        self._numbers = {(task.proc, task.port): number for number, task in self._tasks.items()}
        self._by_proc: dict[str, list[int]] = {}
        for number, task in self._tasks.items():
            self._by_proc.setdefault(task.proc, []).append(number)
        # Written by the receiving thread in single dict operations; the stopping thread reads them at the end.
        self._thread_states: dict[int, ThreadState] = {}
        self._pids: dict[int, int] = {}
        # From here on the stopping thread only, if nothing else is said.
        self._freed: dict[int, Freed] = {}
        self._shares: dict[str, tuple[float, float, float]] = {}
        """By process: a time, and its seconds with and without a CPU by then. Receiving thread only."""
        self._answers: list[ServiceAnswers] = []
        self._events: deque[Callable[[float], list[Command]]] = deque()
        """News of ranks, from the receiving thread to the stopping thread."""
        self._asked_to_free: set[int] = set()
        """Ranks that have not reported whether they were freed."""
        self._generations: dict[str, int] = {}
        """The generation of its groups when each process was freed."""
        self._count = running.count()
        self.thread: Any = None
        """See Waiter."""

    @property
    def done(self) -> bool:
        """Whether there is news."""
        return bool(self._events) or self._running.count() != self._count

    def run(self) -> StopReport:
        """Run the ladder to its end."""
        receive_loop = current_node().receive_loop
        for future in self._running.futures:
            future.waiter = self
        try:
            self._carry_out(self._ladder.begin(time.monotonic()))
            while not self._ladder.over:
                receive_loop.wait(self, max(0.0, self._ladder.due - time.monotonic()))
                self._take()
                self._carry_out(self._ladder.tick(time.monotonic()))
            self._hear_of_freed()
        finally:
            for future in self._running.futures:
                future.waiter = None
            for each in self._answers:
                each.close()
        return self._outcome()

    def _hear_of_freed(self) -> None:
        """Wait for reports of freed ranks: the answer of a call may arrive before them."""
        until = time.monotonic() + _HEARING
        ended = {number for number, ending in self._ladder.endings.items() if ending is Ending.INTERRUPTED}
        while self._asked_to_free & ended and time.monotonic() < until:
            current_node().receive_loop.wait(self, max(0.0, until - time.monotonic()))
            self._take()

    def _take(self) -> None:
        """Pass news to the ladder."""
        self._count = self._running.count()
        left = self._running.tasks()
        now = time.monotonic()
        while self._events:
            self._carry_out(self._events.popleft()(now))
        for number in self._tasks.keys() - left.keys() - self._ladder.endings.keys():
            self._carry_out(self._ladder.stopped(number, now))

    def _carry_out(self, commands: list[Command]) -> None:
        running = self._running
        for command in commands:
            tasks = [self._tasks[number] for number in command.ranks]
            if isinstance(command, Interrupt):
                running.interrupt(tasks)
            elif isinstance(command, Free):
                self._begin_to_free(tasks)
            elif isinstance(command, Insist):
                self._ask(command.ranks, prod)
            elif isinstance(command, Look):
                self._ask(command.ranks, thread_state, (running.name,), self._looked)
                self._answers += running.states(tasks, self._state)
            elif isinstance(command, Announce):
                ranks = sorted({task.rank for task in tasks})
                self._say(f"{describe_ranks(ranks)}: {_ANNOUNCED[len(ranks) > 1]}")
            else:
                assert isinstance(command, Replace)
                self._doomed = frozenset(command.ranks)

    def _ask(
        self,
        numbers: Iterable[int],
        service: Callable[..., Any],
        args: tuple[Any, ...] = (),
        heard: Callable[[str, int, Any], None] = lambda proc, port, answer: None,
    ) -> None:
        """Ask ranks for a service whose last argument is whether to spare their cleanup."""
        for spare in (True, False):
            tasks = [self._tasks[number] for number in numbers if (number not in self._breaking) is spare]
            self._answers += self._running.ask(tasks, service, (*args, spare), heard)

    def _begin_to_free(self, tasks: list[PendingCall]) -> None:
        """Ask ranks for the generation of their groups, so that no newer one is aborted, and agents for states.

        A rank that does not answer is in no collective, since a collective releases the GIL. On a busy machine the
        answer of an agent takes longer than a rung.
        """
        procs = sorted({task.proc for task in tasks})
        self._answers.append(
            ServiceAnswers(current_node(), procs, request(generation_now), self._heard_generation, urgent=True)
        )
        self._answers += self._running.states(tasks, self._glimpse)

    def _free(self, proc: str, number: int, _: float) -> list[Command]:
        """Abort the operations that the calls of a rank wait in."""
        self._generations[proc] = number
        left = [each for each in self._by_proc[proc] if each not in self._ladder.endings]
        self._asked_to_free.update(left)
        self._ask(left, free, (STOPPED, number), self._heard_freed)
        return []

    # News

    def _heard_generation(self, proc: str, number: Any) -> None:
        if isinstance(number, int):
            self._post(partial(self._free, proc, number))

    def _heard_freed(self, proc: str, port: int, freed: Any) -> None:
        what = freed if isinstance(freed, Freed) else Freed.NOTHING
        self._post(partial(self._was_freed, self._numbers[proc, port], what))

    def _was_freed(self, number: int, freed: Freed, now: float) -> list[Command]:
        self._asked_to_free.discard(number)
        if freed is not Freed.NOTHING:
            self._freed[number] = freed
            self._ladder.freed(number)
        return []

    def _looked(self, proc: str, port: int, thread_state: Any) -> None:
        number = self._numbers[proc, port]
        if thread_state is None:
            # The call has ended, and nobody awaits its answer.
            self._post(lambda now: self._ladder.stopped(number, now))
        elif isinstance(thread_state, ThreadState):
            self._thread_states[number] = thread_state
            self._post(lambda now: self._ladder.seen(number, thread_state.activity, now))

    def _glimpse(self, proc: str, state: str, pid: int, ran: float, waited: float) -> None:
        self._shares.setdefault(proc, (time.monotonic(), ran, waited))
        for number in self._by_proc.get(proc, ()):
            self._pids[number] = pid
            self._post(lambda now, number=number: self._ladder.glimpsed(number, _STATES.get(state)))

    def _state(self, proc: str, state: str, pid: int, ran: float, waited: float) -> None:
        activity = _STATES.get(state)
        if activity is None:
            self._glimpse(proc, state, pid, ran, waited)
            since, ran_before, waited_before = self._shares[proc]
            if starves(time.monotonic() - since, ran - ran_before, waited - waited_before):
                for number in self._by_proc.get(proc, ()):
                    self._post(lambda now, number=number: self._ladder.starved(number))
            return
        for number in self._by_proc.get(proc, ()):
            self._pids[number] = pid
            self._post(lambda now, number=number: self._ladder.seen(number, activity, now))

    def _post(self, event: Callable[[float], list[Command]]) -> None:
        self._events.append(event)
        current_node().receive_loop.notify(self)

    # The end

    def _outcome(self) -> StopReport:
        endings: dict[int, Ending] = {}
        left: dict[int, str] = {}
        doomed: list[str] = []
        cleaning: set[int] = set()
        died: dict[int, str] = {}
        for number, ending in self._ladder.endings.items():
            task = self._tasks[number]
            # One call of a rank may have waited for another; the rank has stopped when both have.
            endings[task.rank] = max(ending, endings.get(task.rank, ending), key=lambda each: each.value)
            if ending is Ending.LEFT:
                if self._ladder.activity(number) is Activity.CLEANING:
                    self._calls.clean(task.port, task.proc)
                    cleaning.add(task.rank)
                elif task.proc not in self._spared:
                    self._calls.leave(task.port, task.proc)
                does = activity_of_left(
                    self._ladder.activity(number), self._thread_states.get(number), self._pids.get(number, 0)
                )
                more = _COST if self._calls.is_left(task.port, task.proc) else ""
                left.setdefault(task.rank, does + more)
            elif number in self._doomed:
                doomed.append(task.proc)
            else:
                # Its code may have replaced the handler of SIGINT, or its program, by os.exec.
                dead = current_node().peers.get(task.proc).dead
                died.update({task.rank: participle(dead.cause)} if dead is not None else {})
        stopped = StopReport(endings, left, doomed)
        stopped.died = died
        stopped.cleaning = cleaning
        for number, freed in self._freed.items():
            if self._ladder.endings[number] is Ending.FREED:
                stopped.note_freed(self._tasks[number].rank, freed)
        stopped.cut = Freed.COLLECTIVE in self._freed.values()
        self._spoil_cut(stopped)
        return stopped

    def _spoil_cut(self, stopped: StopReport) -> None:
        """Tell all ranks which groups were cut, before they get the next call."""
        # Ranks that waited for an interrupted rank may have been freed for that, before the stop reached them.
        parties = [future.party.cut_generation for future in self._running.futures if future.party is not None]
        stopped.cut = stopped.cut or any(parties)
        stopped.generation = max([*self._generations.values(), *parties], default=0)
        if stopped.cut:
            node = current_node()
            spoil_groups(node, meshes_of_calls(node, self._running.futures), STOPPED, stopped.generation)
