"""The Python stacks of child processes: each serves its own, in a file in memory, when its parent asks by a signal."""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

from monarch._procs.os import posix

ASK = signal.SIGRTMIN + 9
"""The signal that asks; its handler is C, and restarts the system call that it has interrupted."""
_ASLEEP = ("S", "D")
"""States of a main thread that waits."""
_FILE = "monarch-stack"
_LINE = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_PATIENCE_S = 0.3
"""Seconds for the answers of all children that are asked together."""
_PAUSE_S = 0.002
_ASLEEP_S = 0.02
"""Seconds for which a child has slept before it is asked: one that wakes up now and then runs Python soon."""
_own = -1
"""The file of this process; -1 if it has none. Written by the main thread, or right after a fork."""


class StackLine(NamedTuple):
    """A line of a stack."""

    file: str
    number: int
    function: str


def serve() -> None:
    """Serve the stack of this process from now on, unless it does."""
    if _own < 0:
        _serve()


def _serve() -> None:
    global _own
    try:
        # A fork needs its own: that of its parent has the parent's stacks.
        before, _own = _own, posix.memfd(_FILE)
        faulthandler.register(ASK, _own, all_threads=False)
        signal.siginterrupt(ASK, False)
        # The parent may have closed it, and opened another file of this number.
        if before >= 0 and _is_served(f"/proc/self/fd/{before}"):
            os.close(before)
    except (OSError, RuntimeError):
        # Without room for it, the process runs all the same.
        pass


def made(kind: Any) -> Any:
    """Return a new object that this spawned process is made from, and serve the stack of this process."""
    serve()
    return kind.__new__(kind)


def serve_in_forks() -> None:
    """Let the forks of this process serve their stacks."""
    os.register_at_fork(after_in_child=_serve)


def stacks_of(pids: Iterable[int]) -> dict[int, list[StackLine]]:
    """Return the stacks of processes, innermost line first, of those that serve them and answer at once."""
    files = {pid: file for pid in pids if (file := _file_of(pid)) >= 0}
    found: dict[int, list[StackLine]] = {}
    try:
        asleep = {pid: slept for pid in files if (slept := _asleep(pid))}
        if asleep:
            time.sleep(_ASLEEP_S)
        asked = {pid: os.fstat(files[pid]).st_size for pid, slept in asleep.items() if _ask(pid, slept)}
        deadline = time.monotonic() + _PATIENCE_S
        while len(found) < len(asked):
            for pid, begin in asked.items():
                if pid not in found and (text := _answer(files[pid], begin)):
                    found[pid] = [StackLine(file, int(line), name) for file, line, name in _LINE.findall(text)]
            if time.monotonic() > deadline:
                break
            time.sleep(_PAUSE_S)
    finally:
        for file in files.values():
            os.close(file)
    return found


def _answer(file: int, begin: int) -> str:
    """Return what was written to a file since a size, once it has not grown for a moment."""
    size = os.fstat(file).st_size
    if size == begin:
        return ""
    time.sleep(_PAUSE_S)
    return os.pread(file, size - begin, begin).decode(errors="replace") if os.fstat(file).st_size == size else ""


def _file_of(pid: int) -> int:
    """Open the file of a process; -1 if it has none."""
    folder = f"/proc/{pid}/fd"
    try:
        for number in os.listdir(folder):
            if _is_served(f"{folder}/{number}"):
                return os.open(f"{folder}/{number}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        pass
    return -1


def _is_served(path: str) -> bool:
    """Return whether a descriptor in /proc is such a file."""
    return os.readlink(path).startswith(f"/memfd:{_FILE}")


def _asleep(pid: int) -> str:
    """Return how often the main thread of a process has gone to sleep; empty if it runs, or the signal would end it."""
    try:
        with open(f"/proc/{pid}/status") as file:
            known = dict(line.split(":", 1) for line in file)
        if known["State"].split()[0] in _ASLEEP and int(known["SigCgt"], 16) >> (ASK - 1) & 1:
            return known["voluntary_ctxt_switches"].strip()
    except (OSError, KeyError, ValueError):
        pass
    return ""


def _ask(pid: int, slept: str) -> bool:
    """Ask a process, unless its main thread has run since it went to sleep that often.

    The handler reads the frames of a thread as they are: those of one that runs may be half made, and that has ended
    processes by SIGSEGV. One that wakes up in this very moment still runs that risk.
    """
    if _asleep(pid) != slept:
        return False
    try:
        os.kill(pid, ASK)
    except OSError:
        return False
    return True
