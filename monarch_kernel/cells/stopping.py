"""Stop in a notebook: which calls a Stop ends, which ranks it kills, and what it says."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from threading import Event
from typing import Any

from monarch._kernel_api import (
    Ending,
    Freed,
    Gather,
    ask_soon,
    describe_ranks,
    host_of,
    is_dict,
    label_of_actors,
    open_node,
    replace_procs,
    split_proc,
    state_of,
    states,
)
from monarch.exceptions import ActorError, MonarchError
from monarch_kernel.calls.caused_errors import ended_from_outside, has_waited
from monarch_kernel.calls.cell_run import Run
from monarch_kernel.calls.record import CallRecord, EarlierCall
from monarch_kernel.calls.running import STOPPED, PendingCall, RunningCalls
from monarch_kernel.calls.stop_report import StopReport
from monarch_kernel.calls.stop_run import SUSPENDED, stop_ranks, uninterrupted
from monarch_kernel.calls.waits import titles_text
from monarch_kernel.meshes.detached import outlives_kernel
from monarch_kernel.meshes.mesh import Mesh
from monarch_kernel.meshes.registry import NotebookMeshes
from monarch_kernel.meshes.steps import apart
from monarch_kernel.output.cell_errors import CellStopped
from monarch_kernel.output.streams import Streams

_ENDS_S = 0.2
"""Seconds after an interrupt in which Jupyter asks a kernel to end that it has interrupted for that."""
_MOST = 64
"""Interrupts by hand that are kept."""
SURVIVORS_S = 0.5
"""Seconds for the other ranks to end a cell after a death; those that still run it then are named."""
_LONGEST = 30.0
"""Seconds for a stop to find out how ranks have ended."""


class ByHand:
    """An interrupt of ranks of a cell, by a button or by ``%mesh interrupt``.

    Args:
        ports: the ports of the calls that it ends.
    """

    def __init__(self, ports: set[int]) -> None:
        self.ports = ports
        self.over = Event()
        self.stopped: StopReport | None = None
        """Its outcome; set before ``over`` is."""


class Stopping:
    """The Stops of a notebook.

    Args:
        meshes: the meshes of the notebook.
        streams: returns the streams that show the output of ranks.
        ends: waits some seconds for the end of the kernel, and returns whether it ends.
    """

    def __init__(
        self,
        meshes: NotebookMeshes,
        streams: Callable[[], Streams],
        ends: Callable[[float], bool] = lambda seconds: False,
    ) -> None:
        self._meshes = meshes
        self._ends = ends
        self._streams = streams
        self._by_hand: deque[ByHand] = deque(maxlen=_MOST)
        """The last interrupts by hand, for the cells that wait for their calls. Appended by the threads of interrupts,
        read by that of the cell."""

    def stop_cell(self, mesh: Mesh | None, run: Run) -> StopReport:
        """Stop a cell.

        Args:
            mesh: the mesh of the cell; None for a cell inside actors.
            run: the cell.

        Raises:
            CellStopped: the kernel ends, and a mesh is kept: its cells continue.
        """
        with uninterrupted():
            if self.detaches():
                raise CellStopped("the kernel is shutting down; cells on detached meshes continue")
            errors = {rank: error for rank, error in run.failures().items() if not error.interrupted}
            stopped = self.stop_calls(run, mesh is not None)
        stopped.errors = errors
        for rank, error in run.failures().items():
            if error.freed:
                stopped.cut = True
                stopped.note_freed(rank, Freed.COLLECTIVE)
        if mesh is None:
            return stopped
        left = stopped.ranks(Ending.LEFT)
        if left and run not in mesh.unfinished:
            mesh.unfinished.append(run)
        if stopped.cleaning and not stopped.cut:
            mesh.check_groups_later()
        elif not stopped.doomed:
            told = {rank: each.position for rank, each in run.failures().items() if each.position is not None}
            steps = mesh.check_groups(stopped.cut or bool(left), stopped.generation, told)
            if not left and any(at for _, at in told.values()):
                stopped.apart = apart(mesh, steps)
        return stopped

    def end_survivors(self, mesh: Mesh | None, run: Run, seconds: float) -> None:
        """Interrupt a cell where it still runs though a death has ended it: its ranks need not continue.

        Args:
            mesh: the mesh of the cell; None for a cell inside actors.
            run: the cell.
            seconds: how long to wait for their end.
        """
        if mesh is not None:
            mesh.unfinished.append(run)
        run.interrupt()
        if seconds:
            # A Stop meanwhile only ends this wait; the error of the death says what another one does.
            with suppress(KeyboardInterrupt):
                run.settle(seconds)

    def stop_of_actors(self, run: RunningCalls) -> StopReport:
        """Stop the calls that a cell waits for, and find out whether models of their actors differ."""
        stopped = self.stop_calls(run, False)
        uids = {split_proc(call.targets[0].proc)[0] for call in run.futures}
        for mesh in list(self._meshes.by_name.values()):
            if state_of(mesh.procs).procs.uid in uids and not (stopped.apart or mesh.dead()):
                stopped.apart = apart(mesh, None)
        return stopped

    def actors_apart(self, error: ActorError) -> str:
        """Say in which models actors differ after a call that has failed on some of them; empty for none."""
        if error.results is None:
            return ""
        for mesh in list(self._meshes.by_name.values()):
            actors = map(state_of, mesh.users_actors())
            among = [label_of_actors(each.name) for each in actors if each.key == error.actors]
            if among and not mesh.dead():
                return apart(mesh, None, among)
        return ""

    def detaches(self) -> bool:
        """Return whether an interrupt is that of Jupyter before it ends a kernel with meshes that are kept."""
        return any(map(outlives_kernel, self._meshes.by_name.values())) and self._ends(_ENDS_S)

    def stop_by_hand(self, run: RunningCalls, say: Callable[[str], object]) -> StopReport:
        """Stop calls for a person who has not pressed Stop; the cell that waits for them says the same as after a Stop.

        Args:
            run: the calls.
            say: shows a line.
        """
        begun = ByHand({call.port for call in run.futures})
        self._by_hand.append(begun)
        try:
            begun.stopped = self.stop_calls(run, False, say)
            return begun.stopped
        finally:
            begun.over.set()

    def is_interrupted(self, run: RunningCalls) -> bool:
        """Return whether a cell is or was interrupted by hand."""
        ports = {call.port for call in run.futures}
        return any(each.ports & ports for each in list(self._by_hand))

    def outcome_by_hand(self, run: Run) -> StopReport | None:
        """Return how interrupts by hand have ended a cell, which has ended; None if it ended otherwise."""
        ports = {call.port for call in run.futures}
        mine = [each for each in list(self._by_hand) if each.ports & ports]
        if not mine:
            return None
        for each in mine:
            # It still asks how the ranks were freed. It has a bound of its own, well below this one.
            each.over.wait(_LONGEST)
        stops = [each.stopped for each in mine if each.stopped is not None]
        errors = {rank: result.error for rank, result in run.results().items() if result.error is not None}
        ended = [rank for rank, error in sorted(errors.items()) if ended_from_outside(error)]
        if not stops or not ended:
            return None
        stopped = StopReport({}, {}, [])
        for each in stops:
            stopped.add(each)
        stopped.end_also([rank for rank in ended if has_waited(errors[rank])])
        stopped.errors = {rank: error for rank, error in errors.items() if rank not in ended}
        return stopped

    def stop_calls(
        self, run: RunningCalls, restartable: bool, say: Callable[[str], object] | None = None, kills: bool = False
    ) -> StopReport:
        """Stop calls, and the earlier calls that they wait for.

        Args:
            run: the calls.
            restartable: whether ranks that swallow interrupts are replaced at once; actors have state.
            say: shows a line.
            kills: whether ranks that an earlier Stop did not end are replaced too.
        """
        with uninterrupted():
            return self._stop_calls(run, restartable, say or _say, kills)

    def _stop_calls(
        self, run: RunningCalls, restartable: bool, say: Callable[[str], object], kills: bool
    ) -> StopReport:
        calls = self._streams().calls
        stuck = self._streams().waits.stuck(run.futures)
        # Ranks wait for stopped ones, which is no news.
        calls.stop(run.futures)
        # The line about running ranks would be in front of what a Stop says.
        self._streams().wipe()
        ahead = calls.ahead(run.futures)
        kept = [each for each in ahead if calls.handle(each.call) or (not kills and calls.has_left(each))]
        self.stop_functions([each.call for each in ahead])
        others = [each for each in ahead if each not in kept and calls.is_stoppable(each.call)]
        every = RunningCalls(run.name, [*(each.call for each in others), *run.futures], run.main) if others else run
        # The user decides when a cell with a handle ends, and whether a rank that does not stop is killed.
        spared = frozenset(proc for each in kept for proc in each.procs)
        stopped = stop_ranks(every, calls, restartable, say, spared)
        stopped.stuck = stuck
        stopped.notes = [f"also stopped {titles_text(calls, others)}, which it was waiting for"] if others else []
        for each in kept:
            title = calls.title(each.call)
            text = f"had not started; {title}, which it was waiting for, continues; {self._end_of(each, calls)}"
            stopped.waited.update(dict.fromkeys(each.ranks, text))
        if stopped.doomed:
            try:
                # This also makes new process groups.
                replace_procs(open_node(), stopped.doomed, 20.0)
                self._lack(stopped.doomed)
            except MonarchError as error:
                stopped.notes.append(f"not all new processes are ready: {error}")
        return stopped

    def stop_functions(self, calls: Iterable[Gather[Any]]) -> None:
        """Interrupt the functions of the user that run among ops on tensors; the ops end by themselves."""
        ops = RunningCalls("", [each for each in calls if self._streams().calls.runs_ops(each)])
        if ops.futures:
            # Imports torch, which a program with ops has done.
            from monarch._kernel_api import stop_function

            for each in ops.ask(ops.tasks().values(), stop_function, (STOPPED,)):
                each.close()

    def _lack(self, procs: list[str]) -> None:
        """Let the next cell of each mesh first run the definitions on its new ranks."""
        for mesh in self._meshes.by_name.values():
            uid = state_of(mesh.procs).procs.uid
            mesh.lack([rank for proc in procs for of, rank in [split_proc(proc)] if of == uid])

    @staticmethod
    def _end_of(each: EarlierCall, calls: CallRecord) -> str:
        """Return how to end a call that a Stop has spared."""
        handle = calls.handle(each.call)
        return f"{handle}.cancel() ends it" if handle else "%mesh kill kills its ranks"

    def stop_left(self) -> bool:
        """Stop what an earlier Stop has left, at a Stop while no cell runs; return whether there was anything.

        Cleanup is broken off, and ranks that did not stop are killed, as that Stop has announced.
        """
        calls, write = self._streams().calls, self._streams().place().write
        runs: list[RunningCalls] = [run for mesh in self._meshes.by_name.values() for run in list(mesh.unfinished)]
        known = {future.port for run in runs for future in run.futures}
        runs += [RunningCalls("", [call]) for call in calls.left() if call.port not in known]
        has_stopped = False
        for run in runs:
            tasks = run.tasks().values()
            # Those of a cell that a death has ended were interrupted, and not more.
            if any(calls.is_unended(task.port, task.proc) or run.done for task in tasks):
                has_stopped = True
                write(self.stop_calls(run, isinstance(run, Run), write, kills=True).text())
        return has_stopped

    # Waiting for cells that were stopped

    def say_finishing(self, mesh: Mesh) -> None:
        """Tell the user which ranks are still in a stopped cell."""
        calls, finishing = self._streams().calls, mesh.finishing()
        # Read once, since ranks may end meanwhile.
        named = [(run.name, task) for run in list(mesh.unfinished) for task in run.tasks().values()]
        # A Stop of the next cell ends those that only a death has ended so far.
        named = [(name, task) for name, task in named if calls.is_unended(task.port, task.proc)]
        tasks = [task for _, task in named]
        cleaning = sorted({task.rank for task in tasks if calls.is_cleaning(task.port, task.proc)})
        suspended = suspended_pids([task for task in tasks if task.rank not in cleaning])
        # A rank is in the first of its cells; those behind it have not begun.
        first: dict[int, str] = {}
        for name, task in named:
            first.setdefault(task.rank, name)
        inside = [rank for rank in finishing if rank in first and rank not in cleaning and rank not in suspended]
        names = " and ".join(dict.fromkeys(first.values()))
        if cleaning:
            where = describe_ranks(cleaning)
            _say(f"waiting for {where}, still in except or finally code; Stop aborts it")
        if suspended:
            pids = " ".join(str(pid) for pid in suspended.values())
            _say(
                f"waiting for {describe_ranks(suspended)}, suspended by a signal such as SIGSTOP in {names}, which was "
                f"stopped; kill -CONT {pids} resumes {_them(suspended)}; {_ends(suspended)}"
            )
        if inside:
            where = f"{describe_ranks(inside)}, still in a C call of {names}, which was stopped"
            _say(f"waiting for {where}; {_ends(inside)}")
        if finishing:
            ports = {task.port for task in tasks}
            told = [call for each in list(mesh.unfinished) for call in each.futures if call.port in ports]
            self._streams().waits.told(told)

    def await_finishing(self, mesh: Mesh, ranks: set[int]) -> None:
        """Wait until no stopped cell runs on these ranks; a program is handed to them before its cell begins."""
        if not ranks.intersection(mesh.finishing()):
            return
        self.say_finishing(mesh)
        calls = [call for each in mesh.unfinished for call in each.futures]
        run = RunningCalls("", calls, frozenset(call.actor for call in calls))
        died = [task for each in mesh.unfinished if each.done for task in each.tasks().values()]
        if died:
            where = describe_ranks(sorted({task.rank for task in died}))
            _say(f"waiting for {where}, still in a cell that was interrupted when other ranks died; Stop ends it")
        try:
            run.wait()
            run.settle(None)
        except KeyboardInterrupt:
            is_cleaning = self._streams().calls.is_cleaning
            if died or any(is_cleaning(each.port, each.proc) for each in run.tasks().values()):
                _say(self.stop_calls(run, True).text())
            raise CellStopped("the cell was stopped before its program started") from None


def _them(ranks: Collection[int]) -> str:
    return "it" if len(ranks) == 1 else "them"


def _ends(ranks: Collection[int]) -> str:
    """Return how a wait for ranks ends."""
    whose = "its" if len(ranks) == 1 else "their"
    return f"Stop ends only this wait; %mesh kill kills {_them(ranks)} ({whose} variables are lost)"


def suspended_pids(tasks: Iterable[PendingCall]) -> dict[int, int]:
    """Return the ranks whose processes are suspended, with their pids; of those whose agents answer soon."""
    ranks = {task.proc: task.rank for task in tasks}
    found: dict[int, int] = {}
    for host in {host_of(proc) for proc in ranks}:
        procs = sorted(proc for proc in ranks if host_of(proc) == host)
        for answer in ask_soon([f"{host}/agent"], states(procs)).values():
            for proc, (state, pid, *_) in answer.items() if is_dict(answer) else ():
                if state in SUSPENDED:
                    found[ranks[proc]] = pid
    return dict(sorted(found.items()))


def _say(text: str) -> None:
    print(text, file=sys.stderr)
