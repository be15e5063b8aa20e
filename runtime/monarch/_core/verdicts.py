"""Which meshes have a failure that is being decided, by whom, and when that ends. No I/O, no threads, no clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from threading import RLock
from typing import Generic, TypeVar

T = TypeVar("T")


class Hold(Generic[T]):
    """One party that keeps a verdict open; it belongs to whoever releases it."""

    __slots__ = ("verdict",)

    def __init__(self, verdict: Verdict[T]) -> None:
        self.verdict: Verdict[T] | None = verdict
        """None once it was released. Lock: that of the Verdicts."""


class Verdict(Generic[T]):
    """One period in which it is open what becomes of a mesh: from its first hold to the release of its last."""

    __slots__ = ("end", "holders", "mesh")

    def __init__(self, mesh: str, end: T) -> None:
        self.mesh = mesh
        self.end = end
        """What those wait for who need the verdict."""
        self.holders: dict[Hold[T], str] = {}
        """Who decides, in words. Lock: that of the Verdicts."""


class Verdicts(Generic[T]):
    """The open verdicts of all meshes of a process. Thread-safe; no code of others runs under its lock but ``make``.

    A verdict leaves this table in the same step in which its last hold is released. A hold that is taken after that
    opens another verdict, so that nobody waits for one that nobody will complete, and none is completed too early.

    Args:
        make: makes what those wait for who need a verdict; it must neither block nor call back.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._lock = RLock()
        self._open: dict[str, Verdict[T]] = {}
        """By mesh. Lock: ``_lock``."""

    def hold(self, mesh: str, holder: str) -> Hold[T]:
        """Opens the verdict on a mesh, or keeps the open one open, until ``release``."""
        with self._lock:
            verdict = self._open.get(mesh)
            if verdict is None:
                # To make it may run a __del__ that opens it as well.
                verdict = self._open.setdefault(mesh, Verdict(mesh, self._make()))
            hold = Hold(verdict)
            verdict.holders[hold] = holder
            return hold

    def release(self, hold: Hold[T]) -> T | None:
        """Ends a hold.

        Returns:
            What waits for the verdict if this was its last hold: the caller completes it, exactly once. None if
            others hold it, or if this hold was released before.
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
        """What ends with the verdict on a mesh; None if none is open."""
        with self._lock:
            verdict = self._open.get(mesh)
            return verdict.end if verdict is not None else None

    def holders(self, mesh: str) -> list[str]:
        """Who decides about a mesh now, in words; none if nobody does."""
        with self._lock:
            verdict = self._open.get(mesh)
            return list(verdict.holders.values()) if verdict is not None else []

    def meshes(self) -> list[str]:
        """The meshes with an open verdict."""
        with self._lock:
            return list(self._open)


class Tally:
    """Verdicts on ranks that failed by one cause. They may come from any thread, in any order and twice.

    Args:
        ranks: those that are judged.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        self._lock = RLock()
        self._open = set(ranks)
        """Ranks without a verdict. Lock: ``_lock``."""
        self._unhandled: list[int] = []
        """Ranks that nobody handles. Lock: ``_lock``."""

    def judged(self, rank: int, handled: bool) -> tuple[int, ...]:
        """Takes the verdict on a rank; a second one on the same rank counts for nothing.

        Returns:
            All ranks that nobody handles, once: with the last verdict. Empty before and after, and if all are handled.
        """
        with self._lock:
            if rank not in self._open:
                return ()
            self._open.discard(rank)
            if not handled:
                self._unhandled.append(rank)
            return () if self._open else tuple(sorted(self._unhandled))
