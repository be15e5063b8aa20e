"""Failures that nobody waits to hear of: they go to the owner, and if that does not handle them up to the program."""

from __future__ import annotations

import sys
from collections.abc import Callable
from threading import Timer
from typing import Any

from monarch._actors.failures import pack_failure, unpack_failure
from monarch._actors.gather import last_lines
from monarch._actors.procs import split_proc
from monarch._actors.runtime import Runtime
from monarch._core.ranks import describe_ranks
from monarch._wire import messages as m
from monarch.exceptions import SupervisionError

_TOGETHER = 0.05
"""Seconds for which failures are collected: those of one cause come together, and are told as one."""


class MeshFailure:
    """A failure in a mesh, as ``__supervise__`` and ``unhandled_fault_hook`` are told of it.

    Attributes:
        mesh_name: name of the mesh.
        mesh: the mesh itself, if this process still has it.
        ranks: base ranks that failed.
        text: what happened.
    """

    def __init__(self, mesh_name: str, mesh: Any, ranks: tuple[int, ...], text: str) -> None:
        self.mesh_name = mesh_name
        self.mesh = mesh
        self.ranks = ranks
        self.text = text

    def report(self) -> str:
        """What happened, to whom."""
        return f"{describe_ranks(self.ranks)} of {self.mesh_name}: {self.text}"

    def __str__(self) -> str:
        return self.report()

    def __repr__(self) -> str:
        return f"<MeshFailure {self.mesh_name} {describe_ranks(self.ranks)}>"


def default_fault_hook(failure: MeshFailure) -> None:
    """Says on stderr what failed; calls to the mesh raise from then on."""
    print(f"monarch: unhandled failure of {failure.report()}", file=sys.stderr, flush=True)


class Faults:
    """Takes failures of one process's meshes to who owns them."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        runtime.on_fault = self.on_fault
        runtime.on_dead = self.on_dead
        self._dead: list[m.Dead] = []
        self._failed: list[m.Fault] = []

    def on_fault(self, fault: m.Fault) -> None:
        """An actor of a mesh has failed where nobody waited."""
        self._failed.append(fault)
        if len(self._failed) == 1:
            self._runtime.pump.call_later(_TOGETHER, self._report_failed)

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
            ranks = tuple(sorted(fault.rank for fault in several))
            self._tell(MeshFailure(name, mesh, ranks, f"{kind}: {said}\n{trace}"), self._owner(actor))

    def on_dead(self, dead: m.Dead, waited: bool) -> None:
        """A process has died. Whoever waited for it has an error already; else its owner is told."""
        if waited or dead.expected or self._runtime.closed:
            return
        if split_proc(dead.proc)[0] not in self._runtime.proc_meshes:
            return
        self._dead.append(dead)
        if len(self._dead) == 1:
            self._runtime.pump.call_later(_TOGETHER, self._report_dead)

    def _report_dead(self) -> None:
        dead, self._dead = self._dead, []
        groups: dict[tuple[str, str], list[m.Dead]] = {}
        for each in dead:
            uid = split_proc(each.proc)[0]
            groups.setdefault((uid, each.reason), []).append(each)
        for (uid, reason), several in groups.items():
            ranks = tuple(sorted(split_proc(each.proc)[1] for each in several))
            tail = last_lines(several[0])
            text = f"its process {reason}" if len(ranks) == 1 else f"their processes each {reason}"
            if tail:
                text += "\n" + "\n".join(["last lines of stderr:", *(f"  {line}" for line in tail)])
            name, owner = self._runtime.proc_meshes[uid]
            self._tell(MeshFailure(name, None, ranks, text), owner)

    def _owner(self, key: str) -> str:
        return self._runtime.owners.get(key) or self._runtime.proc_meshes.get(key, ("", ""))[1]

    def _tell(self, failure: MeshFailure, owner: str) -> None:
        runtime = self._runtime
        cell = runtime.actors.get(owner) if owner else None
        if cell is None:
            if runtime.config is None:
                self._hook(failure)
            else:
                # Its owner is gone, or was no actor: then the one that owns this process is next.
                packed = _pack(failure)
                runtime.peer(runtime.config.owner).send(
                    m.encode(m.Fault(runtime.proc, runtime.config.procs.uid, runtime.rank, packed))
                )
            return
        up: Callable[[], None] = lambda: cell.fail(_pack(failure))  # noqa: E731
        if hasattr(cell.instance, "__supervise__"):
            cell.supervise(failure, up)
        else:
            up()

    def _hook(self, failure: MeshFailure) -> None:
        module = sys.modules.get("monarch.actor")
        hook = getattr(module, "unhandled_fault_hook", None) or default_fault_hook
        # Not here: the hook may do anything, and this thread receives messages.
        timer = Timer(0, _call, (hook, failure))
        timer.daemon = True
        timer.start()


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
