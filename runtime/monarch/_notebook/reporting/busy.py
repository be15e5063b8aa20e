"""The thread state of code that does not stop: requested while a cell runs, answered at once."""

from __future__ import annotations

import ast
import dis  # pyright: ignore[reportUnusedImport]  # from Python 3.11 on
import linecache
import re
import sys
import threading
import time
from types import FrameType
from typing import NamedTuple

from monarch._actors import interrupts
from monarch._actors.cleanup import cleans_up, is_handling, region_of
from monarch._actors.escape import ask_escape
from monarch._actors.interrupting import interrupt
from monarch._core.stop_ladder import Activity
from monarch._node.services.registry import service
from monarch._procs.os.blocked import WaitKind, blocked, ran_on_cpu
from monarch._python.frames import frame_of
from monarch._supervision.freeing import running, thread_of, waiting

_CELL = re.compile(r"cell \[\d+\]")
_LOOKS = 10
_PAUSE = 0.005
"""Seconds between two looks at a thread."""
_LONGEST = 80
"""The most characters shown of an expression."""
_SHARE = 0.02
"""Seconds of CPU within which Python code takes an interrupt."""
_LOOKS_BUSY = 500
"""The most looks at a thread that waits for a CPU."""
_prodded: dict[str, tuple[int, float]] = {}
"""By key of an actor: the count of ``noticed`` at the last request, and the CPU seconds of its thread. Threads of
services, in single dict operations."""


class ThreadState(NamedTuple):
    """The state of a call's code."""

    activity: Activity
    line: int
    """Line of the cell, 0 if none of its frames is of a cell."""
    call: str
    """The called expression in source form; empty if unknown."""
    place: str = ""
    """Where it is, as in ``cell [3] line 5``; empty if unknown."""
    handles: bool = False
    """Whether it runs ``except`` or ``finally`` code for an interrupt."""


@service("busy.prod", "threaded")
def prod(key: str, src: str, port: int, spare: bool) -> None:
    """Service: interrupt a call once more, so that ``thread_state`` can tell whether it swallows interrupts.

    A call that cleans up after its interrupt is left alone if ``spare`` is true.

    Args:
        key: the key of the actor's mesh.
        src: proc that has called.
        port: where it waits for the answer.
    """
    found = running(key, src, port)
    mailbox = found[0] if found is not None else waiting(key, src, port)
    if found is not None and spare and _cleans_up(thread_of(found[0])):
        return
    before, main = interrupts.noticed, threading.main_thread().ident or 0
    ident = thread_of(mailbox) if mailbox is not None else 0
    is_main = ident == main
    _prodded[key] = before, ran_on_cpu(ident)
    region = region_of(interrupts.raised.get(main)) if found is not None and is_main else None
    if region is not None:
        ask_escape(region)
    else:
        interrupt(key, src, port)
    if is_main:
        interrupts.prod()


@service("busy.thread_state", "threaded")
def thread_state(key: str, src: str, port: int, name: str, spare: bool) -> ThreadState | None:
    """Service: return the state of a call's code; None if it has ended.

    Args:
        key: the key of the actor's mesh.
        src: proc that has called.
        port: where it waits for the answer.
        name: what the cell's frames call their file.
        spare: whether to leave a call alone that cleans up after its interrupt.
    """
    # A call may be queued behind another one that does not stop.
    found = running(key, src, port)
    mailbox = found[0] if found is not None else waiting(key, src, port)
    if mailbox is None:
        return None
    ident = thread_of(mailbox)
    moves = _moves(key, ident, mailbox.executor.interrupts)
    frame = frame_of(ident)
    activity = Activity.PYTHON
    if spare and found is not None and _cleans_up(ident):
        activity = Activity.CLEANING
    elif not moves:
        waits = blocked(ident).wait in (WaitKind.SOCKET, WaitKind.OTHER)
        activity = Activity.WAITING if waits else Activity.COMPUTING
    at = _frame_of(frame, name)
    line = at.f_lineno if at is not None and at.f_code.co_filename == name else 0
    return ThreadState(activity, line, _call_at(at), place_of(frame), is_handling(ident))


def _moves(key: str, ident: int, threads: interrupts.ThreadInterrupts | None) -> bool:
    """Return whether a thread has taken its last interrupt: Python code does once it has a CPU, a C call does not."""
    before, used = _prodded.get(key, (interrupts.noticed, 0.0))
    for _ in range(_LOOKS_BUSY):
        # Both are delivered between bytecodes, so in a C call they are still pending.
        if not threads.pending if threads is not None else interrupts.noticed > before:
            return True
        if key not in _prodded or ran_on_cpu(ident) - used > _SHARE or blocked(ident).wait is not WaitKind.NONE:
            break
        time.sleep(_PAUSE)
    return False


def _cleans_up(ident: int) -> bool:
    """Return whether a thread cleans up after its interrupt; one that swallows it is soon back where it was."""
    for _ in range(_LOOKS):
        if not cleans_up(ident):
            return False
        time.sleep(_PAUSE)
    return True


def place_of(frame: FrameType | None) -> str:
    """Return the innermost line of any cell."""
    while frame is not None:
        if _CELL.fullmatch(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename} line {frame.f_lineno}"
        frame = frame.f_back
    return ""


def call_in_cell(frame: FrameType | None) -> str:
    """Return the expression that the innermost frame of any cell evaluates; empty if there is none."""
    while frame is not None and not _CELL.fullmatch(frame.f_code.co_filename):
        frame = frame.f_back
    return _call_at(frame)


def _frame_of(frame: FrameType | None, name: str) -> FrameType | None:
    """Return the innermost frame of a cell; without one, the innermost of all."""
    at = frame
    while at is not None and at.f_code.co_filename != name:
        at = at.f_back
    return at or frame


def _call_at(frame: FrameType | None) -> str:
    """Return the expression that a frame is evaluating."""
    if frame is None:
        return ""
    lines = linecache.getlines(frame.f_code.co_filename, frame.f_globals)
    # Python 3.10 does not know columns.
    positions = next(
        (each.positions for each in dis.get_instructions(frame.f_code) if each.offset == frame.f_lasti), None
    ) if sys.version_info >= (3, 11) else None  # fmt: skip
    text = ""
    # The source of what the notebook has defined may not be here.
    if positions is not None and positions.lineno is not None and (positions.end_lineno or 0) <= len(lines):
        source = "".join(lines)
        node = ast.Constant(None)
        node.lineno, node.end_lineno = positions.lineno, positions.end_lineno
        node.col_offset, node.end_col_offset = positions.col_offset or 0, positions.end_col_offset
        text = ast.get_source_segment(source, node) or ""
    elif 0 < frame.f_lineno <= len(lines):
        text = lines[frame.f_lineno - 1]
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"
