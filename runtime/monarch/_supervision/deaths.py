"""Deaths in meshes that this process owns: judged, restarted, or reported to all waiting calls."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from monarch._core.causes import Cause, CellRef, NotRestarted
from monarch._core.roster import split_proc
from monarch._core.shapes.ranks import describe_ranks
from monarch._core.supervision import Begin, Collect, Command, Fail, Judge
from monarch._core.text.causes import describe, describe_all
from monarch._meshes.procs.proc_mesh import whole_of
from monarch._meshes.procs.queries import actors_at
from monarch._meshes.registry import meshes_of
from monarch._meshes.verdicts import verdicts_of
from monarch._node.node import Node
from monarch._node.replies.death_errors import age_of_lines, last_lines
from monarch._supervision.escalation import Escalation
from monarch._supervision.mesh_failure import MeshFailure
from monarch._supervision.state import TOGETHER, supervisors_of
from monarch._wire import messages as m
from monarch.exceptions import MonarchError, StoppedError

if TYPE_CHECKING:
    from monarch._core.verdicts import Hold
    from monarch._meshes.procs.state import ProcsState
    from monarch._node.future import Promise


class _Death:
    """The death of one rank."""

    def __init__(self, dead: m.Dead, latest: int) -> None:
        self.dead = dead
        self.latest = latest
        """The last port opened before the death was known: later calls know of it."""
        self.when = dead.when or time.time()
        self.calls: list[str] = []


class Deaths:
    """Executes the commands of ``Supervision``; its events come from several threads."""

    def __init__(self, node: Node, escalation: Escalation) -> None:
        self._node = node
        self._escalation = escalation
        self._lock = threading.RLock()
        """Also guards all Supervision machines; held only for their steps."""
        self._known: dict[tuple[str, int], _Death] = {}
        """The latest death, by mesh and rank. Lock: ``_lock``."""
        self._collecting: dict[str, Hold[Promise[None]]] = {}
        """By mesh, the hold on its verdict until its deaths are collected. Lock: ``_lock``."""
        node.events.dying.subscribe(self.dies)
        node.events.died.subscribe(self.died)
        meshes_of(node).joined.subscribe(self.joined)
        meshes_of(node).left.subscribe(self.left)

    def joined(self, uid: str, rank: int, proc: str) -> None:
        """Note that a process has taken this rank."""
        with self._lock:
            commands = meshes_of(self._node).own_procs[uid].supervision.joined(rank, proc)
        self._do(uid, commands)

    def left(self, uid: str, rank: int) -> None:
        """Note that a rank has left the mesh."""
        with self._lock:
            commands = meshes_of(self._node).own_procs[uid].supervision.left(rank)
        self._do(uid, commands)

    def dies(self, dead: m.Dead) -> None:
        """Handle a death before anybody is told."""
        uid, rank = split_proc(dead.proc)
        shared = meshes_of(self._node).own_procs.get(uid)
        if shared is None or self._node.closed:
            return
        expected = dead.expected or shared.stopped is not None
        awaited = not expected and self.is_supervised(uid, "", rank)
        with self._lock:
            news = shared.supervision.living.get(rank) == dead.proc
            commands = shared.supervision.died(rank, dead.proc, expected)
            if news and not expected:
                self._known[uid, rank] = _Death(dead, self._node.ports.last)
                if awaited and uid not in self._collecting:
                    self._collecting[uid] = verdicts_of(self._node).hold(uid, f"{describe_ranks([rank])} has just died")
        self._do(uid, commands)

    def is_supervised(self, uid: str, key: str, rank: int) -> bool:
        """Return whether a failure may be handled, so that calls that meet it wait."""
        shared = meshes_of(self._node).own_procs.get(uid)
        return shared is not None and bool(
            shared.supervision.restart or supervisors_of(self._node).asked_of(uid, key, rank)
        )

    def died(self, dead: m.Dead, calls: list[str]) -> None:
        """Note the calls that were told of a death."""
        with self._lock:
            known = self._known.get(split_proc(dead.proc))
            if known is not None and known.dead is dead:
                # Keep ``latest``: by now a caller may have continued with a new call.
                known.calls = calls

    def _do(self, uid: str, commands: list[Command]) -> None:
        verdicts = verdicts_of(self._node)
        for command in commands:
            if isinstance(command, Collect):
                self._node.receive_loop.call_later(TOGETHER, partial(self._collect, uid))
            elif isinstance(command, Begin):
                who = f"its restart rule replaces {describe_ranks(command.ranks)}, attempt {command.attempt}"
                verdicts.decide(uid, who, partial(self._restart, uid, command))
            elif isinstance(command, Judge):
                if any(supervisors_of(self._node).asked_of(uid, "", rank) for rank in command.ranks):
                    who = f"its supervisors are handling the death of {describe_ranks(command.ranks)}"
                    verdicts.decide(uid, who, partial(self._judge, uid, command))
                else:
                    self._judge(uid, command)
            else:
                self._fail(uid, command)

    def _collect(self, uid: str) -> None:
        with self._lock:
            commands = meshes_of(self._node).own_procs[uid].supervision.collect(time.monotonic())
            hold = self._collecting.pop(uid, None)
        try:
            self._do(uid, commands)
        finally:
            # By now the deciders have their own holds, or the rank was replaced meanwhile.
            verdicts_of(self._node).release(uid, hold)

    def begin_again(self, uid: str, ranks: tuple[int, ...], otherwise: Callable[[], None]) -> None:
        """Recreate failed actors of living processes if the mesh has a restart rule."""
        shared = meshes_of(self._node).own_procs.get(uid)
        with self._lock:
            begin = shared.supervision.allow(ranks, time.monotonic()) if shared is not None else None
        if begin is None or shared is None:
            otherwise()
            return

        def restart() -> None:
            try:
                self._heal(shared, begin)
            except MonarchError:
                otherwise()

        who = f"its restart rule recreates the actors of {describe_ranks(ranks)}, attempt {begin.attempt}"
        verdicts_of(self._node).decide(uid, who, restart)

    def _heal(self, shared: ProcsState, begin: Begin) -> None:
        """Heal after the pause, unless the mesh was stopped."""
        from monarch._supervision.healing import heal

        node = self._node
        until = time.monotonic() + begin.after
        pause = threading.Event()
        while shared.stopped is None and not node.closed and time.monotonic() < until:
            pause.wait(min(0.1, max(0.0, until - time.monotonic())))
        if shared.stopped is None and not node.closed:
            replaced, _ = heal(shared, node, 60.0)
            shared.restarts += 1
            # Calls to the mesh wait until the verdict, which this thread gives.
            node.events.replaced.tell(shared.procs.uid, replaced, False)

    def _restart(self, uid: str, begin: Begin) -> None:
        shared = meshes_of(self._node).own_procs[uid]
        try:
            self._heal(shared, begin)
        except MonarchError as error:
            if shared.stopped is not None or self._node.closed:
                # It was stopped in the meantime; nothing to report.
                with self._lock:
                    for rank in begin.ranks:
                        shared.supervision.left(rank)
                return
            with self._lock:
                for rank in begin.ranks:
                    known = self._known.get((uid, rank))
                    if known is not None:
                        old = known.dead
                        cause = NotRestarted(old.cause, str(error))
                        known.dead = m.Dead(
                            old.proc, cause, False, old.tails, at=old.at, since=old.since, quiet=old.quiet
                        )
                commands = shared.supervision.not_restarted(begin.ranks)
            self._do(uid, commands)
            if not commands and not isinstance(error, StoppedError):
                # The processes are back, but an actor is not.
                owner = meshes_of(self._node).proc_meshes[uid][1]
                latest = self._node.ports.last
                self._escalation.judge(partial(self._failure, uid), uid, "", begin.ranks, owner, latest)

    def _judge(self, uid: str, judge: Judge) -> None:
        owner = meshes_of(self._node).proc_meshes[uid][1]
        with self._lock:
            names = {rank: self._known[uid, rank].dead.proc for rank in judge.ranks}
        for rank, name in names.items():

            def judged(handled: bool, rank: int = rank, name: str = name) -> None:
                with self._lock:
                    commands = meshes_of(self._node).own_procs[uid].supervision.judged(rank, name, handled)
                self._do(uid, commands)

            asked = supervisors_of(self._node).asked_of(uid, "", rank)
            self._escalation.ask(self._failure(uid, (rank,)), asked, owner, judged)

    def _fail(self, uid: str, fail: Fail) -> None:
        """Fail all calls to the mesh, since nobody handles the death; tell the owner if no call was told."""
        name, owner = meshes_of(self._node).proc_meshes[uid]
        kinds: dict[tuple[Cause, CellRef | None], list[int]] = {}
        waited, latest = False, 0
        with self._lock:
            for rank in fail.ranks:
                known = self._known[uid, rank]
                latest = max(latest, known.latest)
                waited = waited or bool(known.calls)
                kinds.setdefault((known.dead.cause, known.dead.at), []).append(rank)
        what = "; ".join(
            f"the processes of {describe_ranks(ranks)} of {name} {describe_all(cause, at)}"
            if len(ranks) > 1
            else f"the process of {describe_ranks(ranks)} of {name} {describe(cause, at)}"
            for (cause, at), ranks in kinds.items()
        )
        asked = any(supervisors_of(self._node).asked_of(uid, "", rank) for rank in fail.ranks)
        lacks = f"no supervisor of {name} has handled it" if asked else f"{name} has no supervisor"
        why = f"{what}, and {lacks}, so all of its calls fail"
        if not self._node.ports.fail_calls(uid, "", why, latest) and not waited:
            for ranks in kinds.values():
                self._escalation.up(self._failure(uid, tuple(ranks)), owner)

    def _failure(self, uid: str, ranks: tuple[int, ...]) -> MeshFailure:
        with self._lock:
            known = self._known[uid, ranks[0]]
            dead, when = known.dead, known.when
            calls = dict.fromkeys(call for rank in ranks for call in self._known[uid, rank].calls)
        text = f"its process {dead.reason}" if len(ranks) == 1 else f"each of their processes {dead.reason}"
        tail = last_lines(dead)
        if tail:
            text += "\n" + "\n".join([f"last lines of stderr{age_of_lines(dead)}:", *(f"  {line}" for line in tail)])
        whole = whole_of(meshes_of(self._node).own_procs[uid], self._node)
        name, actors = meshes_of(self._node).proc_meshes[uid][0], actors_at(uid, ranks, self._node)
        return MeshFailure(name, whole, ranks, text, dead.reason, when, list(calls), actors=actors)
