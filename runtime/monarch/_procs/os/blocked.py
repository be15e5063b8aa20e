"""The wait of a thread of this process, as the kernel sees it."""

from __future__ import annotations

import math
import os
import platform
import struct
import threading
from enum import Enum, auto
from typing import NamedTuple

_POLLFD = struct.Struct("ihh")
_MOST_POLLED = 64


class Wait(Enum):
    """Kinds of waits."""

    NONE = auto()
    """It runs, or its state cannot be seen."""
    SLEEP = auto()
    """A sleep, which ends by itself."""
    SOCKET = auto()
    """Files or sockets."""
    OTHER = auto()
    """A lock, another thread, a child process."""


class Blocked(NamedTuple):
    """The wait of a thread."""

    wait: Wait
    files: tuple[int, ...] = ()
    """Descriptors that it waits for."""


_X86 = {
    Wait.SLEEP: {35, 230},
    "file": {0, 42, 43, 45, 47, 288},
    "poll": {7, 271},
}
_ARM = {
    Wait.SLEEP: {101, 115},
    "file": {63, 202, 203, 207, 212, 242},
    "poll": {73},
}
_CALLS = {"x86_64": _X86, "aarch64": _ARM}.get(platform.machine())
"""Numbers of system calls: sleeps; those that wait for the file of their first argument; poll and ppoll."""


def blocked(ident: int) -> Blocked:
    """Return what a thread waits in.

    Args:
        ident: of the thread, as ``threading.get_ident`` returns it.
    """
    tid = _tid(ident)
    if tid is None or _CALLS is None:
        return Blocked(Wait.NONE)
    try:
        with open(f"/proc/self/task/{tid}/syscall") as file:
            words = file.read().split()
    except OSError:
        return Blocked(Wait.NONE)
    # The kernel reports "running" for a running thread, and -1 for one that waits outside system calls.
    if len(words) < 3 or words[0].startswith("-"):
        return Blocked(Wait.NONE)
    number, first, second = int(words[0]), int(words[1], 16), int(words[2], 16)
    if number in _CALLS[Wait.SLEEP]:
        return Blocked(Wait.SLEEP)
    if number in _CALLS["file"]:
        return Blocked(Wait.SOCKET, (first,))
    if number in _CALLS["poll"]:
        return Blocked(Wait.SOCKET, _polled(first, second))
    return Blocked(Wait.OTHER)


def _tid(ident: int) -> int | None:
    if ident == threading.main_thread().ident:
        # In a fork, Python still has the id of the forking process.
        return os.getpid()
    return next((thread.native_id for thread in threading.enumerate() if thread.ident == ident), None)


def _polled(address: int, count: int) -> tuple[int, ...]:
    """Return the descriptors of a poll, from its argument in the memory of this process."""
    count = min(count, _MOST_POLLED)
    try:
        # Read as a file, which fails cleanly if the memory is gone.
        memory = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
        try:
            data = os.pread(memory, count * _POLLFD.size, address)
        finally:
            os.close(memory)
    except OSError:
        return ()
    if len(data) != count * _POLLFD.size:
        return ()
    return tuple(number for number, _, _ in _POLLFD.iter_unpack(data) if number >= 0)


def ran_on_cpu(ident: int) -> float:
    """Return the CPU seconds of a thread of this process; infinity if they are unknown."""
    try:
        with open(f"/proc/self/task/{_tid(ident)}/schedstat") as file:
            return int(file.read().split()[0]) * 1e-9
    except (OSError, IndexError, ValueError):
        return math.inf


def cpu_shares(pid: int) -> tuple[float, float]:
    """Return the seconds for which the main thread of a process had a CPU, and those for which it was ready and had
    none; zeros if they are unknown.
    """
    try:
        with open(f"/proc/{pid}/schedstat") as file:
            ran, waited = file.read().split()[:2]
            return int(ran) * 1e-9, int(waited) * 1e-9
    except (OSError, ValueError):
        return 0.0, 0.0


def process_state(pid: int) -> str:
    """Return the state of a process as its letter in /proc, such as ``T`` for a suspended one; empty if it is gone."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
