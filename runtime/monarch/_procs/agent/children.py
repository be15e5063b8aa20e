"""The procs of one host: who asked for them, how they died, and who watches them."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable

from monarch._core.causes import Cause, CellRef, Exited, Signaled, Stopped
from monarch._procs.os.blocked import cpu_shares, is_ending, process_state
from monarch._procs.os.oom import OomWatch
from monarch._procs.os.orphans import can_mark
from monarch._procs.os.shared_files import full_shared_memory, remove_torn
from monarch._procs.rank.cell_marker import Last
from monarch._procs.rank.output import brief, limit, read_tail, relieve
from monarch._procs.session_folder import host_of
from monarch._wire.messages import Dead

_REMEMBERED = 20_000
"""How many deaths an agent remembers."""
_TAIL = 65536
"""Bytes of each output stream that are sent with a death to its watchers."""
_LAST_WORDS = 4 << 20
"""Bytes of unsent output of a dead proc that still reach the program: its end."""

_ENDED = ("", "Z", "X")
"""Letters of ``/proc/PID/stat`` for processes that have ended."""


def cause_of(status: int) -> Exited | Signaled:
    """Return the cause for an exit status of ``os.waitpid``."""
    if os.WIFSIGNALED(status):
        return Signaled(os.WTERMSIG(status))
    return Exited(os.waitstatus_to_exitcode(status))


class ChildProc:
    """A proc of this host."""

    __slots__ = ("cause", "fds", "grace", "killed", "owner", "pid", "proc", "stopping", "title")

    def __init__(self, proc: str, owner: str, title: str, fds: tuple[int, int]) -> None:
        self.proc = proc
        self.owner = owner
        self.title = title
        self.fds = fds
        self.pid = 0
        self.stopping = False
        self.grace = 0.0
        """Seconds of grace that it has asked for when stopped."""
        self.killed = False
        self.cause: Cause | None = None
        """Why the agent killed it."""

    def kill(self, cause: Cause | None = None) -> None:
        """Kill it now; its descendants follow when it is reaped."""
        self.killed = True
        self.cause = self.cause or cause
        if self.pid:
            # It may be so young that it has no group of its own yet.
            _kill_group(self.pid)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, signal.SIGKILL)


def _kill_group(pid: int) -> None:
    """Kill the group of a rank whose descendants have no marker that the agent could find them by."""
    if not can_mark():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)


class Children:
    """All procs that the agent has started.

    Args:
        last: returns, once, the last marker of a dead proc.
    """

    def __init__(self, last: Callable[[str], Last] = lambda proc: Last(None, False)) -> None:
        self._last = last
        self._oom = OomWatch()
        self.by_proc: dict[str, ChildProc] = {}
        self._by_pid: dict[int, ChildProc] = {}
        # Exit statuses that came before the zygote reported which proc has which pid.
        self._early: dict[int, int] = {}
        self._dead: OrderedDict[str, Dead] = OrderedDict()
        self._watchers: dict[str, set[str]] = {}
        self._owned: dict[str, set[str]] = {}
        self.last_words: list[tuple[str, str, int, bytes]] = []
        """Output of dead procs, before their tails: proc, stream, offset, bytes."""

    def add(self, child: ChildProc) -> None:
        """Add a requested proc; it has no pid yet."""
        self.by_proc[child.proc] = child
        self._owned.setdefault(child.owner, set()).add(child.proc)
        self.watch(child.owner, child.proc)

    def started(self, proc: str, pid: int) -> Dead | None:
        """Note that it was forked; return its death, if it has ended already."""
        child = self.by_proc[proc]
        child.pid = pid
        if pid in self._early:
            return self._end(child, self._early.pop(pid))
        self._by_pid[pid] = child
        if child.killed:
            child.kill()
        return None

    def failed(self, proc: str, cause: Cause) -> Dead | None:
        """Note that it could not be started."""
        child = self.by_proc.get(proc)
        return self._gone(child, cause) if child else None

    def ended(self, pid: int, status: int) -> Dead | None:
        """Note that a child process has ended; return its death, or None if it is no known proc yet."""
        child = self._by_pid.pop(pid, None)
        if child is None:
            self._early[pid] = status
            return None
        return self._end(child, status)

    def take_early(self, pid: int) -> bool:
        """Return, once, whether an unknown process with this pid has ended."""
        return self._early.pop(pid, None) is not None

    def forget_early(self) -> None:
        """No fork is under way, so an unknown process that ended was an orphan, not a proc."""
        self._early.clear()

    def _end(self, child: ChildProc, status: int) -> Dead:
        _kill_group(child.pid)
        cause: Cause = self._seen(cause_of(status))
        remove_torn(child.pid)
        last = self._last(child.proc)
        if last.stopped and not child.killed:
            # The owner tells a rank and its agent at once, so the rank may end before its agent learns of it.
            child.stopping, cause = True, Stopped()
        if child.killed and child.cause is not None:
            cause = child.cause
        return self._gone(child, cause, last.place if not child.stopping else None, last.stderr)

    def _seen(self, cause: Exited | Signaled) -> Cause:
        """Return a cause with what the system knows about it."""
        match cause:
            case Signaled(signal.SIGKILL) if self._oom.has_struck():
                return Signaled(cause.signal, out_of_memory=True)
            case Signaled(signal.SIGBUS):
                return Signaled(cause.signal, full_shm=full_shared_memory())
            case _:
                return cause

    def _gone(self, child: ChildProc, cause: Cause, at: CellRef | None = None, since: int = 0) -> Dead:
        now = time.time()
        # No code of the agent changes it, but where output was dropped.
        quiet = max(0.0, now - os.fstat(child.fds[1]).st_mtime)
        tails: list[tuple[str, int, bytes]] = []
        for stream, fd in zip(("stdout", "stderr"), child.fds, strict=True):
            chunk = read_tail(fd, _LAST_WORDS)
            if chunk.data:
                cut = max(0, len(chunk.data) - _TAIL)
                tails.append((stream, chunk.offset + cut, chunk.data[cut:]))
                if cut:
                    self.last_words.append((child.proc, stream, chunk.offset, chunk.data[:cut]))
            os.close(fd)
        del self.by_proc[child.proc]
        self._owned.get(child.owner, set()).discard(child.proc)
        dead = Dead(child.proc, cause, child.stopping, tails, now, at, since, quiet)
        self._dead[child.proc] = Dead(child.proc, cause, child.stopping, brief(tails), now, at, since, quiet)
        if len(self._dead) > _REMEMBERED:
            self._dead.popitem(last=False)
        return dead

    def watch(self, watcher: str, proc: str) -> Dead | None:
        """Add a watcher of a proc; return the proc's death if it has died."""
        if proc in self._dead:
            return self._dead[proc]
        self._watchers.setdefault(proc, set()).add(watcher)
        return None

    def death_of(self, proc: str) -> Dead | None:
        """Return how a proc died; None if it did not."""
        return self._dead.get(proc)

    def watchers(self, proc: str) -> set[str]:
        """Remove and return the watchers of a proc."""
        return self._watchers.pop(proc, set())

    def watched_on(self, host: str) -> list[str]:
        """Return the watched procs of a host, or the one proc if it is watched."""
        return [proc for proc in self._watchers if proc == host or proc.startswith(f"{host}/")]

    def has_ties(self, host: str) -> bool:
        """Return whether a proc here and one of another host may have sent each other something: one watches the
        other first."""
        return bool(self.watched_on(host)) or any(
            host_of(watcher) == host for watchers in self._watchers.values() for watcher in watchers
        )

    def pids(self) -> set[int]:
        """Return the pids of live procs."""
        return set(self._by_pid)

    def owned_by(self, owner: str) -> list[ChildProc]:
        """Return the procs that were started for another one and end with it."""
        return [self.by_proc[proc] for proc in self._owned.pop(owner, ()) if proc in self.by_proc]

    def relieve(self) -> bool:
        """Limit the output that procs do not send themselves; return whether one of them is far behind."""
        most = limit()
        held = [relieve(fd, most) for child in self.by_proc.values() for fd in child.fds]
        return max(held, default=0) > most

    def kill_all(self) -> None:
        """Kill all of them now."""
        for child in self.by_proc.values():
            child.kill()

    def get(self, procs: Iterable[str]) -> list[ChildProc]:
        """Return the live ones."""
        return [self.by_proc[proc] for proc in procs if proc in self.by_proc]

    def states(self, procs: Iterable[str]) -> dict[str, tuple[str, int, float, float]]:
        """Return the state of each process, as its letter in /proc, its pid, and its seconds with and without a CPU.

        The letter of one that was killed or exits is ``X``, as once it is dead.
        """
        started = [child for child in self.get(procs) if child.pid]
        return {child.proc: (_state(child.pid), child.pid, *cpu_shares(child.pid)) for child in started}

    def ended_of(self, procs: Iterable[str]) -> list[str]:
        """Return those of some procs that have ended, reaped or not."""
        return [proc for proc in procs if proc in self._dead or self._has_ended(proc)]

    def _has_ended(self, proc: str) -> bool:
        child = self.by_proc.get(proc)
        return child is not None and bool(child.pid) and _state(child.pid) in _ENDED


def _state(pid: int) -> str:
    letter = process_state(pid)
    return "X" if letter not in ("", "Z", "X") and is_ending(pid) else letter
