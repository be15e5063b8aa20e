"""Which of many equal complaints to print: the first, the tenth, the hundredth and so on."""

from __future__ import annotations

from threading import RLock

MOST_KINDS = 64
"""Kinds of complaints that are counted separately; later ones share one count."""
_OTHERS = "others"


class Seldom:
    """Counts complaints by kind. Any thread may use it."""

    __slots__ = ("_counts", "_lock")

    def __init__(self) -> None:
        self._lock = RLock()
        # Under _lock.
        self._counts: dict[str, int] = {}

    def count(self, kind: str) -> int:
        """Count a complaint; return its number if it is worth a line, else 0."""
        with self._lock:
            if kind not in self._counts and len(self._counts) >= MOST_KINDS:
                kind = _OTHERS
            number = self._counts[kind] = self._counts.get(kind, 0) + 1
        return number if str(number).strip("0") == "1" else 0

    def statistics(self) -> dict[str, int]:
        """Return the count of each kind."""
        with self._lock:
            return dict(self._counts)
