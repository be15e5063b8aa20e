"""``with supervise(mesh, on_failure=...)``: the first handlers of failures in a mesh."""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

from monarch._core.kinds import is_a
from monarch._meshes.actors.actor_mesh import ActorMesh
from monarch._meshes.async_resource import AsyncResource
from monarch._meshes.inside import node_of, region_of, state_of
from monarch._meshes.procs.proc_mesh import ProcMesh
from monarch._meshes.registry import meshes_of
from monarch._meshes.verdicts import verdicts_of
from monarch._node.node import Node
from monarch._python.later import asyncio
from monarch._supervision.escalation import end_program
from monarch._supervision.mesh_failure import MeshFailure
from monarch._supervision.state import supervisors_of
from monarch.exceptions import ArgumentError, SupervisionError

if TYPE_CHECKING:
    from typing_extensions import Self


def supervise(mesh: Any, on_failure: Callable[[MeshFailure], Any] | None = None) -> Supervisor:
    """Handle the failures of a mesh during a ``with`` block: ``with supervise(mesh, heal): ...``.

    A handled failure goes no further, and calls to living ranks continue. A call that waited for a dead rank still
    raises, since nobody can answer it. A call made while ``on_failure`` runs waits for its end, so a mesh that it
    heals can be used as if nothing had happened.

    Args:
        mesh: a mesh of processes or actors, or a slice of one.
        on_failure: called with a MeshFailure for each dead rank, and for each actor that failed while nobody waited, in
            a separate thread; sync or async. If its result is false, others are asked: outer supervisors, then the
            actor that owns the mesh. Without it all failures count as handled. In a program, ``sys.exit`` in it
            interrupts the main thread, which raises KeyboardInterrupt, or sends SIGTERM if that ignores SIGINT.

    Returns:
        A context manager, for ``with`` and ``async with``; its ``failures`` lists the failures so far.

    Raises:
        ArgumentError: ``mesh`` is not such a mesh, or ``on_failure`` is not callable.
        StoppedError: another process spawned the mesh; only that one may supervise it.
    """
    if not is_a(mesh, ProcMesh, ActorMesh):
        raise ArgumentError(f"supervise: expected a mesh of processes or actors, got {type(mesh).__name__}")
    if on_failure is not None and not callable(on_failure):
        raise ArgumentError(f"on_failure: expected a function that takes a MeshFailure, got {on_failure!r}")
    whole = cast("ProcMesh | ActorMesh", mesh)
    procs = state_of(whole).procs
    meshes_of(node_of(whole)).shared_of(procs.uid, procs.name, "supervised")
    return Supervisor(mesh, on_failure)


class Supervisor:
    """The result of ``supervise``: handles failures of a mesh during its ``with`` block.

    Attributes:
        failures: the failures so far, in order of their reports.
    """

    def __init__(self, mesh: ProcMesh | ActorMesh, on_failure: Callable[[MeshFailure], Any] | None) -> None:
        self._mesh = mesh
        self._on_failure = on_failure
        self._node: Node = node_of(mesh)
        self._key = state_of(mesh).key if isinstance(mesh, ActorMesh) else ""
        self._uid = state_of(mesh).procs.uid
        self._entered = 0
        self.failures: list[MeshFailure] = []

    def covers(self, uid: str, key: str, rank: int) -> bool:
        """Return whether it covers a failure of a rank, or of an actor with a key there."""
        same_mesh = self._uid == uid and (not key or self._key in ("", key))
        return same_mesh and region_of(self._mesh).position_of(rank) is not None

    def judge(self, failure: MeshFailure) -> bool:
        """Return whether it has handled a failure; in a thread that may wait."""
        self.failures.append(failure)
        if self._on_failure is None:
            return True
        try:
            handled = self._on_failure(failure)
            # A mesh can be awaited too, but its other actors may still be under construction, or have just failed.
            if inspect.isawaitable(handled) and not isinstance(handled, AsyncResource):
                handled = asyncio.run(_wait(handled))
        except BaseException as error:
            # Whatever it is, the thread of the verdict goes on, and the failure is not handled.
            if isinstance(error, SystemExit) and self._node.config is None:
                end_program(error)
                return False
            print(f"monarch: on_failure for {failure.mesh_name} raised:", file=sys.stderr)
            traceback.print_exc()
            return False
        return bool(handled)

    def __enter__(self) -> Self:
        if not self._entered:
            supervisors_of(self._node).enter(self)
        self._entered += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            # The work of on_failure belongs to the block.
            verdicts_of(self._node).wait(self._uid, state_of(self._mesh).procs.name, "the end of supervise()")
        except SupervisionError as late:
            if error is None:
                raise
            # Raise the error of the block instead.
            print(f"monarch: {late}", file=sys.stderr, flush=True)
        finally:
            self._entered -= 1
            if not self._entered:
                supervisors_of(self._node).leave(self)

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self.__exit__, kind, error, trace)


async def _wait(awaitable: Any) -> Any:
    return await awaitable
