"""Locks on files, as the kernel lists them in ``/proc/locks``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

_PID, _WAITER_PID = 4, 5
"""The columns of the pid: of a holder, and of a waiter, which has an arrow before it."""


def lock_holders(pid: int) -> tuple[int, ...]:
    """Return the pids that hold the locks on files that a process waits for; none if they cannot be seen."""
    try:
        with open("/proc/locks") as file:
            return tuple(dict.fromkeys(holders_in(file, pid)))
    except OSError:
        return ()


def holders_in(lines: Iterable[str], pid: int) -> Iterator[int]:
    """Yield the pids that hold the locks that a process waits for.

    Args:
        lines: the lines of ``/proc/locks``. Waiters follow their holder, and have its number.
        pid: the pid of the process that waits.
    """
    holder = 0
    for line in lines:
        columns = line.split()
        waits = "->" in columns[:2]
        column = _WAITER_PID if waits else _PID
        if len(columns) <= column or not columns[column].isdecimal():
            # An open file description lock has no process.
            holder = holder if waits else 0
            continue
        if not waits:
            holder = int(columns[column])
        elif int(columns[column]) == pid and holder > 0:
            yield holder
