"""Pausing the ranks of a mesh, and looking at them. The rooms of the debugger and the notebook provide it."""

from __future__ import annotations

from typing import Any, cast

from monarch._core.digests.comparison import Comparison
from monarch._core.position import Position, ThreadPosition
from monarch._core.roster import Procs
from monarch._core.shapes.value_mesh import ValueMesh
from monarch._meshes.inside import state_of
from monarch._meshes.mesh_like import ProcMeshLike
from monarch._node.services.registry import declared


class HasPauses:
    """Mixin of process meshes: their ranks pause in the middle of a call, are looked at, and resume.

    It works while calls run, from any thread of the program that has spawned the mesh. All actors of a rank are paused;
    threads that their code has started run on. See docs/debugging.md.
    """

    def pause(self) -> ValueMesh[Position]:
        """Pause each rank at its next line of user code, and return where it is.

        A rank in C code, a collective for one, is "pausing": it pauses when the call returns. An idle rank pauses at
        the beginning of its next call.
        """
        return _pause(self)

    def resume(self) -> ValueMesh[bool]:
        """Let paused ranks continue where they are; return for each rank whether it was paused, or about to be."""
        return _resume(self)

    def where(self) -> ValueMesh[Position]:
        """Return where each rank is, whether it is paused or runs."""
        return _where(self)

    def threads(self) -> ValueMesh[tuple[ThreadPosition, ...]]:
        """Return where each Python thread of each rank is, the main thread first, without stopping any.

        Threads of this package are left out unless they run code of the user. A rank that does not answer has none.
        """
        return _threads(self)

    def evaluate(self, expression: str, up: int = 0, force: bool = False) -> ValueMesh[str]:
        """Return the value of an expression on each rank, as a cell shows it, or the error.

        It is evaluated in the line where the rank is, in the main thread of a paused rank, and beside the code of one
        that runs.

        Args:
            expression: in Python.
            up: 1 for the caller of the function that the rank is in, 2 for its caller, and so on.
            force: whether to call functions that wait for other ranks, such as ``all_reduce``.

        Raises:
            ArgumentError: it is not an expression, or would wait for other ranks.
        """
        return _evaluate(self, expression, up, force)

    def diff(self, expression: str, up: int = 0, force: bool = False) -> Comparison:
        """Compare the value of an expression across the ranks, by hashes, so that no large value is sent.

        It is evaluated where ``evaluate`` does it. Of arrays, modules, optimizers, dicts and lists the result tells
        which ranks agree, and the first key and index that differ. Ranks that run may change a value while it is read.

        Args:
            expression: in Python.
            up: 1 for the caller of the function that the rank is in, 2 for its caller, and so on.
            force: whether to call functions that wait for other ranks.

        Raises:
            ArgumentError: it is not an expression, or would wait for other ranks.
        """
        return _diff(self, expression, up, force)

    def check_collectives(self, on: bool = True) -> None:
        """Compare kind, shape and dtype of each collective across its ranks before it begins, or no longer.

        Ranks whose calls differ all raise a ``CollectiveMismatchError``, which has the calls and lines of all of them,
        and the group can be used further. It covers all process groups of the ranks, and costs a few round trips to
        the store of the group for each collective; turned off, it costs nothing. All ranks of the mesh are set, also by
        a slice, and must be idle.

        Raises:
            GroupError: ranks run a call, or do not answer.
        """
        mesh = cast("ProcMeshLike", self)
        _check(state_of(mesh).procs, on)


@declared("checking.set_all")
def _check(procs: Procs, on: bool) -> None:
    raise NotImplementedError


@declared("pausing.pause")
def _pause(mesh: Any) -> ValueMesh[Position]:
    raise NotImplementedError


@declared("pausing.resume")
def _resume(mesh: Any) -> ValueMesh[bool]:
    raise NotImplementedError


@declared("pausing.where")
def _where(mesh: Any) -> ValueMesh[Position]:
    raise NotImplementedError


@declared("threads.threads")
def _threads(mesh: Any) -> ValueMesh[tuple[ThreadPosition, ...]]:
    raise NotImplementedError


@declared("evaluate.evaluate")
def _evaluate(mesh: Any, expression: str, up: int, force: bool) -> ValueMesh[str]:
    raise NotImplementedError


@declared("differences.diff")
def _diff(mesh: Any, expression: str, up: int, force: bool) -> Comparison:
    raise NotImplementedError
