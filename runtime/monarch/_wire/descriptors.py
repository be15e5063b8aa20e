"""File descriptors: how many a process may still open, and its reserve for its own connections."""

from __future__ import annotations

import os
import resource
from contextlib import suppress
from threading import Lock

ENOUGH = 65_536
"""Soft limit requested by processes of a session; as many sockets as one ZeroMQ context holds."""
RESERVE = 16
"""Descriptors that a process reserves, so that user code that opens too many files leaves room for connections."""
_LOW = 8
"""Free descriptors, beyond the reserve, below which a process accepts no new connections."""
_MANY = 4096
"""Free descriptors that no code uses up within seconds, except to use up all."""
AGENT_NEED = 5
"""Descriptors of one rank in its host agent: two output files, and, where ranks talk to each other, a link each way."""


def raise_limit() -> None:
    """Raise this process's soft limit of open files, up to its hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        # A container may forbid what the limits allow; then the limit stays.
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def limit_of(pid: int | None = None) -> int:
    """Return the soft limit of open files of a process of this user; of this one by default."""
    soft = resource.prlimit(pid or 0, resource.RLIMIT_NOFILE)[0]
    return ENOUGH if soft == resource.RLIM_INFINITY else soft


def used_by(pid: int | None = None) -> int:
    """Return how many descriptors a process of this user has open; of this one by default."""
    folder = f"/proc/{pid or 'self'}/fd"
    # From kernel 6.2 on, the size of the folder is the number, which is far cheaper than a list.
    return os.stat(folder).st_size or len(os.listdir(folder))


def remedy(total: int) -> str:
    """Return the command that raises the limit to so many descriptors in all."""
    return f"`ulimit -n {1 << max(8, (total - 1).bit_length())}`"


class Reserve:
    """Descriptors held open, to be released when user code has used all others. Thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        # Under the lock.
        self._held: list[int] = []
        self._pid = 0
        self.is_calm = False
        """Whether very many were free at the last look; by the thread that looks."""

    def free(self) -> int:
        """Return how many descriptors this process may open, including the reserve."""
        with self._lock:
            held = len(self._held) if self._pid == os.getpid() else 0
        return limit_of() - used_by() + held

    def keep(self) -> bool:
        """Take the reserve if there is room for it, and release it if there is not.

        Returns:
            Whether there is room: this process may accept new connections.
        """
        free = self.free()
        room, self.is_calm = free >= RESERVE + _LOW, free >= _MANY
        if room:
            self._fill()
        else:
            self.give_up()
        return room

    def _fill(self) -> None:
        with self._lock:
            if self._pid != os.getpid():
                # A fork has closed its parent's descriptors, or must close them.
                self._held, self._pid = [], os.getpid()
            if len(self._held) == RESERVE:
                return
            with suppress(OSError):
                self._held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
                while len(self._held) < RESERVE:
                    self._held.append(os.dup(self._held[0]))

    def give_up(self) -> None:
        """Release the reserve, because a connection needs room now."""
        with self._lock:
            held, self._held = (self._held, []) if self._pid == os.getpid() else ([], [])
        for fd in held:
            with suppress(OSError):
                os.close(fd)


reserve = Reserve()
"""The reserve of this process."""
