"""Deaths in the meshes that this process owns: judged, started again, or told to all who wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from monarch._actors.faults import TOGETHER
from monarch._actors.gather import last_lines
from monarch._actors.meshfailure import MeshFailure
from monarch._actors.procs import split_proc
from monarch._actors.runtime import Runtime
from monarch._actors.supervise import asked_of, expect_verdict, in_judge, nothing_open
from monarch._core.ranks import describe_ranks
from monarch._core.supervision import Begin, Collect, Command, Fail, Judge
from monarch._wire import messages as m
from monarch.exceptions import MonarchError, StoppedError

if TYPE_CHECKING:
    from monarch._actors.faults import Faults
    from monarch._actors.procmesh import _Shared


class _Death:
    """What is known of the death of one rank."""

    def __init__(self, dead: m.Dead, latest: int) -> None:
        self.dead = dead
        self.latest = latest
        """The last port that was given before it was known: calls that come after it know what there is."""
        self.when = dead.when or time.time()
        self.calls: list[str] = []


class Deaths:
    """Does what ``Supervision`` says; its events come from several threads."""

    def __init__(self, runtime: Runtime, faults: Faults) -> None:
        self._runtime = runtime
        self._faults = faults
        self._lock = threading.Lock()
        self._known: dict[tuple[str, int], _Death] = {}
        runtime.on_dying = self.dies
        runtime.supervising = self

    def joined(self, uid: str, rank: int, proc: str) -> None:
        """A process has the place of this rank from now on."""
        with self._lock:
            commands = self._runtime.own_procs[uid].supervision.joined(rank, proc)
        self._do(uid, commands)

    def left(self, uid: str, rank: int) -> None:
        """A mesh has no such rank any more."""
        with self._lock:
            commands = self._runtime.own_procs[uid].supervision.left(rank)
        self._do(uid, commands)

    def dies(self, dead: m.Dead) -> None:
        """A process has died, and nobody was told yet."""
        uid, rank = split_proc(dead.proc)
        shared = self._runtime.own_procs.get(uid)
        if shared is None or self._runtime.closed:
            return
        expected = dead.expected or shared.stopped is not None
        with self._lock:
            news = shared.supervision.living.get(rank) == dead.proc
            commands = shared.supervision.died(rank, dead.proc, expected)
            if news and not expected:
                self._known[uid, rank] = _Death(dead, self._runtime.last_port)
        if news and not expected:
            self.await_verdict(uid, "", rank)
        self._do(uid, commands)

    def await_verdict(self, uid: str, key: str, rank: int) -> None:
        """A failure that may be dealt with: calls that meet it wait for that."""
        shared = self._runtime.own_procs.get(uid)
        if shared is not None and (shared.supervision.restart or asked_of(self._runtime, uid, key, rank)):
            expect_verdict(self._runtime, uid)

    def died(self, dead: m.Dead, calls: list[str]) -> None:
        """Those who waited for a process that has died were told: these calls."""
        known = self._known.get(split_proc(dead.proc))
        if known is not None and known.dead is dead:
            known.calls = calls

    def _do(self, uid: str, commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, Collect):
                self._runtime.pump.call_later(TOGETHER, partial(self._collect, uid))
            elif isinstance(command, Begin):
                in_judge(self._runtime, uid, partial(self._restart, uid, command))
            elif isinstance(command, Judge):
                if any(asked_of(self._runtime, uid, "", rank) for rank in command.ranks):
                    in_judge(self._runtime, uid, partial(self._judge, uid, command))
                else:
                    self._judge(uid, command)
            else:
                self._fail(uid, command)

    def _collect(self, uid: str) -> None:
        with self._lock:
            commands = self._runtime.own_procs[uid].supervision.collect(time.monotonic())
        self._do(uid, commands)
        # It may have been replaced before anybody was asked.
        nothing_open(self._runtime, uid)

    def begin_again(self, uid: str, ranks: tuple[int, ...], otherwise: Callable[[], None]) -> None:
        """Actors have failed in processes that live: they are made anew if the mesh has a rule that says so."""
        shared = self._runtime.own_procs.get(uid)
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

        in_judge(self._runtime, uid, restart)

    def _heal(self, shared: _Shared, begin: Begin) -> None:
        """After the pause, if the mesh is still there by then."""
        from monarch._actors.healing import heal

        runtime = self._runtime
        until = time.monotonic() + begin.after
        pause = threading.Event()
        while shared.stopped is None and not runtime.closed and time.monotonic() < until:
            pause.wait(min(0.1, max(0.0, until - time.monotonic())))
        if shared.stopped is None and not runtime.closed:
            heal(shared, runtime, 60.0)
            shared.restarts += 1

    def _restart(self, uid: str, begin: Begin) -> None:
        shared = self._runtime.own_procs[uid]
        try:
            self._heal(shared, begin)
        except MonarchError as error:
            if shared.stopped is not None or self._runtime.closed:
                # It was stopped meanwhile, so that there is nothing to be told of.
                with self._lock:
                    for rank in begin.ranks:
                        shared.supervision.left(rank)
                return
            with self._lock:
                for rank in begin.ranks:
                    if (uid, rank) in self._known:
                        reason = f"{self._known[uid, rank].dead.reason}, and could not be started again: {error}"
                        old = self._known[uid, rank].dead
                        self._known[uid, rank].dead = m.Dead(old.proc, reason, False, old.tails)
                commands = shared.supervision.not_restarted(begin.ranks)
            self._do(uid, commands)
            if not commands and not isinstance(error, StoppedError):
                # The processes are there again, and an actor is not.
                owner = self._runtime.proc_meshes[uid][1]
                latest = self._runtime.last_port
                self._faults.judge(partial(self._failure, uid), uid, "", begin.ranks, owner, latest)

    def _judge(self, uid: str, judge: Judge) -> None:
        owner = self._runtime.proc_meshes[uid][1]
        for rank in judge.ranks:
            name = self._known[uid, rank].dead.proc

            def judged(handled: bool, rank: int = rank, name: str = name) -> None:
                with self._lock:
                    commands = self._runtime.own_procs[uid].supervision.judged(rank, name, handled)
                self._do(uid, commands)

            self._faults.ask(self._failure(uid, (rank,)), asked_of(self._runtime, uid, "", rank), owner, judged)

    def _fail(self, uid: str, fail: Fail) -> None:
        """Nobody handles it: all calls to the mesh fail, and if nobody has heard of it by a call the owner does."""
        name, owner = self._runtime.proc_meshes[uid]
        reasons: dict[str, list[int]] = {}
        waited, latest = False, 0
        for rank in fail.ranks:
            known = self._known[uid, rank]
            latest = max(latest, known.latest)
            waited = waited or bool(known.calls)
            reasons.setdefault(known.dead.reason, []).append(rank)
        what = "; ".join(
            f"the process{'es' if len(ranks) > 1 else ''} of {describe_ranks(ranks)} of {name} {reason}"
            for reason, ranks in reasons.items()
        )
        why = f"{what}, and nobody supervises {name}, so that all of its calls fail"
        if not self._runtime.fail_calls(uid, "", why, latest) and not waited:
            for ranks in reasons.values():
                self._faults.up(self._failure(uid, tuple(ranks)), owner)

    def _failure(self, uid: str, ranks: tuple[int, ...]) -> MeshFailure:
        known = self._known[uid, ranks[0]]
        reason = known.dead.reason
        text = f"its process {reason}" if len(ranks) == 1 else f"each of their processes {reason}"
        tail = last_lines(known.dead)
        if tail:
            text += "\n" + "\n".join(["last lines of stderr:", *(f"  {line}" for line in tail)])
        calls = dict.fromkeys(call for rank in ranks for call in self._known[uid, rank].calls)
        shared = self._runtime.own_procs[uid]
        return MeshFailure(
            self._runtime.proc_meshes[uid][0],
            shared.whole(self._runtime),
            ranks,
            text,
            reason,
            known.when,
            list(calls),
        )
