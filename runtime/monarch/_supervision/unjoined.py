"""Warns waiting callers of ranks that wait in a collective for ranks that have finished the call.

No requests are sent while all ranks of a mesh are busy, or all have finished. ``_core/unjoined.py`` decides.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from monarch._core.fail_fast import CallState
from monarch._core.roster import Procs, split_proc
from monarch._core.text.unjoined import describe_unjoined
from monarch._core.unjoined import CollectiveWait, Unjoined, UnjoinedRanks
from monarch._node.current import current_node
from monarch._node.node import Node
from monarch._node.replies.gather import Gather, is_gather
from monarch._node.services.asking import ServiceAnswers
from monarch._node.services.registry import ServiceRequest, request, service
from monarch._procs.os.blocked import WaitKind, blocked
from monarch._python.frames import frame_of
from monarch._supervision.freeing import place_of, running, standing, thread_of
from monarch._wire.receiving.aside import tell
from monarch.config import COLLECTIVE_WAIT

_SHARE = 0.5
"""Fraction of the limit between two looks while a rank waits."""


@service("unjoined.waits", "threaded")
def waits(key: str, src: str, port: int) -> CollectiveWait | None:
    """Service: return the collective that a call waits in here.

    Args:
        key: the key of the actor's mesh.
        src: the calling proc.
        port: the port at which the caller waits.

    Returns:
        None if it does not wait in a collective.
    """
    from monarch._groups.rendezvous import uses_collectives

    found = running(key, src, port)
    if found is None or not uses_collectives():
        return None
    from monarch._tensors.collectives.waiting import waits_in

    ident = thread_of(found[0])
    frame = frame_of(ident)
    return waits_in(frame, current_node().rank, place_of(frame), blocked(ident).wait is WaitKind.OTHER)


class UnjoinedCollectives:
    """The part of a node that looks for such ranks. Leader only.

    Attributes:
        show: shows a finding, given a call of a waiting rank and the size of the mesh. Set once.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self.show: Callable[[UnjoinedRanks, Gather[Any], int], None] = _print
        self._latest = 0
        """The port of the last call at the last look."""
        self._looks: dict[str, _Look] = {}
        """By uid of the mesh."""
        self._known: dict[str, _Known] = {}
        """By uid of the mesh, while calls to it run; a look ends once all is reported, and this outlives it."""

    def tick(self, now: float) -> None:
        """Check meshes where some ranks have finished, about every second."""
        latest, self._latest = self._latest, self._node.ports.last
        # Without calls since the last look: a loop of short calls waits for nothing long.
        under_way = _under_way(self._node, latest)
        self._known = {uid: known for uid, known in self._known.items() if uid in under_way or uid in self._looks}
        for uid, calls in under_way.items():
            if uid not in self._looks:
                known = self._known.setdefault(uid, _Known())
                self._looks[uid] = _Look(self._node, uid, known, self._show_now)
                self._looks[uid].begin(calls)
        for look in self._looks.values():
            look.hurry(now)
        self._looks = {uid: look for uid, look in self._looks.items() if not look.over}

    def _show_now(self, finding: UnjoinedRanks, call: Gather[Any], count: int) -> None:
        self.show(finding, call, count)


def _print(finding: UnjoinedRanks, call: Gather[Any], count: int) -> None:
    tell(f"monarch: {describe_unjoined(finding, count, call.label, 'end that call', ranks_of(call))}")


def ranks_of(call: Gather[Any]) -> set[int]:
    """Return the ranks that a call runs on, as numbered in their process mesh."""
    return {split_proc(peer.proc)[1] for peer in call.targets}


class _Known:
    """The reports of the ranks of one mesh while calls to it run. Leader only."""

    def __init__(self) -> None:
        self.machine = Unjoined(COLLECTIVE_WAIT())
        self._ports: dict[int, int] = {}
        """By rank, the oldest call that waits for it."""

    def note(self, calls: dict[str, Gather[Any]]) -> None:
        """Forget the reports of ranks that run another call than before."""
        ports = {split_proc(proc)[1]: call.port for proc, call in calls.items()}
        for rank in self._ports.keys() - {rank for rank, port in ports.items() if self._ports.get(rank) == port}:
            self.machine.forget(rank)
        self._ports = ports


