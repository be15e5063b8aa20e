"""Output of ranks as the program shows it, in a thread of its own: tagged with ranks, equal lines folded."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from monarch._node.node import Node
from monarch._procs.os.posix import release_free_memory
from monarch._python.threads import new_thread
from monarch._session.folded_output import WINDOW, EndingMesh, FoldedOutput
from monarch._wire import messages as m

_GATHER_S = 0.03
"""Seconds that output waits for more to be shown together; the first after a pause does not wait."""
_PORTION = 4 << 20
"""Cost of queued output after which due lines are shown first."""
_SHOWN_S = 0.8
"""The most seconds that a result waits for the output of its call to be shown."""
_MUCH = 64 << 20
"""Cost of output after which free memory is returned to the system."""
_FLUSH_S = 10.0
"""Seconds that ``flush`` waits for the output thread."""


class OutputView(FoldedOutput):
    """Collects the output of all ranks of a session in a separate thread; receiving only queues it."""

    def __init__(self, node: Node) -> None:
        super().__init__(node)
        # Appended by any thread, taken only by the output thread.
        self._queue: deque[Callable[[], None]] = deque()
        # Set by any thread: the queue has items; and they must not wait for more.
        self._arrived = threading.Event()
        self._urgent = threading.Event()
        # Receiving thread only: ports of running calls that have printed.
        self._printing: set[int] = set()
        node.dispatch.handle(m.Output, lambda output, _: self.take(output))
        node.ports.closed.subscribe(self.done)
        node.waits.await_shown = self.await_shown
        self._closing = False
        self._thread = new_thread("monarch-output", self._run)
        self._thread.start()

    # For any thread

    def configure(self, uid: str, shown: bool, window: float | None) -> None:
        """Set whether a mesh's output is shown, and how long to wait for equal lines."""
        self._put(lambda: self._configure(uid, shown, WINDOW if window is None else window))

    def know(self, offsets: dict[tuple[str, str], int]) -> None:
        """Note how much of each stream an earlier program has shown."""
        self._put(lambda: self._seen.update(offsets))

    def take(self, output: m.Output) -> None:
        """Queue the output of a rank; in the receiving thread."""
        port, late = self._call_of(output.caller, output.port)
        self._put(lambda: self._take(output, port, late))

    def _call_of(self, caller: str, port: int) -> tuple[int, bool]:
        """Return the port of a call of this process that prints, or 0, and whether the call has ended."""
        if not port or caller != self._node.proc:
            return 0, False
        # First, for the case that it is closed meanwhile.
        self._printing.add(port)
        late = not self._node.ports.follow(port)
        if late:
            self._printing.discard(port)
        return port, late

    def take_merged(self, merged: m.MergedOutput) -> None:
        """Queue the equal output of some ranks; in the receiving thread."""
        port, late = self._call_of(merged.caller, merged.port)
        self._put(lambda: self._take_merged(merged, port, late))

    def done(self, port: int) -> None:
        """Show the output of a call that has ended."""
        if port in self._printing:
            self._printing.discard(port)
            shown = self._node.waits.unshown[port] = threading.Event()
            self._put(lambda: self._done(port, shown), urgent=True)

    def stops(self, uid: str, procs: Sequence[str], port: int) -> None:
        """Show the last output of a mesh before the result of its end is read.

        Args:
            uid: the uid of the mesh.
            procs: processes that are ending.
            port: the port of the future of their end.
        """
        self._put(partial(self._stops.__setitem__, port, EndingMesh(uid, procs)))
        self._printing.add(port)
        if not self._node.ports.follow(port):
            self._printing.discard(port)
            self._put(lambda: self._forget_stop(port))

    def await_shown(self) -> None:
        """Wait briefly until the output of ended calls is shown, before a result is read."""
        # Of all calls, since output of one actor may come with that of another in its process.
        deadline = time.monotonic() + _SHOWN_S
        for port, shown in list(self._node.waits.unshown.items()):
            if threading.current_thread() is self._thread:
                return
            if not shown.wait(max(0.0, deadline - time.monotonic())):
                # There is too much; it comes later, and no other result waits for it.
                self._node.waits.unshown.pop(port, None)

    def ended(self, dead: m.Dead) -> None:
        """Queue the last output of a dead proc, for the call that ran there, before that fails; receiving thread."""
        tails = dead.tails
        port = self._node.ports.oldest_call_of(dead.proc) if tails else 0
        if port:
            self._printing.add(port)
        self._put(lambda: self._ended(dead.proc, tails, port))

    def flush(self) -> None:
        """Show all pending output."""
        shown = threading.Event()
        self._put(lambda: self._flush(shown), urgent=True)
        if not self._thread.is_alive():
            self._work()
        elif threading.current_thread() is not self._thread:
            shown.wait(_FLUSH_S)

    def hold(self, proc: str, shown: threading.Event) -> None:
        """Let what a proc prints from now on wait until something else is shown, for a bounded time; for any thread.

        Args:
            proc: the printing process.
            shown: set, and followed by ``go_on``, once that is shown.
        """
        self._put(lambda: self._hold(proc, shown))

    def go_on(self) -> None:
        """Show output that waited for something that is shown now."""
        self._put(_nothing, urgent=True)

    def run(self, action: Callable[[], None]) -> None:
        """Call a function in the output thread, after what has arrived."""
        self._put(action, urgent=True)

    def catch_up(
        self, proc: str = "", ports: Callable[[int], bool] = lambda port: True, patience: float = _SHOWN_S
    ) -> None:
        """Show all finished lines that have arrived and need not wait; unfinished ones stay.

        Args:
            proc: a process whose unfinished lines end here.
            ports: tells for each of its calls, by port, whether its lines do.
            patience: the most seconds that this waits for the output thread.
        """
        shown = threading.Event()
        self._put(lambda: self._catch_up(shown, proc, ports), urgent=True)
        if threading.current_thread() is not self._thread:
            shown.wait(patience)

    def close(self) -> None:
        """Show all pending output and end the thread."""
        self.flush()
        self._closing = True
        self._put(_nothing, urgent=True)
        if threading.current_thread() is not self._thread:
            self._thread.join(_FLUSH_S)

    def _put(self, action: Callable[[], None], urgent: bool = False) -> None:
        self._queue.append(action)
        if urgent:
            self._urgent.set()
        if not self._arrived.is_set():
            self._arrived.set()

    # The thread

    def _run(self) -> None:
        last = 0.0
        while not self._closing:
            self._arrived.wait(self._idle_time())
            left = last + _GATHER_S - time.monotonic()
            if left > 0 and self._arrived.is_set():
                self._urgent.wait(left)
            self._arrived.clear()
            self._urgent.clear()
            self._work()
            last = time.monotonic()

    def _idle_time(self) -> float | None:
        """Return the seconds until something is due."""
        due = [when for folder in self._folders.values() if (when := folder.next_due()) is not None]
        if self._look_at:
            due.append(self._look_at)
        due += [gate.deadline for gate in self._gates.values()]
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _work(self) -> None:
        while True:
            try:
                action = self._queue.popleft()
            except IndexError:
                break
            self._safely(action)
            if self._taken >= _PORTION:
                self._show_due()
        self._open_gates()
        self._show_due()
        self._look_at_unfinished()

    def _show_due(self) -> None:
        now = time.monotonic()
        for folder in self._folders.values():
            self._due += folder.due_blocks(now)
        self._emit()
        self._give_credit()
        self._since += self._taken
        self._taken = 0
        if self._since > _MUCH and not self._queue:
            self._since = 0
            release_free_memory()


def _nothing() -> None:
    pass
