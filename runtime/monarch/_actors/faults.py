"""Failures go to those who supervise, to the owner, and if nobody handles them up to the program."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from threading import Timer
from typing import Any

from monarch._actors.failures import pack_failure, unpack_failure
from monarch._actors.meshfailure import MeshFailure
from monarch._actors.runtime import Runtime
from monarch._actors.supervise import Supervisor, asked_of, in_judge, nothing_open
from monarch._wire import messages as m
from monarch.exceptions import SupervisionError

TOGETHER = 0.05
"""Seconds for which failures are collected: those of one cause come together, and are told as one."""


def default_fault_hook(failure: MeshFailure) -> None:
    """Says on stderr what failed; calls to the mesh raise from then on."""
    at = time.strftime("%H:%M:%S", time.localtime(failure.when)) if failure.when else ""
    print(f"monarch: {f'{at} ' if at else ''}unhandled failure of {failure.report()}", file=sys.stderr, flush=True)


class Faults:
    """Takes failures of one process's meshes to those who are to know."""

    def __init__(self, runtime: Runtime) -> None:
        # It needs this module.
        from monarch._actors.deaths import Deaths

        self._runtime = runtime
        runtime.on_fault = self.on_fault
        self._failed: list[m.Fault] = []
        self._latest = 0
        """The last port that was given before the last of them."""
        self._deaths = Deaths(runtime, self)
        self.on_dead = runtime.on_dead = self._deaths.died

    def on_fault(self, fault: m.Fault) -> None:
        """An actor of a mesh has failed where nobody waited."""
        mesh = self._runtime.meshes.get(fault.actor)
        if mesh is not None:
            mesh._state.failed.add(fault.rank)
            self._deaths.await_verdict(mesh._state.procs.uid, fault.actor, fault.rank)
        self._failed.append(fault)
        self._latest = self._runtime.last_port
        if len(self._failed) == 1:
            self._runtime.pump.call_later(TOGETHER, self._report_failed)

    def _report_failed(self) -> None:
        failed, self._failed = self._failed, []
        groups: dict[tuple[str, str, str], list[m.Fault]] = {}
        for fault in failed:
            failure = unpack_failure(fault.body)
            groups.setdefault((fault.actor, failure.kind, failure.text), []).append(fault)
        for (actor, kind, said), several in groups.items():
            mesh = self._runtime.meshes.get(actor)
            trace = unpack_failure(several[0].body).trace
            name = mesh._name if mesh is not None else self._runtime.proc_meshes.get(actor, (actor, ""))[0]
            owner = self._runtime.owners.get(actor) or self._runtime.proc_meshes.get(actor, ("", ""))[1]
            uid = mesh._state.procs.uid if mesh is not None else ""
            ranks = tuple(sorted(fault.rank for fault in several))

            def made(
                ranks: tuple[int, ...], name: str = name, mesh: Any = mesh, text: str = f"{kind}: {said}\n{trace}"
            ):
                return MeshFailure(name, mesh, ranks, text, when=time.time())

            judge = partial(self.judge, made, uid, actor, ranks, owner, self._latest)
            self._deaths.begin_again(uid, ranks, judge)
            if uid:
                nothing_open(self._runtime, uid)

    def judge(
        self,
        made: Callable[[tuple[int, ...]], MeshFailure],
        uid: str,
        actor: str,
        ranks: tuple[int, ...],
        owner: str,
        latest: int,
    ) -> None:
        """Asks everybody about the failure of some ranks, and tells of those that nobody handles.

        Args:
            made: the failure, as it is told of some of them.
            uid: of the mesh of processes; empty if it is not known here.
            actor: key of the actors that have failed; empty if it is not about some.
            ranks: base ranks.
            owner: key of the actor that owns the mesh; empty if none does.
            latest: the last port that was given before it: calls that were made later are no concern of it.
        """
        _Judgement(self, made, uid, actor, ranks, owner, latest).begin()

    def ask(
        self, failure: MeshFailure, supervisors: list[Supervisor], owner: str, judged: Callable[[bool], None]
    ) -> None:
        """Asks who supervises, then the owner, whether a failure is handled; in a thread that may wait."""
        for supervisor in supervisors:
            if supervisor.judge(failure):
                judged(True)
                return
        cell = self._runtime.actors.get(owner) if owner else None
        if cell is not None and hasattr(cell.instance, "__supervise__"):
            cell.supervise(failure, judged)
        else:
            judged(False)

    def up(self, failure: MeshFailure, owner: str) -> None:
        """Nobody handles it: the owner has failed as well, and in a program its hook is called."""
        runtime = self._runtime
        cell = runtime.actors.get(owner) if owner else None
        if cell is not None:
            cell.fail(_pack(failure))
        elif runtime.config is None:
            self._hook(failure)
        else:
            # Its owner is gone, or was no actor: then the one that owns this process is next.
            fault = m.Fault(runtime.proc, runtime.config.procs.uid, runtime.rank, _pack(failure))
            runtime.peer(runtime.config.owner).send(m.encode(fault))

    def _hook(self, failure: MeshFailure) -> None:
        module = sys.modules.get("monarch.actor")
        hook = getattr(module, "unhandled_fault_hook", None) or default_fault_hook
        # Not here: the hook may do anything, and this thread receives messages.
        timer = Timer(0, _call, (hook, failure))
        timer.daemon = True
        timer.start()


class _Judgement:
    """Actors that have failed by one cause, and whether somebody handles each of them."""

    def __init__(
        self,
        faults: Faults,
        made: Callable[[tuple[int, ...]], MeshFailure],
        uid: str,
        actor: str,
        ranks: tuple[int, ...],
        owner: str,
        latest: int,
    ) -> None:
        self._faults = faults
        self._latest = latest
        self._made = made
        self._uid, self._actor, self._ranks, self._owner = uid, actor, ranks, owner
        self._verdicts: dict[int, bool] = {}

    def begin(self) -> None:
        """Asks about each; in a thread if that may take its time."""
        runtime = self._faults._runtime
        asked = {rank: asked_of(runtime, self._uid, self._actor, rank) for rank in self._ranks}

        def ask() -> None:
            for rank, supervisors in asked.items():
                self._faults.ask(
                    self._made((rank,)),
                    supervisors,
                    self._owner,
                    lambda handled, rank=rank: self._judged(rank, handled),
                )

        if any(asked.values()):
            in_judge(runtime, self._uid, ask)
        else:
            ask()

    def _judged(self, rank: int, handled: bool) -> None:
        self._verdicts[rank] = handled
        left = tuple(rank for rank, good in self._verdicts.items() if not good)
        if len(self._verdicts) < len(self._ranks) or not left:
            return
        failure, runtime = self._made(left), self._faults._runtime
        head = failure.report().partition("\n")[0]
        why = f"{head}; nobody handles that"
        if not self._uid or not runtime.fail_calls(self._uid, self._actor, why, self._latest):
            self._faults.up(failure, self._owner)


def _call(hook: Callable[[MeshFailure], None], failure: MeshFailure) -> None:
    try:
        hook(failure)
    except SystemExit:
        # A hook of this kind means to end the program.
        import _thread

        _thread.interrupt_main()


def _pack(failure: MeshFailure) -> bytes:
    error = SupervisionError(failure.report(), mesh=failure.mesh_name, ranks=failure.ranks)
    return pack_failure(error, True)
