"""Faults: actors that failed while nobody waited, collected into one failure per cause, and restarted by rule."""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from monarch._actors.supervising import supervises
from monarch._actors.table import actors_of
from monarch._core.shapes.ranks import describe_ranks
from monarch._core.text.advice import advice
from monarch._meshes.actors.creation import Booting
from monarch._meshes.inside import state_of
from monarch._meshes.procs.proc_mesh import whole_of
from monarch._meshes.registry import booting, give_up_lost, meshes_of, was_read
from monarch._meshes.verdicts import verdicts_of
from monarch._node.node import Node
from monarch._node.remote_errors import unpack_failure, with_source
from monarch._supervision.deaths import Deaths
from monarch._supervision.escalation import Escalation, call_hook
from monarch._supervision.mesh_failure import MeshFailure
from monarch._supervision.state import TOGETHER
from monarch._wire import messages as m
from monarch.exceptions import StoppedError

if TYPE_CHECKING:
    from monarch._core.verdicts import Hold
    from monarch._meshes.actors.actor_mesh import ActorMesh
    from monarch._node.future import Promise


class Faults:
    """Reports the faults of one process's meshes."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._escalation = Escalation(node)
        self._deaths = Deaths(node, self._escalation)
        self._lock = threading.RLock()
        self._failed: list[m.Fault] = []
        """Faults being collected. Lock: ``_lock``."""
        self._latest = 0
        """The last port opened before the last fault. Lock: ``_lock``."""
        self.ends = False
        """Whether the program ends: the end of calls that nobody waits for is no news then. Set once."""
        self._collecting: dict[str, Hold[Promise[None]]] = {}
        """By process mesh, the hold on its verdict until its faults are collected. Lock: ``_lock``."""
        node.events.faulted.subscribe(self.on_fault)
        node.events.not_sent.subscribe(_not_sent)
        verdicts_of(node).settled.subscribe(partial(give_up_lost, node))

    def on_fault(self, fault: m.Fault) -> None:
        """Collect the fault of an actor."""
        mesh = meshes_of(self._node).actor_meshes.get(fault.actor)
        uid = state_of(mesh).procs.uid if mesh is not None else ""
        awaited = bool(uid) and self._deaths.is_supervised(uid, fault.actor, fault.rank)
        # A fault of a replaced process does not count for its replacement, in whatever order they arrive.
        current = mesh is not None and state_of(mesh).procs.has(fault.src)
        if (
            mesh is not None
            and current
            and (awaited or not _was_not_made(mesh, fault.rank) or self._is_judged_by_owner(fault.actor))
        ):
            # A heal for another reason does not rerun an unsupervised constructor.
            state_of(mesh).failed.add(fault.rank)
        with self._lock:
            self._failed.append(fault)
            self._latest = self._node.ports.last
            first = len(self._failed) == 1
            if awaited and uid not in self._collecting:
                who = f"an actor on {describe_ranks([fault.rank])} has just failed"
                self._collecting[uid] = verdicts_of(self._node).hold(uid, who)
        if first:
            self._node.receive_loop.call_later(TOGETHER, self._report_aside)

    def _is_judged_by_owner(self, actor: str) -> bool:
        mailbox = actors_of(self._node).here.get(meshes_of(self._node).owners.get(actor, ""))
        return mailbox is not None and supervises(mailbox)

    def flush(self) -> None:
        """Report recent faults to the hook, in this thread, at the end of the program."""
        with self._lock:
            failed, self._failed = self._failed, []
        for fault in failed:
            if not self._is_over(fault):
                name, mesh = self._named(fault.actor)
                call_hook(self._failure(name, mesh, fault, (fault.rank,)))
        for mesh in list(meshes_of(self._node).actor_meshes.values()):
            creation = state_of(mesh).creation
            faults = creation.unreported() if creation is not None else []
            for fault in (each for each in faults if not was_read(self._node, each)):
                call_hook(self._failure(state_of(mesh).name, mesh, fault, (fault.rank,)))
        for shared in list(meshes_of(self._node).own_procs.values()):
            boot = shared.initialized
            for fault in boot.unreported() if isinstance(boot, Booting) else ():
                call_hook(self._failure(shared.procs.name, None, fault, (fault.rank,)))

    def _report_aside(self) -> None:
        """Report in another thread, since tracebacks read source files."""
        try:
            self._node.lanes.post("faults", self._report)
        except RuntimeError:
            # The system cannot start a thread.
            self._report()

    def _report(self) -> None:
        with self._lock:
            failed, self._failed = self._failed, []
            holds, self._collecting = self._collecting, {}
            latest = self._latest
        try:
            groups: dict[tuple[str, str, str], list[m.Fault]] = {}
            for fault in failed:
                if self._is_over(fault):
                    continue
                failure = unpack_failure(fault.body)
                groups.setdefault((fault.actor, failure.kind, failure.text), []).append(fault)
            for (actor, _, _), several in groups.items():
                self._report_one(actor, several, latest)
        finally:
            for uid, hold in holds.items():
                # By now the deciders have their own holds.
                verdicts_of(self._node).release(uid, hold)

    def _is_over(self, fault: m.Fault) -> bool:
        """Return whether a fault is no news: somebody has its error by now, or it is due to the end of the program."""
        failure = unpack_failure(fault.body)
        return was_read(self._node, fault) or (self.ends and failure.own and failure.kind == StoppedError.__name__)

    def _named(self, actor: str) -> tuple[str, ActorMesh | None]:
        """Return the name of a mesh of actors or of processes, and the mesh of actors."""
        meshes = meshes_of(self._node)
        mesh = meshes.actor_meshes.get(actor)
        return state_of(mesh).name if mesh is not None else meshes.proc_meshes.get(actor, (actor, ""))[0], mesh

    def _report_one(self, actor: str, faults: list[m.Fault], latest: int) -> None:
        """Report actors of one mesh with the same failure."""
        node = self._node
        name, mesh = self._named(actor)
        owner = meshes_of(node).owners.get(actor) or meshes_of(node).proc_meshes.get(actor, ("", ""))[1]
        uid = state_of(mesh).procs.uid if mesh is not None else actor if booting(node, actor, faults[0].rank) else ""
        made = partial(self._failure, name, mesh, faults[0])
        ranks = tuple(sorted({fault.rank for fault in faults}))
        judge = partial(self._escalation.judge, made, uid, actor, ranks, owner, latest)
        self._deaths.begin_again(uid, ranks, judge)

    def _failure(self, name: str, mesh: ActorMesh | None, fault: m.Fault, ranks: tuple[int, ...]) -> MeshFailure:
        """Return the failure for some ranks of a fault."""
        failure = unpack_failure(fault.body)
        trace = advice().placed("\n".join(with_source(failure.trace)))
        text, port = f"{failure.kind}: {failure.text}\n{trace}", 0
        whole: Any = mesh
        if mesh is None and booting(self._node, fault.actor, fault.rank):
            text = f"bootstrap raised {text}"
            whole = whole_of(meshes_of(self._node).own_procs[fault.actor], self._node)
        elif mesh is not None and _was_not_made(mesh, fault.rank):
            state = state_of(mesh)
            assert state.creation is not None
            port = state.creation.port
            if not booting(self._node, state.procs.uid, fault.rank):
                text = f"__init__() raised {text}"
        return MeshFailure(name, whole, ranks, text, when=time.time(), port=port)


def _was_not_made(mesh: ActorMesh, rank: int) -> bool:
    """Return whether the constructor raised."""
    creation = state_of(mesh).creation
    return creation is not None and rank in creation.raised


def _not_sent(mesh: Any, ranks: tuple[int, ...], text: str) -> None:
    """Report a broadcast that was not sent."""
    call_hook(MeshFailure(mesh._name, mesh, ranks, text, when=time.time()))
