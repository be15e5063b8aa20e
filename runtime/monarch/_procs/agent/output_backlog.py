"""The output of ranks of a detached mesh while no program is attached; beyond a limit, the oldest is dropped."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from monarch._wire.messages import Output, encode

LIMIT = 64 << 20
"""Maximum bytes of waiting output."""


class OutputBacklog:
    """Messages for an absent program, and each rank's output offsets.

    Args:
        limit: bytes to keep.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._waiting: deque[tuple[bytes, int]] = deque()
        self._size = 0
        self.dropped = 0
        """Bytes of output dropped since the last program took the backlog."""
        self.passed: dict[tuple[str, str], int] = {}
        """By proc and stream, the offset of the first output that no program was sent."""

    def put(self, message: bytes, printed: int) -> None:
        """Keep a message.

        Args:
            message: as encoded.
            printed: bytes of output in it.
        """
        self._waiting.append((message, printed))
        self._size += len(message)
        while self._size > self._limit and len(self._waiting) > 1:
            oldest, lost = self._waiting.popleft()
            self._size -= len(oldest)
            self.dropped += lost

    def keep(self, output: Output) -> None:
        """Keep output."""
        self.put(encode(output), printed_in(output))

    def passes(self, output: Output) -> None:
        """Note that output goes to the program."""
        for stream, offset, data in output.pieces:
            self.passed[output.src, stream] = offset + len(data)

    def forget(self, places: Iterable[tuple[str, str]]) -> None:
        """Forget these procs and streams."""
        for place in places:
            self.passed.pop(place, None)

    def take(self) -> list[bytes]:
        """Take out the backlog, in arrival order."""
        waiting, self._waiting = self._waiting, deque()
        self._size = self.dropped = 0
        return [message for message, _ in waiting]


def printed_in(output: Output) -> int:
    """Return the bytes of output in a message."""
    return sum(len(data) for _, _, data in output.pieces)
