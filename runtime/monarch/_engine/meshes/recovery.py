"""After an op has failed on some ranks: all ranks agree on what has no value, and continue with the rest."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import suppress
from typing import Any

from monarch._core.shapes.region import Region
from monarch._engine.issuing.failures import LOST, OpFailure, Unreported, error_of, failure_of_call, merged
from monarch._engine.issuing.observer import current
from monarch._engine.issuing.stream import OpStream, new_number
from monarch._engine.meshes.executing import Execution
from monarch._engine.rank.reports import BatchReport
from monarch._meshes.inside import node_of
from monarch.exceptions import ActorError, DeviceMeshError, MonarchError

_ROUNDS = 5
"""Rounds without a new failure after which the ranks are given up: each ends at once with a broken collective."""
_PATIENCE_S = 10.0
"""Seconds that these rounds take at least: on a busy machine a rank may be late in several of them."""
_PAUSE_S = 0.05
"""Before the second such round; twice as long before each further one, up to a second."""
_REPORTED = 100
_WAIT_S = 600.0
"""Seconds to wait for the ranks, which end the op that runs."""


recovering = threading.RLock()
"""Held by the thread that recovers; others that need it wait for its calls to the ranks."""


def _is_same(first: OpFailure, second: OpFailure) -> bool:
    if first.kind == LOST:
        return first == second
    return (first.op, first.line, first.kind) == (second.op, second.line, second.kind)


class Recovery:
    """The failures of one mesh.

    Args:
        stream: that may halt.
        name: the name of the mesh.
        whole: the executors of the whole mesh of processes, since slices share ranks.
        uid: the uid of the mesh of processes.
        heal: gives new processes, by their positions in the whole mesh, the tensors that others have, and tells the
            rest what has failed by then; returns whether all ranks continue.
    """

    def __init__(
        self, stream: OpStream, name: str, whole: Any, uid: str, heal: Callable[[list[int], dict[int, OpFailure]], bool]
    ) -> None:
        self.stream = stream
        self._name = name
        self.whole = whole
        self.uid = uid
        self._heal = heal
        self.linked: set[Recovery] = set()
        """Meshes that tensors move to or from, and a mesh or slice of the same ranks. Only grows; single operations,
        from any thread."""
        self.waiting: dict[Region, dict[int, int]] = {}
        """How many ops wait on each rank of a mesh or slice, as of the last halt. Used by the thread that recovers."""
        self.is_due = False
        """Whether some ranks have halted. Set by any thread of the program, cleared by the one that recovers."""
        self.unreported: deque[Unreported] = deque(maxlen=_REPORTED)
        """Failures that no look has raised yet; single operations of a deque."""
        self._is_untold = False
        """Whether a function has failed that nobody waits for. Set by any thread, cleared by one that looks."""

    def note(self, future: Any, epoch: int) -> None:
        """Note what a batch has answered, unless the ranks run ops again since; a death is raised by the next look."""
        if isinstance(future, Execution):
            reports = self._note_function(future)
        elif epoch == self.stream.order.epoch:
            try:
                reports = future.get()
            except MonarchError:
                return
        else:
            return
        if any(report.halted for report in reports.values()):
            self.is_due = True

    def _note_function(self, function: Execution) -> dict[int, BatchReport]:
        """Return the answers to a function that nobody waits for; keep its error for the end of the cell."""
        was_kept = function.is_kept
        try:
            reports = function.answers()
        except ActorError as error:
            # The halt has told it otherwise; a Stop is not told.
            if not was_kept and not isinstance(error.exception, KeyboardInterrupt):
                self._tell(failure_of_call(error, function.title, function.line, function.ranks))
            return {}
        except MonarchError:
            return {}
        if function.is_kept:
            self.stream.order.kept.append((self.stream, function))
        for failure in (report.failure for report in reports.values() if report.failure is not None):
            self._tell(failure)
        return reports

    def _tell(self, failure: OpFailure) -> None:
        """Keep an error without a tensor for the end of the cell, unless it is there already."""
        if not any(_is_same(each.failure, failure) for each in list(self.unreported)):
            self.unreported.append(Unreported(self._name, failure, ()))
            self._is_untold = True

    def answers(self, function: Execution) -> dict[int, BatchReport]:
        """Return the report of each rank on a function, which runs once on each.

        Raises:
            ActorError: the function raised.
            TensorError: a tensor has no value.
            DeviceMeshError: a rank has died.
        """
        try:
            return self.ask(function.answers)
        except ActorError:
            for each in list(self.unreported):
                if function.number in each.numbers and max(each.numbers) < 0:
                    with suppress(ValueError):
                        # Another thread has just told it.
                        self.unreported.remove(each)
            raise

    def recover_aside(self) -> bool:
        """Let the ranks continue in another thread, if they have halted and the program does not look.

        Returns:
            Whether it is too early: ranks run ops, and a healing of any mesh would wait for these too.
        """
        if self._is_untold:
            self._is_untold = False
            node_of(self.whole).events.tensors_failed.tell()
        if not self.is_due:
            return False
        if any(stream.sent for each in self._members() for stream in list(each.stream.order.streams)):
            return True
        node_of(self.whole).lanes.post("tensors-recovery", self._recover_late)
        return False

    def _recover_late(self) -> None:
        with recovering:
            if not self.is_due:
                return
            try:
                self.stream.flush(wait=False)
                self._flush_linked()
                self.recover()
            except MonarchError:
                # The next look raises it.
                return
        node_of(self.whole).events.tensors_failed.tell()

    def look(self, number: int, what: str, view: Any, *args: Any) -> list[Any]:
        """Return the reports of the ranks of a view about a tensor, in their order.

        Raises:
            TensorError: it has no value.
            DeviceMeshError: a rank has died.
        """

        def send() -> Any:
            future = view.look.call(number, what, *args)
            future.rename("reading a tensor")
            return future.get()

        return [report.value for report in self.ask(send).values()]

    def ask(self, send: Callable[[], Any]) -> Any:
        """Return the reports of ranks, asked again once they have agreed on what has failed.

        Raises:
            TensorError: a tensor has no value.
            DeviceMeshError: a rank has died.
        """
        self.before_look()
        while True:
            self.stream.flush()
            self._flush_linked()
            reports = send()
            if any(report.halted for report in reports.values()):
                self.recover()
                continue
            failure: OpFailure | None = None
            for report in reports.values():
                if report.failure is not None:
                    failure = merged(failure, report.failure)
            if failure is not None:
                self._told(failure)
                raise error_of(failure, self._name)
            return reports

    def before_look(self) -> None:
        """Send the ops that a value depends on; raise in a step that is being recorded."""
        if current.observer is not None:
            current.observer.looked()
        self.stream.flush()

    def _told(self, failure: OpFailure) -> None:
        for each in list(self.unreported):
            if _is_same(each.failure, failure):
                with suppress(ValueError):
                    # Another thread has just told it.
                    self.unreported.remove(each)

    def link(self, other: Recovery) -> None:
        """Note that tensors move between two meshes: a rank of one may wait for one of the other."""
        if other is not self:
            self.linked.add(other)
            other.linked.add(self)

    def _members(self) -> list[Recovery]:
        """Return the meshes between which tensors move, one for each mesh of processes, this one first."""
        found: dict[str, Recovery] = {}
        seen: set[Recovery] = set()
        pending: list[Recovery] = [self]
        while pending:
            each = pending.pop()
            if each not in seen:
                seen.add(each)
                found.setdefault(each.uid, each)
                pending.extend(list(each.linked))
        return list(found.values())

    def _flush_linked(self) -> None:
        """Send the ops of meshes whose tensors this one may wait for."""
        seen: set[Recovery] = {self}
        pending = list(self.linked)
        while pending:
            each = pending.pop()
            if each not in seen:
                seen.add(each)
                pending.extend(list(each.linked))
                with suppress(MonarchError):
                    # A death there is told by what this mesh gets.
                    each.stream.flush()

    def recover(self) -> None:
        """Let all ranks continue, with the same view of what has failed, also those of meshes that it waits for.

        Raises:
            DeviceMeshError: a rank has died, or collectives keep failing.
        """
        with recovering:
            idle, until = 0, 0.0
            known: dict[int, OpFailure] = {}
            while True:
                found, members, lost, new = self._agree_all()
                if found:
                    idle = 0
                else:
                    idle, until = idle + 1, until if idle else time.monotonic() + _PATIENCE_S
                    if idle > 1:
                        time.sleep(min(1.0, _PAUSE_S * 2 ** (idle - 2)))
                # Ranks tell a failure once, and a heal tells it to the ranks of its own mesh only.
                known.update(found)
                if found:
                    self._spread(members, known)
                if new:
                    for each, positions in new:
                        each._heal(positions, known)
                elif not self._resumed(members, known, lost):
                    for each in members:
                        each.stream.order.ask_kept()
                    return
                if idle >= _ROUNDS and time.monotonic() > until:
                    raise DeviceMeshError(
                        f"the collectives of {self._name} keep failing without an error on any "
                        f"rank; look at the output of its ranks, and heal or restart the mesh",
                        mesh=self._name,
                    )

    def _spread(self, members: list[Recovery], known: dict[int, OpFailure]) -> None:
        """Add what fails by ops that wait on some ranks only, as of other meshes: others have run them already."""
        while True:
            new: dict[int, OpFailure] = {}
            for _, answers in self._answers(members, lambda each: each.whole.spread.call(known)):
                for number, failure in (pair for answer in answers for pair in answer.items()):
                    new[number] = merged(new.get(number), failure)
            if not new:
                return
            known.update(new)

    def _resumed(self, members: list[Recovery], known: dict[int, OpFailure], lost: frozenset[str]) -> bool:
        """Let the ranks of some meshes run ops again; return whether some have halted once more."""
        for each, reports in self._answers(members, lambda each: each._resume(known, lost)):
            if any(report.halted for report in reports):
                each.is_due = True
        return any(each.is_due for each in members)

    def _answers(
        self, members: list[Recovery], send: Callable[[Recovery], Any]
    ) -> Generator[tuple[Recovery, list[Any]]]:
        """Send something to the ranks of some meshes, and give the answers of those that have not died meanwhile."""
        sent: list[tuple[Recovery, Any]] = []
        for each in members:
            try:
                sent.append((each, send(each)))
            except MonarchError:
                if each is self:
                    raise
        for each, future in sent:
            try:
                answers = list(future.get(_WAIT_S).values())
            except MonarchError:
                if each is self:
                    raise
            else:
                yield each, answers

    def _resume(self, known: dict[int, OpFailure], lost: frozenset[str]) -> Any:
        order = self.stream.order
        with order.held():
            order.epoch += 1
            return self.whole.resume.call(known, True, None, new_number(), lost, self.waiting)

    def _agree_all(
        self,
    ) -> tuple[dict[int, OpFailure], list[Recovery], frozenset[str], list[tuple[Recovery, list[int]]]]:
        """Halt the ranks of all meshes; return what has failed, the meshes that live, uids of the others, new ranks."""
        found: dict[int, OpFailure] = {}
        living: list[Recovery] = []
        lost: set[str] = set()
        new: list[tuple[Recovery, list[int]]] = []
        for each in self._members():
            each.is_due = False
            try:
                failures, positions = each.agree()
            except MonarchError:
                if each is self:
                    raise
                lost.add(each.uid)
                continue
            living.append(each)
            if positions:
                new.append((each, positions))
            for number, failure in failures.items():
                found[number] = merged(found.get(number), failure)
        return found, living, frozenset(lost), new

    def _note_unreported(self, found: dict[int, OpFailure]) -> None:
        groups: dict[Any, list[int]] = {}
        for number, failure in found.items():
            groups.setdefault((failure.op, failure.line, failure.kind), []).append(number)
        for numbers in groups.values():
            self.unreported.append(Unreported(self._name, found[numbers[0]], tuple(numbers)))

    def agree(self) -> tuple[dict[int, OpFailure], list[int]]:
        """Halt all ranks.

        Returns:
            The failures on any of them, by reference; and the positions of new ones, in the whole mesh.
        """
        found: dict[int, OpFailure] = {}
        self.waiting = {}
        with self.stream.order.held():
            halted = self.whole.halt.call()
        halts = list(halted.get(_WAIT_S).values())
        for halt in halts:
            for region, number in halt.waiting.items():
                self.waiting.setdefault(region, {})[halt.rank] = number
            for number, failure in halt.failures.items():
                found[number] = merged(found.get(number), failure)
        self._note_unreported(found)
        return found, [position for position, halt in enumerate(halts) if halt.is_new]
