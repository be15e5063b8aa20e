"""Excerpts: the beginning and the end of a text of any length."""

from __future__ import annotations

from collections import deque


class Excerpt:
    """Keeps the beginning and the end of a text that comes in pieces of whole lines, and counts the omitted part.

    Args:
        head: characters to keep of the beginning, by whole pieces.
        tail: characters to keep of the end, by whole pieces.
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
        """Omitted lines."""
        self.characters = 0
        """Omitted characters."""

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
                # Return the end of a large piece, from the start of a line.
                start = oldest.find("\n", over) + 1
                if start and start < len(oldest):
                    self._tail.appendleft(oldest[start:])
                    oldest = oldest[:start]
            self._tail_size -= len(oldest)
            self.lines += oldest.count("\n")
            self.characters += len(oldest)

    def pieces(self) -> list[str]:
        """Return the excerpt, with a line that says how much is missing."""
        note = [f"… {left_out(self.lines, self.characters)} omitted\n"] if self.characters else []
        return [*self._head, *note, *self._tail]


def left_out(lines: int, characters: int) -> str:
    """Describe a number of lines and characters."""
    return f"{lines:,} {'line' if lines == 1 else 'lines'} ({characters:,} characters)"
