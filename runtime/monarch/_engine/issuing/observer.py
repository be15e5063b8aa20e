"""Where the rest of the engine tells a recorder what a step does."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Protocol


class Observer(Protocol):
    """A recorder, as the engine sees it."""

    def issued(
        self,
        stream: Any,
        number: int,
        inputs: tuple[int, ...],
        values: tuple[Any, ...],
        outputs: tuple[int, ...],
        line: int,
    ) -> tuple[Any, ...]:
        """An op is issued; see ``OpStream.issue``. Returns its numbers."""
        ...

    def local(self) -> None:
        """A rank-local tensor is made or used. Raises."""
        ...

    def looked(self) -> None:
        """The program wants a value. Raises."""
        ...

    def put(self, made: Any, value: Any) -> None:
        """A value of the program becomes a distributed tensor."""
        ...

    def number_in(self, value: Any) -> Any:
        """Return the number in a value of the program that differs from call to call; None otherwise."""
        ...

    def seed(self) -> int | None:
        """Return a seed for a random op."""
        ...


class CurrentRecorder:
    """The recorder of this process: one step is recorded at a time, in one thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        """Held while a recorder is set, not while user code runs."""
        self._observer: Observer | None = None
        """Lock for writing: ``_lock``."""
        self._threads: dict[int, int] = {}
        """How many blocks of ``through`` each thread is in, and one for the thread that records. Each thread changes
        its own entry; all are removed with the recorder."""

    @property
    def observer(self) -> Observer | None:
        """The recorder of the calling thread; None while no step or that of another thread is recorded."""
        observer = self._observer
        return observer if observer is not None and threading.get_ident() in self._threads else None

    def start(self, observer: Observer) -> bool:
        """Record what the calling thread does from now on; return False if another step is being recorded."""
        with self._lock:
            if self._observer is not None:
                return False
            self._threads = {threading.get_ident(): 1}
            self._observer = observer
            return True

    def stop(self) -> None:
        """Record no more; for the thread that has started."""
        with self._lock:
            self._observer = None
            self._threads = {}

    @contextmanager
    def through(self) -> Generator[None]:
        """Record what the calling thread does in a block: autograd runs a part of backward in threads of its own."""
        threads, thread = self._threads, threading.get_ident()
        threads[thread] = threads.get(thread, 0) + 1
        try:
            yield
        finally:
            threads[thread] -= 1
            if not threads[thread]:
                del threads[thread]


current = CurrentRecorder()
