"""Replies that an agent gathers, so that the caller on another host gets one message of them and not one a rank."""

from __future__ import annotations

from collections.abc import Iterable

from monarch._wire.messages import Batch, encode


class _Gathering:
    __slots__ = ("frames", "missing", "parts")

    def __init__(self, procs: Iterable[str]) -> None:
        self.missing = set(procs)
        self.parts: list[int] = []
        self.frames: list[bytes | memoryview] = []


class ReplyBatches:
    """What is gathered for whom: by the caller's proc and its port."""

    def __init__(self, proc: str) -> None:
        self._proc = proc
        self._open: dict[tuple[str, int], _Gathering] = {}

    def begin(self, src: str, port: int, procs: Iterable[str]) -> None:
        """Replies of these procs to this port are to go together."""
        gathering = _Gathering(procs)
        if gathering.missing:
            self._open[src, port] = gathering

    def add(self, dst: str, port: int, src: str, frames: list[bytes | memoryview]) -> list[bytes | memoryview] | None:
        """Takes a reply: none to send yet is an empty list, None if it is not one to be gathered."""
        gathering = self._open.get((dst, port))
        if gathering is None or src not in gathering.missing:
            return None
        gathering.missing.discard(src)
        gathering.parts.append(len(frames))
        gathering.frames.extend(frames)
        return self._close(dst, port, gathering)

    def waiting(self, dst: str, port: int) -> int:
        """How many replies to a port wait for others."""
        gathering = self._open.get((dst, port))
        return len(gathering.parts) if gathering is not None else 0

    def take(self, dst: str, port: int) -> list[bytes | memoryview]:
        """Takes out the replies that wait for slower ones; those are gathered further."""
        gathering = self._open.get((dst, port))
        if gathering is None or not gathering.parts:
            return []
        head = encode(Batch(self._proc, gathering.parts, len(gathering.frames)))
        frames = [head, *gathering.frames]
        gathering.parts, gathering.frames = [], []
        return frames

    def died(self, proc: str) -> list[tuple[str, list[bytes | memoryview]]]:
        """A proc will answer nothing any more: what is complete without it, with its receiver."""
        complete: list[tuple[str, list[bytes | memoryview]]] = []
        for (dst, port), gathering in list(self._open.items()):
            if dst == proc:
                del self._open[dst, port]
            elif proc in gathering.missing:
                gathering.missing.discard(proc)
                batch = self._close(dst, port, gathering)
                if batch:
                    complete.append((dst, batch))
        return complete

    def _close(self, dst: str, port: int, gathering: _Gathering) -> list[bytes | memoryview]:
        if gathering.missing:
            return []
        del self._open[dst, port]
        if not gathering.parts:
            return []
        head = encode(Batch(self._proc, gathering.parts, len(gathering.frames)))
        return [head, *gathering.frames]
