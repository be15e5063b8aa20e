"""Output of a rank, sent within a window, so that replies and control overtake it."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sized
from threading import get_ident
from typing import TYPE_CHECKING, Any, Protocol

from monarch._actors.running import current
from monarch._actors.table import actors_of
from monarch._core.text.cpp_frames import mark_cut
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
from monarch._procs.rank.text_streams import RankText, set_pace
from monarch._python.locks import is_owned
from monarch._python.threads import new_thread
from monarch._wire import messages as m
from monarch._wire.receiving.aside import tell_recurring
from monarch._wire.receiving.leadership import Gate

if TYPE_CHECKING:
    from monarch._wire.receiving.loop import Turn

WINDOW = 32 << 20
"""Bytes of output of a whole mesh in flight to the program; each line counts as some more."""
_LEAST, _MOST = 128 << 10, 16 << 20
"""Bounds of one rank's share."""
_STALLED_S = 0.5
"""Seconds without progress after which an answer stops waiting for earlier output."""
_ANSWER_S = 5.0
"""The most seconds that an answer waits for earlier output."""
_SLICE_S = 0.05
_lseek, _SEEK_END = os.lseek, os.SEEK_END


def window_of(ranks: int) -> int:
    """Return the bytes of output that each rank of a mesh of a size may have in flight."""
    return max(_LEAST, min(_MOST, WINDOW // max(1, ranks)))


class RankReports(Protocol):
    """Reports what this rank does; see ``monarch._telemetry.reporter``."""

    measuring: bool
    values: Sized
    bars: Sized

    def tick(self) -> bool: ...
    def flush(self) -> None: ...


class Outbox:
    """Sends the output of this rank to the program, as far as the window allows, and before each answer its reports.

    The rest waits in the output files (``monarch._procs.rank.output``), which are bounded too. A call's output is sent
    before its answer. If the program does not take it, all but its end is dropped.

    Args:
        node: the node of this rank.
        ranks: the size of the mesh.
        busy: returns the running call, for output in the middle of it.
    """

    def __init__(self, node: Node, ranks: int, busy: Callable[[], Any]) -> None:
        self._node = node
        self._actors = actors_of(node)
        self._busy = busy
        self._capture = Capture()
        self._window = window_of(ranks)
        self.lock = threading.RLock()
        """Held from taking output until it is sent. No user code runs under it."""
        # Written under ``lock``: whether output is taken that may not be sent yet. Without the lock, read it after how
        # far was taken.
        self._sending = False
        # Guarded by ``lock``: cost of output in flight.
        self._ahead = 0
        # Appended by the receiving thread, taken with ``lock`` held: cost of output that the program has taken.
        self._credits: deque[int] = deque()
        # How often that was; written by the receiving thread only.
        self._received = 0
        self.reports: RankReports | None = None
        """The reports to flush after the output. Set once, before the rank receives."""
        # Interrupts of this process at the last answer: a call that is being stopped does not wait.
        self._interrupts = 0
        self._shows_all = os.environ.get("TORCH_SHOW_CPP_STACKTRACES", "0") == "1"
        self.thread: Turn | None = None
        """Locks of threads that wait for room, as the receive loop requires."""
        node.dispatch.handle(m.OutputCredit, self._on_credit)
        node.events.controller_changed.subscribe(self.reset)
        # Wakes the thread that flushes streams, since user code that prints may hold their locks.
        self._due = Gate()
        # Set once: that thread, which is exempt from waiting.
        self._flusher = new_thread("monarch-flush", self._flush_when_due)
        self._flusher.start()
        node.events.closing.subscribe(self._due.open)
        set_pace(self._pace)

    @property
    def done(self) -> bool:
        """Whether there is room to send more."""
        return bool(self._credits)

    def flush(self) -> None:
        """Send what was printed and logged; for a thread that is about to answer or to wait. Errors are told only."""
        try:
            # Before each answer, so the usual case makes no call in Python.
            stdout, stderr = sys.stdout, sys.stderr
            if not (type(stdout) is RankText and type(stderr) is RankText) or (
                stdout.unflushed or stdout.taken or stderr.unflushed or stderr.taken
            ):
                flush_streams()
            for source in self._capture.sources:
                if _lseek(source.fd, 0, _SEEK_END) != source.taken:
                    self.send_new()
                    break
            else:
                if self._sending:
                    # Output that another thread has just taken may be this call's, so it goes before the answer.
                    self.send_new()
            self._interrupts = self._actors.interrupts
            reports = self.reports
            if reports is not None and (not reports.measuring or reports.values or reports.bars):
                reports.flush()
        except Exception as error:
            # User code may have closed descriptors, for example; the answer must go out all the same.
            tell_recurring(error)

    def send_new(self) -> None:
        """Send new output that was written to the descriptors, once there is room."""
        with self.lock:
            self._send()
        if self._capture.left:
            self._catch_up()

    def tick(self) -> bool:
        """Send output in the middle of a call, in the receiving thread; return whether there was any.

        Buffered output follows once another thread has flushed the streams.
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
        """Send all output, even beyond the window, without waiting and without running user code."""
        flush_own()
        with self.lock:
            self._send(True)

    def reset(self) -> None:
        """Start over with another program; the previous one takes no more output."""
        with self.lock:
            self._credits.clear()
            self._ahead = 0

    def _pace(self) -> None:
        if is_owned(self.lock):
            # This thread writes for a call that it names, and nobody else may take that.
            if self._capture.behind() > self._capture.most:
                self._send(True)
        elif get_ident() != self._flusher.ident:
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
        """Send output that fits, unless another thread is doing so."""
        if not self.lock.acquire(blocking=False):
            return True
        try:
            sent = self._send(running=True)
            if self._capture.left and self._capture.behind() > self._capture.most:
                self._capture.trim(self._capture.most // 2)
            return sent
        finally:
            self.lock.release()

    def _send(self, all_of_it: bool = False, running: bool = False) -> bool:
        """Send output that fits, with the lock held; return whether there was any.

        Args:
            all_of_it: whether to exceed the window.
            running: whether it belongs to the running call, not to this thread's.
        """
        credits = self._credits
        while credits:
            self._ahead = max(0, self._ahead - credits.popleft())
        room = None if all_of_it else max(0, self._window - self._ahead)
        self._sending = True
        try:
            chunks = self._capture.take(room, False)
            if chunks:
                self._send_chunks(chunks, running)
            return bool(chunks)
        finally:
            self._sending = False

    def _send_chunks(self, chunks: list[Chunk], running: bool) -> None:
        # Looked up after taking the output, which a call that has just begun may have printed. Ending calls wait.
        here = (self._busy() if running else None) or current.get()
        where = ("", "", "", 0)
        if here is not None:
            where = (here[0].key, here[1].method, here[1].src, here[1].port)
        node = self._node
        root = node.peers.get(node.root)
        for pieces in _messages(chunks if self._shows_all else _marked(chunks)):
            self._ahead += sum(cost_of(data) for _, _, data in pieces)
            root.send(m.encode(m.Output(node.proc, *where, pieces)))

    def _catch_up(self) -> None:
        """Wait while the program takes output that an answer must not overtake."""
        begun = moved = time.monotonic()
        received = self._received
        while self._actors.interrupts == self._interrupts:
            now = time.monotonic()
            if now - moved > _STALLED_S or now - begun > _ANSWER_S:
                break
            self._node.receive_loop.wait(self, _SLICE_S)
            if self._received != received:
                # Whichever thread used it.
                received, moved = self._received, time.monotonic()
            with self.lock:
                self._send()
            if not self._capture.left:
                return
        self._capture.trim(TAIL, wait=True)
        with self.lock:
            self._send(True)


def _marked(chunks: list[Chunk]) -> list[Chunk]:
    """Mark torch's warnings about connections that were cut here, which the program does not show."""
    # Not imported: nothing was cut if it is not there, and the receiving thread must not import.
    connections = sys.modules.get("monarch._tensors.collectives.connections")
    if connections is None:
        return chunks
    return [
        each._replace(data=mark_cut(each.data, connections.was_cut)) if each.stream == "stderr" else each
        for each in chunks
    ]


def _messages(chunks: list[Chunk]) -> list[list[tuple[str, int, bytes]]]:
    """Pack chunks into messages of at most about 1 MB."""
    messages: list[list[tuple[str, int, bytes]]] = [[]]
    size = 0
    for chunk in chunks:
        if size and size + len(chunk.data) > CHUNK_LIMIT:
            messages.append([])
            size = 0
        messages[-1].append((chunk.stream, chunk.offset, chunk.data))
        size += len(chunk.data)
    return messages
