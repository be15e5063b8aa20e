"""A zygote's successor: a fork that does the slow imports while the zygote serves on, and then replaces it.

Ranks are wanted quickly, so the zygote forks them as soon as it has the minimal imports. Later imports
would happen while somebody waits, and in each rank separately. So an idle zygote has a fork do it. The successor
has the zygote's end of the socket to the agent, and reads it when the zygote has ended; the agent is told the new pid
and loses nothing.
"""

from __future__ import annotations

import fcntl
import gc
import importlib
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress

from monarch._procs.os import posix
from monarch._procs.os.gpus import has_touched_gpus

_GRACE = 5.0
"""Seconds for a zygote to end once it has handed over."""


class Successor:
    """The successor, as the zygote sees it.

    Args:
        pid: the pid of the fork.
        done: a descriptor, readable once it has imported all, or has failed.
        go: the reverse direction: a byte makes it take over.
    """

    def __init__(self, pid: int, done: int, go: int) -> None:
        self.pid = pid
        self.done = done
        self._go = go

    def hand_over(self) -> bool:
        """Let it take over, once ``done`` is readable; False if it failed, in which case it is reaped."""
        if os.read(self.done, 1):
            os.write(self._go, b"\0")
            return True
        os.waitpid(self.pid, 0)
        os.close(self.done)
        os.close(self._go)
        return False


def take_turn() -> int | None:
    """Return a descriptor that locks out other successors while any process has it open; None if one is being made.

    Each takes a core for a second: thirty sessions that start together would slow each other down.
    """
    turn = os.open(__file__, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(turn)
        return None
    except OSError:
        # Some file systems have no locks; then nobody waits for a turn.
        pass
    return turn


def begin(modules: Sequence[str], during: Mapping[str, str], title: str, turn: int) -> Successor | None:
    """Fork a successor.

    Args:
        modules: to import; missing ones are skipped.
        during: environment variables for the imports.
        title: name in ``ps`` once it has taken over.
        turn: from ``take_turn``; closed when the imports are done.

    Returns:
        In the zygote the successor; None if none can be forked. In the fork also None, when the zygote
        has ended: ``os.getpid()`` differs then, and the agent is its parent. One that cannot take over exits.
    """
    zygote = os.getpid()
    done_read, done_write = os.pipe()
    go_read, go_write = os.pipe()
    try:
        pid = os.fork()
    except OSError:
        for fd in (done_read, done_write, go_read, go_write, turn):
            os.close(fd)
        return None
    if pid:
        os.close(turn)
        os.close(done_write)
        os.close(go_read)
        return Successor(pid, done_read, go_write)
    os.close(done_read)
    os.close(go_write)
    try:
        ready = _prepare(zygote, modules, during)
        os.close(turn)
        if ready:
            os.write(done_write, b"\0")
        # Ends without a byte if the zygote dies.
        if not ready or not os.read(go_read, 1) or not posix.await_new_parent(zygote, _GRACE):
            os._exit(1)
    except BaseException:
        os._exit(1)
    os.close(done_write)
    os.close(go_read)
    posix.set_comm(title)
    return None


def _prepare(zygote: int, modules: Sequence[str], during: Mapping[str, str]) -> bool:
    """Import; return whether this process is fit to be forked from, and its zygote is still there."""
    posix.set_pdeathsig(signal.SIGKILL)
    if os.getppid() != zygote:
        return False
    posix.set_comm("monarch-warming")
    after = {key: os.environ.get(key) for key in during}
    os.environ.update(during)
    for name in modules:
        # Ranks import it themselves then, and report the problem.
        with suppress(Exception, SystemExit):
            importlib.import_module(name)
    for key, value in after.items():
        if value is None:
            del os.environ[key]
        else:
            os.environ[key] = value
    gc.collect()
    gc.freeze()
    posix.set_pdeathsig(0)
    return posix.thread_count() == 1 and not has_touched_gpus() and os.getppid() == zygote
