"""How a rank sends what it prints: never far ahead of the program, so that replies and control overtake output."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from threading import get_ident
from typing import TYPE_CHECKING, Any

from monarch._actors.running import current
from monarch._actors.table import actors_of
from monarch._node.node import Node
from monarch._procs.rank.output import (
    CHUNK_LIMIT,
    TAIL,
    Capture,
    Chunk,
    cost_of,
    flush_own,
    flush_streams,
    own_may_hold,
)
from monarch._procs.rank.text_streams import set_pace
from monarch._wire import messages as m
from monarch._wire.receiving.leadership import Gate

if TYPE_CHECKING:
    from monarch._wire.receiving.loop import Turn

WINDOW = 32 << 20
"""Bytes of output of a whole mesh that may be on their way to the program, each line counted as some more."""
_LEAST, _MOST = 128 << 10, 16 << 20
"""Bounds of the share that one rank has of it."""
_STALLED_S = 0.5
"""Seconds without progress after which an answer does not wait any longer for the output before it."""
_ANSWER_S = 5.0
"""Seconds for which an answer waits for the output before it at most."""
_SLICE_S = 0.05


def window_of(ranks: int) -> int:
    """Bytes of output that a rank may send ahead, in a mesh of so many."""
    return max(_LEAST, min(_MOST, WINDOW // max(1, ranks)))


class Outbox:
    """Sends the output of this rank to the program, as far ahead of it as the window allows.

    What does not fit waits in the output files (``monarch._procs.rank.output``), which have a bound of their own. A
    call's output is sent before its answer. If the program does not take it, all but its end is left out.

    Args:
        node: of this rank.
        ranks: how many ranks the mesh has.
        busy: the call that runs, for what is printed in the middle of it.
    """

    def __init__(self, node: Node, ranks: int, busy: Callable[[], Any]) -> None:
        self._node = node
        self._actors = actors_of(node)
        self._busy = busy
        self._capture = Capture()
        self._window = window_of(ranks)
        # What is taken is sent before anybody takes more. No code of the user runs with it.
        self._lock = threading.RLock()
        # Guarded by _lock: cost of what was sent and that the program has not taken.
        self._ahead = 0
        # Appended by the receiving thread, taken with _lock held: cost of what the program has taken.
        self._credits: deque[int] = deque()
        # How often that was; written by the receiving thread only.
        self._received = 0
        # Interrupts of this process when the last answer was given: a call that is being stopped does not wait.
        self._interrupts = 0
        self.thread: Turn | None = None
        """Of who waits for room: the receive loop's, as of everything that is waited for."""
        node.dispatch.handle(m.OutputCredit, self._on_credit)
        node.events.controller_changed.subscribe(self.reset)
        # Opens when streams are to be flushed: their locks may be held by code that prints, so a thread does that.
        self._due = Gate()
        # Set once: that thread, which is not slowed down.
        self._flusher = threading.Thread(target=self._flush_when_due, name="monarch-flush", daemon=True)
        self._flusher.start()
        node.events.closing.subscribe(self._due.open)
        set_pace(self._pace)

    @property
    def done(self) -> bool:
        """Whether there is room to send more."""
        return bool(self._credits)

    def flush(self) -> None:
        """Send what was printed since the last time; for a thread that is about to answer, or to wait."""
        flush_streams()
        # An answer is not sent before what another thread has just taken, which may be this call's.
        with self._lock:
            self._send()
        if self._capture.left:
            self._catch_up()
        self._interrupts = self._actors.interrupts

    def tick(self) -> bool:
        """Send what was printed in the middle of a call; for the receiving thread. Whether there was anything.

        What streams hold in buffers follows once another thread has flushed them.
        """
        if own_may_hold():
            self._due.open()
        return self._send_now()

    def _flush_when_due(self) -> None:
        while not self._node.closed:
            self._due.wait(None)
            flush_own()
            if not self._node.closed:
                self._send_now()

    def send_printed(self) -> None:
        """Send all that was printed, also beyond the window; waits for nothing, and runs no code of the user."""
        flush_own()
        with self._lock:
            self._send(True)

    def reset(self) -> None:
        """Another program takes the output from now on: what the one before has not taken, it never will."""
        with self._lock:
            self._credits.clear()
            self._ahead = 0

    def _pace(self) -> None:
        if get_ident() != self._flusher.ident:
            self._capture.pace(self._ask)

    def _ask(self) -> None:
        self._node.receive_loop.post(self._send_soon)

    def _send_soon(self) -> None:
        self._send_now()

    def _on_credit(self, credit: m.OutputCredit, _: Any) -> None:
        self._credits.append(credit.count)
        self._received += 1
        if self._capture.left:
            self._send_now()
        self._node.receive_loop.notify(self)

    def _send_now(self) -> bool:
        """Send what fits, unless another thread does so already."""
        if not self._lock.acquire(blocking=False):
            return True
        try:
            sent = self._send(running=True)
            if self._capture.left and self._capture.behind() > self._capture.most:
                self._capture.trim(self._capture.most // 2)
            return sent
        finally:
            self._lock.release()

    def _send(self, all_of_it: bool = False, running: bool = False) -> bool:
        """Send what fits, with the lock held; whether there was anything.

        Args:
            all_of_it: whether what does not fit is sent as well.
            running: whether it is of the call that runs, and not of this thread's.
        """
        credits = self._credits
        while credits:
            self._ahead = max(0, self._ahead - credits.popleft())
        room = None if all_of_it else max(0, self._window - self._ahead)
        chunks = self._capture.take(room, False)
        if not chunks:
            return False
        # After it was taken: a call that began before that may have printed it. One that ends waits for the lock.
        here = (self._busy() if running else None) or current.get()
        where = ("", "", "", 0)
        if here is not None:
            where = (here[0].key, here[1].method, here[1].src, here[1].port)
        node = self._node
        root = node.peers.get(node.root)
        for pieces in _messages(chunks):
            self._ahead += sum(cost_of(data) for _, _, data in pieces)
            root.send(m.encode(m.Output(node.proc, *where, pieces)))
        return True

    def _catch_up(self) -> None:
        """Wait for the program to take what an answer must not overtake, as long as it does so."""
        begun = moved = time.monotonic()
        received = self._received
        while self._actors.interrupts == self._interrupts:
            now = time.monotonic()
            if now - moved > _STALLED_S or now - begun > _ANSWER_S:
                break
            self._node.receive_loop.wait(self, _SLICE_S)
            if self._received != received:
                # Whoever has used it.
                received, moved = self._received, time.monotonic()
            with self._lock:
                self._send()
            if not self._capture.left:
                return
        self._capture.trim(TAIL, wait=True)
        with self._lock:
            self._send(True)


def _messages(chunks: list[Chunk]) -> list[list[tuple[str, int, bytes]]]:
    """Chunks in messages of about 1 MB at most."""
    found: list[list[tuple[str, int, bytes]]] = [[]]
    size = 0
    for chunk in chunks:
        if size and size + len(chunk.data) > CHUNK_LIMIT:
            found.append([])
            size = 0
        found[-1].append((chunk.stream, chunk.offset, chunk.data))
        size += len(chunk.data)
    return found
