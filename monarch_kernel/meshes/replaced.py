"""The ranks of a notebook mesh that have a new process, which lacks the variables of the old one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from threading import Lock

from monarch._kernel_api import current_node, meshes_of

_NUMBER = re.compile(r"\d+")

OnReplaced = Callable[[int], object]


class Replaced:
    """The replaced ranks of one mesh.

    Args:
        uid: the uid of the mesh.
        size: its number of ranks.
        on_replaced: called with each rank that gets a new process, in the thread that starts it.
    """

    def __init__(self, uid: str, size: int, on_replaced: OnReplaced) -> None:
        self._uid = uid
        self._on_replaced = on_replaced
        self._lock = Lock()
        self._members = set(range(size))
        """Ranks that have a process. Lock: ``_lock``."""
        self.after: dict[int, str] = {}
        """By replaced rank, the last cell of its old process. Lock: ``_lock`` to write; read as a copy."""
        self.counts: dict[int, int] = {}
        """How often each rank was replaced. Lock: ``_lock`` to write; read as a copy."""
        self.uncopied: set[int] = set()
        """Ranks to which a copy of variables has failed. Main thread."""
        self.last_cell = ""
        """The cell that began last on the mesh; written by the main thread."""
        events = meshes_of(current_node())
        events.joined.subscribe(self._joined)
        events.left.subscribe(self._left)

    def _joined(self, uid: str, rank: int, _: str) -> None:
        if uid != self._uid:
            return
        with self._lock:
            again = rank in self._members
            self._members.add(rank)
            if again:
                self.after[rank] = self.last_cell
                self.counts[rank] = self.counts.get(rank, 0) + 1
        if again:
            self._on_replaced(rank)

    def filled(self, ranks: Iterable[int]) -> None:
        """Note that ranks have all variables again."""
        with self._lock:
            for rank in ranks:
                self.after.pop(rank, None)

    def _left(self, uid: str, rank: int) -> None:
        if uid == self._uid:
            with self._lock:
                self._members.discard(rank)
                self.after.pop(rank, None)
                self.counts.pop(rank, None)


def in_order(cells: Iterable[str]) -> str:
    """Return cells such as ``cell [7]``, each once, in the order of their numbers."""
    numbers = {cell: int(digits[0]) if (digits := _NUMBER.search(cell)) else 0 for cell in cells if cell}
    return ", ".join(sorted(numbers, key=lambda cell: numbers[cell]))
