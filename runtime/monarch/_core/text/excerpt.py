"""Text of any length, of which the beginning and the end are kept."""

from __future__ import annotations

from collections import deque


class Excerpt:
    """Keeps the beginning and the end of a text that comes in pieces of whole lines, and counts what it leaves out.

    Args:
        head: characters of the beginning that are kept, by whole pieces.
        tail: characters of the end that are kept, by whole pieces.
    """

    def __init__(self, head: int, tail: int) -> None:
        self._head_limit = head
        self._tail_limit = tail
        self._head: list[str] = []
        self._head_size = 0
        self._full = False
        self._tail: deque[str] = deque()
        self._tail_size = 0
        self.lines = 0
        """Lines that were left out."""
        self.characters = 0
        """Characters that were left out."""

    def add(self, text: str) -> None:
        """Take the next piece."""
        if not self._full and self._head_size + len(text) <= self._head_limit:
            self._head.append(text)
            self._head_size += len(text)
            return
        self._full = True
        self._tail.append(text)
        self._tail_size += len(text)
        while self._tail_size > self._tail_limit:
            oldest = self._tail.popleft()
            over = self._tail_size - self._tail_limit
            if over < len(oldest):
                # The end of a large piece, from the beginning of a line on.
                start = oldest.find("\n", over) + 1
                if start and start < len(oldest):
                    self._tail.appendleft(oldest[start:])
                    oldest = oldest[:start]
            self._tail_size -= len(oldest)
            self.lines += oldest.count("\n")
            self.characters += len(oldest)

    def pieces(self) -> list[str]:
        """All that is kept, with a line that says what was left out."""
        note = [f"… {left_out(self.lines, self.characters)} left out here\n"] if self.characters else []
        return [*self._head, *note, *self._tail]


def left_out(lines: int, characters: int) -> str:
    """A number of lines and characters, in words."""
    return f"{lines:,} {'line' if lines == 1 else 'lines'} ({characters:,} characters)"
