"""stdout and stderr of a rank: what a thread prints after the end of its cell still belongs to that cell."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any

from monarch._actors.running import current
from monarch._actors.table import actors_of
from monarch._node.current import current_node, has_node
from monarch._node.remote_errors import is_ours
from monarch._procs.rank.text_streams import RankText, replaced

# Held while a text is written and sent with its call; nothing waits for the program with it, nor is user code run.
_lock = threading.RLock()
_parts = threading.local()
# Those that were put in place, once.
_streams: list[CellText] = []
# How many threads of calls there are; with _lock.
_threads = 0


class CellText(RankText):
    """Text to a descriptor that a rank captures; lines of threads go with the call that started the thread.

    Without any, ``write`` is that of RankText, since it runs for each piece of each print.
    """

    def look(self, on: bool) -> None:
        """Return whether writers look whose call they print for."""
        if on:
            self.write = self.route
        elif "write" in vars(self):
            del self.write

    def route(self, text: str, /) -> int:
        """Write a text, for the call that runs or the one that started this thread."""
        origin = getattr(threading.current_thread(), "_monarch_call", None)
        if origin is None or origin[0].running is origin[1]:
            with _lock:
                return super().write(text)
        # By whole lines, since each is sent by itself.
        held: dict[CellText, str] = _parts.__dict__.setdefault("held", {})
        lines, newline, rest = (held.pop(self, "") + text).rpartition("\n")
        if rest:
            held[self] = rest
        if newline:
            self._send(lines + newline, origin)
        return len(text)

    def end_line(self, origin: Any) -> None:
        """Write what a thread that ends has left of a line."""
        rest = _parts.__dict__.get("held", {}).pop(self, "")
        if rest:
            self._send(rest, origin)

    def _send(self, text: str, origin: Any) -> None:
        if not has_node():
            # A fork of this rank: its output is captured as the parent's is.
            with _lock:
                super().write(text)
            return
        node = current_node()
        busy = next(
            ((mailbox, mailbox.running) for mailbox in list(actors_of(node).here.values()) if mailbox.running), None
        )
        # Earlier output belongs to the running call. This may wait for the program to take it.
        _send_as(busy, node.output.idle)
        # No tick may take the text meanwhile, as output of the call that runs.
        with _lock, node.output.taking:
            _send_as(busy, node.output.send_printed)
            # The middle of a very long text is sent as it is written.
            _send_as(origin, partial(RankText.write, self, text))
            _send_as(origin, node.output.send_printed)


@contextmanager
def printing_for(origin: Any) -> Generator[None]:
    """Send what this thread prints meanwhile as output of a call, rather than of the one that runs here.

    Args:
        origin: a mailbox with its ``key``, and a call with its ``src``, ``method`` and ``port``.
    """
    here = threading.current_thread().__dict__
    before = here.get("_monarch_call")
    _count_threads(1)
    here["_monarch_call"] = origin
    try:
        yield
    finally:
        for stream in _streams:
            stream.end_line(origin)
        here["_monarch_call"] = before
        _count_threads(-1)


def _count_threads(change: int) -> None:
    """Note that a thread of a call begins or ends; from the first one on, writers look up their call."""
    global _threads
    with _lock:
        _threads += change
        for stream in _streams:
            stream.look(_threads > 0)


def _send_as(call: Any, send: Callable[[], object]) -> None:
    token = current.set(call)
    try:
        send()
    finally:
        current.reset(token)


def install() -> None:
    """Install these streams, and make threads remember the call that started them."""
    if isinstance(sys.stdout, CellText):
        return
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        stream.flush()
        below = stream.succeed() if isinstance(stream, RankText) else stream.buffer
        text = CellText(below, stream.encoding, stream.errors, line_buffering=stream.line_buffering)
        # As open() sets it.
        text.mode = stream.mode  # pyright: ignore[reportAttributeAccessIssue]
        setattr(sys, name, text)
        _streams.append(text)
    os.register_at_fork(after_in_child=_renew)
    start = threading.Thread.start

    def start_of_call(self: threading.Thread) -> None:
        origin = current.get() or getattr(threading.current_thread(), "_monarch_call", None)
        if origin is not None:
            run = self.run

            def run_of_call() -> None:
                _count_threads(1)
                try:
                    run()
                finally:
                    for stream in _streams:
                        stream.end_line(origin)
                    _count_threads(-1)

            self.__dict__.update(_monarch_call=origin, run=run_of_call)
        start(self)

    threading.Thread.start = start_of_call
    report = threading.excepthook

    def report_of_call(args: threading.ExceptHookArgs) -> None:
        _hide_ours(args.exc_traceback)
        report(args)

    threading.excepthook = report_of_call


def _hide_ours(trace: TracebackType | None) -> None:
    """Remove the frames of this package below the first one."""
    while trace is not None and trace.tb_next is not None:
        if is_ours(trace.tb_next.tb_frame.f_code.co_filename):
            trace.tb_next = trace.tb_next.tb_next
        else:
            trace = trace.tb_next


def tell_replaced() -> None:
    """Say in the running cell that user code has replaced a descriptor of this rank, once."""
    for number, path in replaced():
        print(
            f"note: file descriptor {number} of this rank now points to {path}, which has this cell's output since "
            f"then; later cells show what Python prints, but not the output of C code and child processes",
            file=note_file(),
        )


def note_file() -> Any:
    """Return the stream for notes below the output of a cell, whatever user code has made of ``sys.stderr``."""
    return _streams[-1] if _streams else sys.stderr


def _renew() -> None:
    # Another thread may have held it when this process was forked.
    global _lock, _threads
    _lock = threading.RLock()
    _threads = 0
