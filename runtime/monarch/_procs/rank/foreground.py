"""Programs started by a rank's code: an interrupt reaches them too, like Ctrl-C in a terminal."""

from __future__ import annotations

import _thread
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
    own_command = _command(os.getpid())
    for pid in _descendants(children(os.getpid(), thread)):
        command = _command(pid)
        # A fork without exec has the command of this process.
        if command != own_command and b"multiprocessing" not in command and not is_tracker(pid):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGINT)


def end_shell() -> bool:
    """Interrupt ``os.system`` in the main thread, and its command; return False if it does not run.

    Meanwhile the C library makes this process ignore SIGINT, and Python does not hear of it.
    """
    try:
        with open("/proc/self/status", "rb") as file:
            ignored = next(int(line.split()[1], 16) for line in file if line.startswith(b"SigIgn:"))
    except OSError:
        # No descriptor is free. The end of the wait goes on without this.
        return False
    if not ignored >> (signal.SIGINT - 1) & 1 or signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        return False
    _thread.interrupt_main(signal.SIGINT)
    # The id of the main thread, which Python does not know after a fork.
    interrupt_programs(os.getpid())
    return True


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
