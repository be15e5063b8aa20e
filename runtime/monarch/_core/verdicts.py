"""Which meshes have a failure under decision, who decides, and when that ends. No I/O, no threads, no clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from threading import RLock
from typing import Generic, TypeVar

T = TypeVar("T")


class Hold(Generic[T]):
    """One party that keeps a verdict open; its releaser owns it."""

    __slots__ = ("verdict",)

    def __init__(self, verdict: Verdict[T]) -> None:
        self.verdict: Verdict[T] | None = verdict
        """None once released. Lock: that of the Verdicts."""


class Verdict(Generic[T]):
    """One period in which the fate of a mesh is undecided: from its first hold to the release of its last."""

    __slots__ = ("end", "holders", "mesh")

    def __init__(self, mesh: str, end: T) -> None:
        self.mesh = mesh
        self.end = end
        """Completed with the verdict; callers that need it wait for this."""
        self.holders: dict[Hold[T], str] = {}
        """The deciders, for people. Lock: that of the Verdicts."""


class Verdicts(Generic[T]):
    """The open verdicts of all meshes of a process. Thread-safe; no foreign code but ``make`` runs under its lock.

    A verdict leaves this table in the same step in which its last hold is released. A later hold opens another verdict,
    so nobody waits for one that is never completed, and none is completed too early.

    Args:
        make: makes the object to wait for; it must neither block nor call back.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._lock = RLock()
        self._open: dict[str, Verdict[T]] = {}
        """By mesh. Lock: ``_lock``."""

    def hold(self, mesh: str, holder: str) -> Hold[T]:
        """Open the verdict on a mesh, or keep it open, until ``release``."""
        with self._lock:
            verdict = self._open.get(mesh)
            if verdict is None:
                # Making it may run a __del__ that opens it as well.
                verdict = self._open.setdefault(mesh, Verdict(mesh, self._make()))
            hold = Hold(verdict)
            verdict.holders[hold] = holder
            return hold

    def release(self, hold: Hold[T]) -> T | None:
        """Release a hold.

        Returns:
            The object to complete, exactly once, if this was the last hold on the verdict. None if others
            hold it, or if this hold was released before.
        """
        with self._lock:
            verdict, hold.verdict = hold.verdict, None
            if verdict is None:
                return None
            del verdict.holders[hold]
            if verdict.holders:
                return None
            del self._open[verdict.mesh]
            return verdict.end

    def open(self, mesh: str) -> T | None:
        """Return the event that ends with the verdict on a mesh; None without an open verdict."""
        with self._lock:
            verdict = self._open.get(mesh)
            return verdict.end if verdict is not None else None

    def holders(self, mesh: str) -> list[str]:
        """Return who decides about a mesh now, for people; empty if nobody does."""
        with self._lock:
            verdict = self._open.get(mesh)
            return list(verdict.holders.values()) if verdict is not None else []

    def meshes(self) -> list[str]:
        """Return the meshes with an open verdict."""
        with self._lock:
            return list(self._open)


class Tally:
    """Verdicts on ranks that failed by one cause. They may come from any thread, in any order and twice.

    Args:
        ranks: the ranks to judge.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        self._lock = RLock()
        self._open = set(ranks)
        """Ranks without a verdict. Lock: ``_lock``."""
        self._unhandled: list[int] = []
        """Unhandled ranks. Lock: ``_lock``."""

    def judged(self, rank: int, handled: bool) -> tuple[int, ...]:
        """Take the verdict on a rank; a second one for the same rank is ignored.

        Returns:
            Return all unhandled ranks, once: with the last verdict. Empty before and after, and if all are handled.
        """
        with self._lock:
            if rank not in self._open:
                return ()
            self._open.discard(rank)
            if not handled:
                self._unhandled.append(rank)
            return () if self._open else tuple(sorted(self._unhandled))
