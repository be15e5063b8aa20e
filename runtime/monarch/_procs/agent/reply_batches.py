"""Replies that an agent gathers, so that a caller on another host gets one message instead of one a rank."""

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
    """Gathered replies, by the caller's proc and its port."""

    def __init__(self, proc: str) -> None:
        self._proc = proc
        self._open: dict[tuple[str, int], _Gathering] = {}

    def begin(self, src: str, port: int, procs: Iterable[str]) -> bool:
        """Gather the replies of these procs to this port; return whether there are any procs."""
        gathering = _Gathering(procs)
        if gathering.missing:
            self._open[src, port] = gathering
        return bool(gathering.missing)

    def add(self, dst: str, port: int, src: str, frames: list[bytes | memoryview]) -> list[bytes | memoryview] | None:
        """Add a reply: an empty list if nothing can be sent yet, None if it is not gathered."""
        gathering = self._open.get((dst, port))
        if gathering is None or src not in gathering.missing:
            return None
        gathering.missing.discard(src)
        gathering.parts.append(len(frames))
        gathering.frames.extend(frames)
        return self._close(dst, port, gathering)

    def waiting(self, dst: str, port: int) -> int:
        """Return how many replies to a port are waiting."""
        gathering = self._open.get((dst, port))
        return len(gathering.parts) if gathering is not None else 0

    def take(self, dst: str, port: int) -> list[bytes | memoryview]:
        """Take out the waiting replies; slower ones are still gathered."""
        gathering = self._open.get((dst, port))
        if gathering is None or not gathering.parts:
            return []
        head = encode(Batch(self._proc, gathering.parts, len(gathering.frames)))
        frames = [head, *gathering.frames]
        gathering.parts, gathering.frames = [], []
        return frames

    def died(self, proc: str) -> list[tuple[str, int, list[bytes | memoryview]]]:
        """Note that a proc will not answer any more; return the batches that are complete without it, with their
        receivers and ports. A batch is empty if its replies have been sent."""
        complete: list[tuple[str, int, list[bytes | memoryview]]] = []
        for (dst, port), gathering in list(self._open.items()):
            if dst == proc:
                del self._open[dst, port]
            elif proc in gathering.missing:
                gathering.missing.discard(proc)
                batch = self._close(dst, port, gathering)
                if not gathering.missing:
                    complete.append((dst, port, batch))
        return complete

    def _close(self, dst: str, port: int, gathering: _Gathering) -> list[bytes | memoryview]:
        if gathering.missing:
            return []
        del self._open[dst, port]
        if not gathering.parts:
            return []
        head = encode(Batch(self._proc, gathering.parts, len(gathering.frames)))
        return [head, *gathering.frames]
