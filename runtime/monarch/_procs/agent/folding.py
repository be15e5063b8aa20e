"""Replies of many hosts on their way to the caller: one agent gathers them, and sends equal ones once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from monarch._wire.messages import Folded, Reply, decode, encode

WAIT = 0.05
"""Seconds for which the replies of a host wait for those of others."""
_MOST = 10_000
"""Calls whose replies are folded at the same time; beyond it, those of the oldest are passed on one by one."""


def ranges_of(ranks: list[int]) -> list[int]:
    """Return ranks as ranges, ascending and apart: the begin and the end of each."""
    ranks.sort()
    ranges: list[int] = []
    end = -1
    for rank in ranks:
        if rank == end:
            end += 1
        elif rank > end:
            ranges += (end, rank) if ranges else (rank,)
            end = rank + 1
    return [*ranges, end] if ranges else []


def _has_place(reply: Reply) -> bool:
    """Return whether the position of its sender identifies a reply that has no buffers."""
    return reply.bulk is None and reply.rank >= 0 and not reply.src.endswith("/agent")


class _Fold:
    __slots__ = ("frames", "groups", "hosts", "missing", "parts", "waits")

    def __init__(self, missing: Iterable[str]) -> None:
        self.missing = set(missing)
        """Agents that still owe replies."""
        self.waits = False
        self.clear()

    def clear(self) -> None:
        self.hosts: list[tuple[str, int, int]] = []
        self.groups: dict[tuple[int, int, bytes], list[int]] = {}
        self.parts: list[int] = []
        self.frames: list[Any] = []

    def add(self, parts: list[int], frames: list[Any]) -> None:
        at = 0
        for size in parts:
            reply = decode(frames[at])
            if size == 1 and isinstance(reply, Reply) and _has_place(reply):
                self.groups.setdefault((reply.status, reply.done, reply.body), []).append(reply.rank)
            else:
                self.parts.append(size)
                self.frames += frames[at : at + size]
            at += size


class Folding:
    """The replies that an agent folds, by the caller and its port.

    Args:
        proc: id of the agent.
        later: runs a function after some seconds.
        send: sends frames to a process.
    """

    def __init__(
        self,
        proc: str,
        later: Callable[[float, Callable[[], None]], None],
        send: Callable[[str, list[Any]], object],
    ) -> None:
        self._proc = proc
        self._later = later
        self._send = send
        self._open: dict[tuple[str, int], _Fold] = {}

    def begin(self, dst: str, port: int, agents: Iterable[str]) -> None:
        """Wait for the replies of the ranks of some agents."""
        self._open[dst, port] = _Fold(agents)
        while len(self._open) > _MOST:
            self._flush(*next(iter(self._open)))
            self._open.pop(next(iter(self._open)))

    def add(
        self,
        src: str,
        dst: str,
        port: int,
        number: int,
        last: bool,
        parts: list[int],
        frames: list[Any],
        received: int = 0,
    ) -> None:
        """Take replies of the ranks of an agent, as in Answers."""
        key = dst, port
        fold = self._open.get(key)
        if fold is None:
            # Nothing more is to come: it is passed on alone.
            fold = self._open[key] = _Fold(())
        if number or received:
            fold.hosts.append((src.partition("/")[0], number, received))
        fold.add(parts, frames)
        if last:
            fold.missing.discard(src)
        if not fold.missing:
            self._flush(*key)
            del self._open[key]
        elif not fold.waits:
            fold.waits = True
            self._later(WAIT, lambda: self._due(key, fold))

    def lost(self, agent: str) -> None:
        """Wait no more for the replies of an agent."""
        for key, fold in list(self._open.items()):
            if agent in fold.missing:
                fold.missing.discard(agent)
                if not fold.missing:
                    self._flush(*key)
                    del self._open[key]

    def flush(self, dst: str) -> None:
        """Send all replies to a caller that wait for those of other hosts."""
        for key in list(self._open):
            if key[0] == dst:
                self._flush(*key)

    def _due(self, key: tuple[str, int], fold: _Fold) -> None:
        fold.waits = False
        if self._open.get(key) is fold:
            self._flush(*key)

    def _flush(self, dst: str, port: int) -> None:
        fold = self._open[dst, port]
        if not (fold.groups or fold.parts or fold.hosts):
            return
        groups = [(*key, ranges_of(ranks)) for key, ranks in fold.groups.items()]
        head = encode(Folded(self._proc, port, fold.hosts, groups, fold.parts, len(fold.frames)))
        frames = fold.frames
        fold.clear()
        self._send(dst, [head, *frames])
