"""What ranks of a kept mesh print while no program listens, up to a bound: of more, what is oldest goes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from monarch._wire.messages import Output, encode

LIMIT = 64 << 20
"""Bytes of output that wait for a program."""


class OutputBacklog:
    """Messages for a program that is not there, and how far each rank's output has got.

    Args:
        limit: bytes that are kept.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._waiting: deque[tuple[bytes, int]] = deque()
        self._size = 0
        self.dropped = 0
        """Bytes of output that there was no room for, since the last program took what there was."""
        self.passed: dict[tuple[str, str], int] = {}
        """Of each proc and stream, where the output begins that no program was sent yet."""

    def put(self, message: bytes, printed: int) -> None:
        """Keeps a message.

        Args:
            message: encoded.
            printed: bytes of output in it.
        """
        self._waiting.append((message, printed))
        self._size += len(message)
        while self._size > self._limit and len(self._waiting) > 1:
            oldest, lost = self._waiting.popleft()
            self._size -= len(oldest)
            self.dropped += lost

    def keep(self, output: Output) -> None:
        """Keeps output."""
        self.put(encode(output), printed_in(output))

    def passes(self, output: Output) -> None:
        """Output goes to the program."""
        for stream, offset, data in output.pieces:
            self.passed[output.src, stream] = offset + len(data)

    def forget(self, places: Iterable[tuple[str, str]]) -> None:
        """Nobody will ask how far these procs and streams have got."""
        for place in places:
            self.passed.pop(place, None)

    def take(self) -> list[bytes]:
        """Takes out all that waits, in the order in which it came."""
        waiting, self._waiting = self._waiting, deque()
        self._size = self.dropped = 0
        return [message for message, _ in waiting]


def printed_in(output: Output) -> int:
    """Bytes of output in a message."""
    return sum(len(data) for _, _, data in output.pieces)
