"""Records of a rank's calls that use process groups: the groups they used, failures, and reasons of freed calls."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable

_KEPT = 256
"""The most calls to remember."""


class CallRecords:
    """The calls of this rank that use process groups, by their caller and its port. Any thread may use it."""

    def __init__(self) -> None:
        self._told = threading.Condition()
        """Guards all of them; notified of new reasons."""
        self._used: dict[tuple[str, int], int] = {}
        """The last generation that a call has used."""
        self._begun: dict[tuple[str, int], tuple[int, int]] = {}
        """When a call began: the generation, and how many of its collectives this process had begun."""
        self._failed: dict[str, list[int]] = {}
        """The ports of calls that have failed here, by caller."""
        self._freed: dict[tuple[str, int], str] = {}
        """Why collectives of running calls cannot end."""
        self._aborted: dict[tuple[str, int], str] = {}
        """Why the groups of running calls were aborted."""
        self._doomed: dict[tuple[str, int], tuple[str, frozenset[int]]] = {}
        """For constructors of a failed spawn: the reason and the ranks that will not join."""
        self._death_in = -1
        """The generation of the last death in the mesh."""
        self._death = ""
        """That death, as a reason."""
        self.gates: dict[str, int] = {}
        """By caller, its call that waits here until older ones have ended; single operations, read without a lock."""

    def use(self, src: str, port: int, generation: int) -> None:
        """Note that a call uses the groups of a generation."""
        with self._told:
            while len(self._used) >= _KEPT:
                del self._used[next(iter(self._used))]
            self._used[src, port] = generation

    def used(self, src: str, port: int, default: int) -> int:
        """Return the generation that a call has used."""
        with self._told:
            return self._used.get((src, port), default)

    def begin(self, src: str, port: int, generation: int, count: int) -> None:
        """Note how many collectives of a generation this process had begun when a call began."""
        with self._told:
            while len(self._begun) >= _KEPT:
                del self._begun[next(iter(self._begun))]
            self._begun[src, port] = generation, count

    def has_begun(self, src: str, port: int, generation: int, count: int) -> bool:
        """Return whether this process may have begun a collective of a generation since a call began.

        Args:
            count: how many it has begun by now.
        """
        with self._told:
            return self._begun.get((src, port)) != (generation, count)

    # Failed

    def fail(self, src: str, port: int) -> None:
        """Note a failed call; its caller may have sent others before it knew."""
        with self._told:
            ports = self._failed.setdefault(src, [])
            ports[:] = [*ports[1 - _KEPT :], port]

    def failed(self, src: str, port: int) -> list[int]:
        """Return the failed calls that a caller sent before another one."""
        if not self._failed:
            return []
        with self._told:
            return [each for each in self._failed.get(src, ()) if each < port]

    def forget(self, src: str, ports: Collection[int]) -> None:
        """Forget failed calls that have ended on all ranks."""
        with self._told:
            self._failed[src] = sorted(set(self._failed.get(src, ())).difference(ports))

    # Freed

    def free(self, src: str, port: int, reason: str) -> None:
        """Note that collectives of a call cannot end or are about to be aborted."""
        with self._told:
            if len(self._freed) >= _KEPT:
                self._freed.clear()
            self._freed[src, port] = reason
            self._told.notify_all()

    def take_freed(self, src: str, port: int, generation: int, patience: float) -> str:
        """Return why the collectives of an ended call could not end; empty if nobody told in time."""
        with self._told:
            # After a death there are no further reasons.
            self._told.wait_for(lambda: (src, port) in self._freed or self._death_in == generation, patience)
            return self._freed.pop((src, port), "") or (self._death if self._death_in == generation else "")

    def abort(self, src: str, port: int, reason: str) -> None:
        """Note that the groups of a running call are aborted, so that it must not continue with what they computed."""
        with self._told:
            self._aborted[src, port] = reason

    def take_aborted(self, src: str, port: int) -> str:
        """Return why the groups of a call were aborted under it; empty if they were not."""
        with self._told:
            return self._aborted.pop((src, port), "")

    def note_death(self, generation: int, reason: str) -> None:
        """Note a death in the mesh, which breaks this generation and explains its errors."""
        with self._told:
            if self._death_in != generation:
                # Later deaths of the generation may be consequences.
                self._death_in, self._death = generation, reason
            self._told.notify_all()

    # Doomed

    def doom(self, src: str, port: int, reason: str, failed: Iterable[int]) -> None:
        """Note that ranks will not join the collectives of a constructor."""
        with self._told:
            while len(self._doomed) >= _KEPT:
                del self._doomed[next(iter(self._doomed))]
            self._doomed[src, port] = reason, frozenset(failed)

    def doomed(self, src: str, port: int, ranks: Iterable[int]) -> str:
        """Return why some of these ranks will not join the collectives of a constructor; empty if they may."""
        if not self._doomed:
            return ""
        with self._told:
            reason, failed = self._doomed.get((src, port), ("", frozenset[int]()))
        return reason if any(rank in failed for rank in ranks) else ""
