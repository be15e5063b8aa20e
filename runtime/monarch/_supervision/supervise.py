"""``with supervise(mesh, on_failure=...)``: who is asked first what becomes of a failure in a mesh."""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from monarch._core.later import asyncio
from monarch._meshes.actors.actor_mesh import ActorMesh
from monarch._meshes.procs.proc_mesh import ProcMesh
from monarch._meshes.registry import meshes_of
from monarch._meshes.verdicts import verdicts_of
from monarch._node.node import Node
from monarch._supervision.mesh_failure import MeshFailure
from monarch._supervision.state import supervisors_of
from monarch.exceptions import ArgumentError, SupervisionError

if TYPE_CHECKING:
    from typing_extensions import Self


def supervise(mesh: Any, on_failure: Callable[[MeshFailure], Any] | None = None) -> Supervisor:
    """Handle the failures of a mesh for as long as a ``with`` block runs: ``with supervise(mesh, heal): ...``.

    What is handled is told to nobody else, and calls to the ranks that live go on. A call that waited for a rank that
    has died raises all the same, since nobody can answer it; a call made while ``on_failure`` still runs waits for
    its end, so that a mesh which that heals can be used as if nothing had happened.

    Args:
        mesh: a mesh of processes or of actors, or a slice of one: whose failures it is for.
        on_failure: called once for each rank that has died, and for each actor that has failed where nobody waited,
            with a MeshFailure, in a thread of its own; sync or async. If what it returns is false, others are asked:
            supervisors further out, then the actor that owns the mesh. Without it all failures count as handled.

    Returns:
        A context manager, for ``with`` and ``async with``; its ``failures`` are what has failed so far.

    Raises:
        ArgumentError: it is no such mesh, or ``on_failure`` cannot be called.
        StoppedError: another process has spawned the mesh, which may supervise it.
    """
    if not isinstance(mesh, (ProcMesh, ActorMesh)):
        raise ArgumentError(f"supervise takes a mesh of processes or of actors, and not {type(mesh).__name__}")
    if on_failure is not None and not callable(on_failure):
        raise ArgumentError(f"on_failure is a function that takes a MeshFailure, and not {on_failure!r}")
    procs = mesh._state.procs
    meshes_of(mesh._node).shared_of(procs.uid, procs.name, "supervised")
    return Supervisor(mesh, on_failure)


class Supervisor:
    """What ``supervise`` gives: it handles failures of a mesh while its ``with`` block runs.

    Attributes:
        failures: what has failed so far, in the order in which it was told.
    """

    def __init__(self, mesh: ProcMesh | ActorMesh, on_failure: Callable[[MeshFailure], Any] | None) -> None:
        self._mesh = mesh
        self._on_failure = on_failure
        self._node: Node = mesh._node
        self._key = mesh._key if isinstance(mesh, ActorMesh) else ""
        self._uid = mesh._state.procs.uid
        self._entered = 0
        self.failures: list[MeshFailure] = []

    def covers(self, uid: str, key: str, rank: int) -> bool:
        """Return whether it is to judge a failure: of a rank of a mesh, or of an actor with a key there."""
        mine = self._uid == uid and (not key or self._key in ("", key))
        return mine and self._mesh._region.position_of(rank) is not None

    def judge(self, failure: MeshFailure) -> bool:
        """Return whether it handles a failure; in a thread that may wait."""
        self.failures.append(failure)
        if self._on_failure is None:
            return True
        try:
            handled = self._on_failure(failure)
            if inspect.isawaitable(handled):
                handled = asyncio.run(_wait(handled))
        except Exception:
            print(f"monarch: on_failure for {failure.mesh_name} raised an error of its own:", file=sys.stderr)
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
            # What on_failure has begun belongs to the block.
            verdicts_of(self._node).wait(self._uid, self._mesh._state.procs.name, "the end of supervise()")
        except SupervisionError as late:
            if error is None:
                raise
            # The error of the block is the one to be raised.
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