class _Look:
    """Examines one mesh while a rank waits in a collective and others have finished."""

    def __init__(
        self, node: Node, uid: str, known: _Known, show: Callable[[UnjoinedRanks, Gather[Any], int], None]
    ) -> None:
        self._node, self._uid, self._known, self._show = node, uid, known, show
        self._limit = COLLECTIVE_WAIT()
        self._machine = known.machine
        self._calls: dict[str, Gather[Any]] = {}
        """The oldest call that waits for each proc."""
        self._procs: Procs | None = None
        self._answers: list[ServiceAnswers] = []
        self._pending: set[str] = set()
        """Procs that have not answered this look."""
        self._asked = 0.0
        self.over = False

    def begin(self, calls: dict[str, Gather[Any]]) -> None:
        """Ask ranks that owe an answer for their collective, and the others for their positions."""
        self._close()
        self._calls = calls
        self._known.note(calls)
        self._procs = _procs_of(calls.values())
        finished = self._finished() if self._procs is not None else {}
        if self._procs is None or not finished:
            self.over = True
            return
        self._asked = time.monotonic()
        members = self._machine.members
        self._ask_waiting()
        rested = [proc for rank, proc in finished.items() if rank in members]
        self._ask(rested, request(standing, "", "", 0), self._stands)

    def hurry(self, now: float) -> None:
        """Go on without late answers: C code may hold the GIL there."""
        if self._pending and now - self._asked >= self._limit:
            self._pending.clear()
            self._judge()

    def _finished(self) -> dict[int, str]:
        """Return the living procs that owe nothing, by rank."""
        assert self._procs is not None
        known = self._node.peers.known
        procs = {rank: self._procs.proc(rank) for rank in range(self._procs.size)}
        return {
            rank: proc
            for rank, proc in procs.items()
            if proc not in self._calls and proc in known and known[proc].dead is None
        }

    def _ask_waiting(self) -> None:
        several: dict[int, tuple[Gather[Any], list[str]]] = {}
        for proc, call in self._calls.items():
            several.setdefault(call.port, (call, []))[1].append(proc)
        for call, procs in several.values():
            self._ask(procs, request(waits, call.actor, self._node.proc, call.port), self._waits)

    def _ask(self, procs: list[str], asked: ServiceRequest, heard: Any) -> None:
        self._pending.update(procs)
        if procs:
            self._answers.append(ServiceAnswers(self._node, procs, asked, partial(self._heard, heard)))

    def _heard(self, note: Any, proc: str, answer: Any) -> None:
        if proc not in self._pending:
            return
        self._pending.discard(proc)
        note(proc, answer)
        if not self._pending:
            self._judge()

    def _waits(self, proc: str, answer: Any) -> None:
        self._machine.waiting(split_proc(proc)[1], answer if isinstance(answer, CollectiveWait) else None, self._asked)

    def _stands(self, proc: str, answer: Any) -> None:
        if isinstance(answer, CallState):
            self._machine.standing(answer.rank, answer)

    def _judge(self) -> None:
        """Report the finding after all answers, and look again if a rank waits."""
        assert self._procs is not None
        for finding in self._machine.findings(self._asked):
            call = self._calls.get(self._procs.proc(finding.waits.rank))
            if call is not None:
                self._show(finding, call, self._procs.size)
        if not self._machine.members:
            self._close()
            self.over = True
            return
        self._node.receive_loop.call_later(self._limit * _SHARE, self._again)

    def _again(self) -> None:
        calls = {} if self._node.closed else _under_way(self._node, self._node.ports.last).get(self._uid, {})
        if calls:
            self.begin(calls)
        else:
            self._close()
            self.over = True

    def _close(self) -> None:
        answers, self._answers = self._answers, []
        self._pending.clear()
        for each in answers:
            each.close()


def _under_way(node: Node, latest: int) -> dict[str, dict[str, Gather[Any]]]:
    """Return, by process mesh, the procs that owe an answer to an actor call, and the oldest such call of each.

    Args:
        node: the node of this process.
        latest: the port of the last call that counts.
    """
    found: dict[str, dict[str, Gather[Any]]] = {}
    for call in _calls(node, latest):
        for peer in call.waits_for():
            if peer.dead is None:
                found.setdefault(split_proc(peer.proc)[0], {}).setdefault(peer.proc, call)
    return found


def _calls(node: Node, latest: int) -> Iterator[Gather[Any]]:
    for each in list(node.ports.gathers.values()):
        if is_gather(each) and each.port <= latest and each.actor and each.watched and not each.done:
            yield each


def _procs_of(calls: Iterable[Gather[Any]]) -> Procs | None:
    for call in calls:
        if call.view is not None:
            return call.view._state.procs
    return None
