"""Orphans: descendants of dead ranks, found by a marker that survives setsid, double forks and exec with a clean
environment.

The marker is a resource limit, since nothing else is inherited in all of these cases and readable by other processes:
the soft limit of real-time CPU time holds the pid and start time of the rank, as a number of microseconds too large to
limit anything. A process whose rank is dead is an orphan, whoever looks and whichever session it belonged to.
"""

from __future__ import annotations

import os
import resource
import signal
import time
from contextlib import suppress
from functools import cache

from monarch._procs.os.posix import proc_start_time

TRACKER_GRACE = 5.0
"""Seconds that cleanup processes, such as multiprocessing's resource tracker, have to finish."""
_FLAG = 1 << 62
# Kernel pids never exceed 2 ** 22.
_PID_BITS = 22
_START_BITS = 62 - _PID_BITS
_SLOW_TRACKER = b"torch_shm_manager"
"""It waits for 2 s before it removes the shared memory of dead processes; nobody waits for that."""
_TRACKERS = (b"multiprocessing.resource_tracker", _SLOW_TRACKER)
_PAUSE = 0.005
_seen: dict[int, float] = {}
"""When this process first saw each orphaned tracker; used by the one thread that ends orphans here."""


def mark_rank() -> None:
    """Mark this process and its future descendants as those of a rank, which is this process."""
    pid = os.getpid()
    # Without a marker, orphans in a group of their own end with the session, as children of the agent.
    if can_mark():
        _set(_FLAG | pid << _START_BITS | (proc_start_time(pid) or 0))


@cache
def can_mark() -> bool:
    """Return whether descendants of this process can carry a marker."""
    limits = resource.getrlimit(resource.RLIMIT_RTTIME)
    try:
        # Set to its current value, so nothing changes; some sandboxes lack this limit.
        resource.setrlimit(resource.RLIMIT_RTTIME, limits)
    except (OSError, ValueError):
        return False
    return limits[1] == resource.RLIM_INFINITY


def unmark() -> None:
    """Remove an inherited marker: this process must outlive the rank that it descends from."""
    if rank_of(os.getpid()) is not None:
        _set(resource.RLIM_INFINITY)


def _set(limit: int) -> None:
    resource.setrlimit(resource.RLIMIT_RTTIME, (limit, resource.RLIM_INFINITY))


def rank_of(pid: int) -> tuple[int, int] | None:
    """Return the pid and start time of the rank that a process descends from or is.

    None for other processes, and for those that cannot be read.
    """
    try:
        limit = resource.prlimit(pid, resource.RLIMIT_RTTIME)[0]
    except (OSError, ValueError):
        return None
    if limit < 0 or not limit & _FLAG:
        return None
    value = limit ^ _FLAG
    return value >> _START_BITS, value & ((1 << _START_BITS) - 1)


def find_orphans() -> list[int]:
    """Return the pids of this user's processes whose rank is dead, in this PID namespace."""
    alive: dict[tuple[int, int], bool] = {}
    user, namespace = os.geteuid(), _namespace("self")
    orphans: list[int] = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        rank = rank_of(int(name))
        if rank is None:
            continue
        if rank not in alive:
            alive[rank] = proc_start_time(rank[0]) == rank[1]
        # In another namespace the pid of the marker means another process, so its rank is unknown.
        if not alive[rank] and _owner(name) == user and _namespace(name) == namespace and proc_start_time(int(name)):
            orphans.append(int(name))
    return orphans


def end_orphans() -> list[int]:
    """Kill orphans until there are no more, except cleanup processes, which get TRACKER_GRACE.

    Returns:
        Pids of those that were spared; call this again while there are some.
    """
    # A process may fork while /proc is read, so one empty scan is not enough.
    quiet, spared = 0, list[int]()
    killed: set[int] = set()
    while quiet < 2:
        orphans = find_orphans()
        spared = _young_trackers(orphans)
        fresh = [pid for pid in orphans if pid not in spared and pid not in killed]
        for pid in fresh:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        killed.update(fresh)
        quiet = 0 if fresh else quiet + 1
    return spared


def _young_trackers(orphans: list[int]) -> list[int]:
    """Return the orphans that are cleanup processes with time left."""
    now = time.monotonic()
    since = {pid: _seen.get(pid, now) for pid in orphans if is_tracker(pid)}
    _seen.clear()
    _seen.update(since)
    return [pid for pid, when in since.items() if now - when < TRACKER_GRACE]


def end_orphans_in_time() -> None:
    """Kill orphans, and wait for quick cleanup processes. Takes no time if there are none."""
    while any(not is_slow_tracker(pid) for pid in end_orphans()):
        time.sleep(_PAUSE)


def end_descendants() -> None:
    """Kill and reap all descendants of this process, which must be their subreaper; trackers as above."""
    deadline = time.monotonic() + TRACKER_GRACE
    while descendants := [pid for pid in children(os.getpid()) if not is_slow_tracker(pid)]:
        spared = [pid for pid in descendants if is_tracker(pid)] if time.monotonic() < deadline else []
        for pid in descendants:
            if pid not in spared:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for pid in descendants:
            # One by one: when a child ends, its own children become ours, and are not killed yet.
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG if pid in spared else 0)
        if spared and len(spared) == len(descendants):
            time.sleep(_PAUSE)


def children(pid: int, thread: int = 0) -> list[int]:
    """Return the children of a process that its main thread, or the one of this native id, has forked or adopted."""
    try:
        with open(f"/proc/{pid}/task/{thread or pid}/children") as file:
            return [int(child) for child in file.read().split()]
    except OSError:
        return []


def is_tracker(pid: int) -> bool:
    """Return whether a process cleans up after dead ones and then ends by itself."""
    command = _command(pid)
    return any(name in command for name in _TRACKERS)


def is_slow_tracker(pid: int) -> bool:
    """Return whether its cleanup takes seconds that nobody needs to wait for."""
    return _SLOW_TRACKER in _command(pid)


def _command(pid: int) -> bytes:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read()
    except OSError:
        return b""


def _owner(name: str) -> int:
    try:
        return os.stat(f"/proc/{name}").st_uid
    except OSError:
        return -1


def _namespace(name: str) -> str:
    try:
        return os.readlink(f"/proc/{name}/ns/pid")
    except OSError:
        return ""
