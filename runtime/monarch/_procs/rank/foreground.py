"""Programs started by a rank's code: an interrupt reaches them too, like Ctrl-C in a terminal."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress

from monarch._procs.os.orphans import children, is_tracker


def interrupt_programs(thread: int) -> None:
    """Send SIGINT to the programs that a thread of this process has started, and to their descendants.

    Workers of multiprocessing, such as those of a DataLoader, are spared: kept variables may need them.

    Args:
        thread: its native id.
    """
    ours = _command(os.getpid())
    for pid in _descendants(children(os.getpid(), thread)):
        command = _command(pid)
        # A fork without exec has the command of this process.
        if command != ours and b"multiprocessing" not in command and not is_tracker(pid):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGINT)


def _descendants(pids: list[int]) -> Iterator[int]:
    for pid in pids:
        # Its children first: they are orphans once it has ended.
        yield from _descendants(children(pid))
        yield pid


def _command(pid: int) -> bytes:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read()
    except OSError:
        return b""
