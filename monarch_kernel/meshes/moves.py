"""The moves of one mesh: one after the other, and cells and commands wait for them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

from monarch._kernel_api import Future, Promise, current_node


def _silent() -> list[str]:
    return []


class Moves:
    """Ranks of a mesh that move to other hosts.

    Args:
        name: the name of the mesh.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._open: dict[Future[None], Callable[[], list[str]]] = {}
        """Moves that are planned or under way, each with what it tells at its end. Under ``_lock``."""

    def begin(self, move: Future[None], lines: Callable[[], list[str]] = _silent) -> list[Future[None]]:
        """Add a move; return the earlier ones, for which it must wait.

        Args:
            move: done at its end.
            lines: returns lines about it, for whoever waits in place of a thread that was stopped.
        """
        with self._lock:
            earlier = list(self._open)
            self._open[move] = lines
        return earlier

    def ended(self, move: Future[None]) -> None:
        """Remove a move whose end is told."""
        with self._lock:
            self._open.pop(move, None)

    @contextmanager
    def planned(self, patience: float | None) -> Generator[None]:
        """Let no other move begin while the block plans and runs one.

        Args:
            patience: seconds to wait for the earlier ones; None for no limit.
        """
        mark = Promise[None](current_node(), f"a move of mesh {self._name}")
        earlier = self.begin(mark)
        try:
            self._wait(earlier, patience, patience is None)
            yield
        finally:
            mark.complete(lambda: None)
            self.ended(mark)

    @property
    def any(self) -> bool:
        """Whether ranks move."""
        with self._lock:
            return bool(self._open)

    def wait(self) -> None:
        """Wait for the ranks that move; a Stop ends the wait."""
        with self._lock:
            moves = list(self._open)
        self._wait(moves, None, True)

    def _wait(self, moves: Sequence[Future[None]], patience: float | None, tells: bool) -> None:
        for each in moves:
            if tells and not each.done:
                print(f"waiting for ranks of mesh {self._name!r} to move to other hosts", file=sys.stderr)
            error = each.exception(patience)
            if not tells:
                # The next cell does.
                continue
            with self._lock:
                lines = self._open.pop(each, _silent)
            told = lines()
            if error is not None:
                told = [*told, f"the move was not completed: {error}"]
            print("".join(f"{line}\n" for line in told), end="", file=sys.stderr)
