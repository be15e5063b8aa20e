"""The wait of a thread of this process, as the kernel sees it."""

from __future__ import annotations

import math
import os
import platform
import signal
import struct
import threading
import time
from enum import Enum, auto
from typing import NamedTuple

_POLLFD = struct.Struct("ihh")
_MOST_POLLED = 64
_MOST_SELECTED = 1024
_PF_EXITING = 0x4
_KILLED = 1 << (signal.SIGKILL - 1)
"""SIGKILL among the pending signals of a process."""


class WaitKind(Enum):
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

    wait: WaitKind
    files: tuple[int, ...] = ()
    """Descriptors that it waits for."""


_X86 = {
    WaitKind.SLEEP: {35, 230},
    "file": {0, 42, 43, 45, 47, 288},
    "poll": {7, 271},
    "select": {23, 270},
}
_ARM = {
    WaitKind.SLEEP: {101, 115},
    "file": {63, 202, 203, 207, 212, 242},
    "poll": {73},
    "select": {72},
}
_CALLS = {"x86_64": _X86, "aarch64": _ARM}.get(platform.machine())
"""Numbers of system calls: sleeps; those that wait for the file of their first argument; poll and ppoll; select."""


def blocked(ident: int) -> Blocked:
    """Return what a thread waits in.

    Args:
        ident: the ident of the thread, as ``threading.get_ident`` returns it.
    """
    tid = _tid(ident)
    if tid is None or _CALLS is None:
        return Blocked(WaitKind.NONE)
    number, first, second = _system_call(f"/proc/self/task/{tid}/syscall")
    if number < 0:
        return Blocked(WaitKind.NONE)
    if number in _CALLS["file"]:
        return Blocked(WaitKind.SOCKET, (first,))
    if number in _CALLS["poll"]:
        return Blocked(WaitKind.SOCKET, _polled(first, second))
    if number in _CALLS["select"]:
        return Blocked(WaitKind.SOCKET, _selected(first, second))
    return Blocked(wait_of_call(number))


def wait_of_call(number: int) -> WaitKind:
    """Return the kind of wait of a system call that does not run."""
    if _CALLS is None or number < 0:
        return WaitKind.NONE
    if number in _CALLS[WaitKind.SLEEP]:
        return WaitKind.SLEEP
    return WaitKind.SOCKET if number in _CALLS["file"] | _CALLS["poll"] | _CALLS["select"] else WaitKind.OTHER


def call_number(path: str) -> tuple[int, int]:
    """Return the number of the system call that a thread is in, and its first argument; -1 if it is in none.

    Args:
        path: the path of its file ``syscall`` in /proc.
    """
    return _system_call(path)[:2]


def _system_call(path: str) -> tuple[int, int, int]:
    try:
        with open(path) as file:
            words = file.read().split()
    except OSError:
        return -1, 0, 0
    # The kernel reports "running" for a running thread, and -1 for one that waits outside system calls.
    if len(words) < 3 or words[0].startswith("-"):
        return -1, 0, 0
    return int(words[0]), int(words[1], 16), int(words[2], 16)


def _tid(ident: int) -> int | None:
    if ident == threading.main_thread().ident:
        # In a fork, Python still has the id of the forking process.
        return os.getpid()
    return next((thread.native_id for thread in threading.enumerate() if thread.ident == ident), None)


def _polled(address: int, count: int) -> tuple[int, ...]:
    """Return the descriptors of a poll, from its argument in the memory of this process."""
    data = _memory(address, min(count, _MOST_POLLED) * _POLLFD.size)
    return tuple(number for number, _, _ in _POLLFD.iter_unpack(data) if number >= 0)


def _selected(count: int, address: int) -> tuple[int, ...]:
    """Return the descriptors that a select reads from, from the set of bits in the memory of this process."""
    bits = int.from_bytes(_memory(address, (min(count, _MOST_SELECTED) + 7) // 8), "little") if address else 0
    return tuple(number for number in range(bits.bit_length()) if bits >> number & 1)


def _memory(address: int, size: int) -> bytes:
    """Return memory of this process; nothing if it is gone."""
    try:
        # Read as a file, which fails cleanly.
        memory = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
        try:
            data = os.pread(memory, size, address)
        finally:
            os.close(memory)
    except OSError:
        return b""
    return data if len(data) == size else b""


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


def is_ending(pid: int) -> bool:
    """Return whether a process is on its way out: it exits, or was killed and has not had a CPU since.

    Its letter in /proc is that of a live one until then, which takes long if it has much memory or the machine is busy.
    """
    try:
        with open(f"/proc/{pid}/stat") as file:
            if int(file.read().rpartition(")")[2].split()[6]) & _PF_EXITING:
                return True
        with open(f"/proc/{pid}/status") as file:
            pending = [line.split()[1] for line in file if line.startswith(("SigPnd:", "ShdPnd:"))]
    except (OSError, IndexError, ValueError):
        return False
    return any(int(each, 16) & _KILLED for each in pending)


class CallKind(Enum):
    """Kinds of system calls that wait, beside those of ``WaitKind``."""

    CHILD = auto()
    """Waits for a child process."""
    FILE_LOCK = auto()
    SELECT = auto()
    """Waits for any of several files or sockets."""
    OPEN = auto()
    """Opens a file, which waits for a FIFO or a remote disk."""
    SIGNAL = auto()
    SYNC = auto()
    """Writes a file to its disk."""


_X86_CALLS = {
    CallKind.CHILD: {61, 247},
    CallKind.FILE_LOCK: {72, 73},
    CallKind.SELECT: {232, 281, 441},
    CallKind.OPEN: {2, 257},
    CallKind.SIGNAL: {34, 128, 130},
    CallKind.SYNC: {26, 74, 75, 162, 306},
}
_ARM_CALLS = {
    CallKind.CHILD: {95, 260},
    CallKind.FILE_LOCK: {25, 32},
    CallKind.SELECT: {22, 441},
    CallKind.OPEN: {56},
    CallKind.SIGNAL: {133, 137},
    CallKind.SYNC: {81, 82, 83, 227, 267},
}
_WAITID = (247, 95)
_LEAST_NEGATIVE = 1 << 31
"""From here on, an argument is a negative number."""
_BY_NUMBER = {
    number: call
    for call, numbers in {"x86_64": _X86_CALLS, "aarch64": _ARM_CALLS}.get(platform.machine(), {}).items()
    for number in numbers
}


def system_call(ident: int) -> CallKind | None:
    """Return the kind of the system call that a thread is in; None for others, or if it is in none.

    Args:
        ident: the ident of the thread, as ``threading.get_ident`` returns it.
    """
    return kind_of_call(call_number(f"/proc/self/task/{_tid(ident)}/syscall")[0])


def awaited_child(ident: int) -> int:
    """Return the pid of the child that a thread in ``CallKind.CHILD`` waits for; 0 for any child or if unknown."""
    number, first, second = _system_call(f"/proc/self/task/{_tid(ident)}/syscall")
    if kind_of_call(number) is not CallKind.CHILD:
        return 0
    # waitid takes the pid after the kind of it.
    pid = second if number in _WAITID else first
    return pid if 0 < pid < _LEAST_NEGATIVE else 0


def kind_of_call(number: int) -> CallKind | None:
    """Return the kind of a system call by its number; None for others."""
    return _BY_NUMBER.get(number)


def cpu_of_family() -> float:
    """Return the CPU seconds that this process and its descendants have used, those that have ended included.

    On an overloaded machine, time that this process has been ready to use counts too.
    """
    times = os.times()
    # A compiler may be many short processes.
    seconds = time.process_time() + cpu_shares(os.getpid())[1] + times.children_user + times.children_system
    left = children_of(os.getpid())
    for _ in range(_MOST_POLLED):
        if not left:
            break
        pid = left.pop()
        try:
            with open(f"/proc/{pid}/stat") as file:
                fields = file.read().rpartition(")")[2].split()
            # Its own time, and that of its children that have ended.
            seconds += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK") + cpu_shares(pid)[1]
        except (OSError, ValueError):
            continue
        left += children_of(pid)
    return seconds


def children_of(pid: int) -> list[int]:
    """Return the child processes of a process."""
    found: list[int] = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children") as file:
                found += map(int, file.read().split())
    except (OSError, ValueError):
        pass
    return found


def other_program(pid: int) -> str:
    """Return the name of the program that has replaced Python in a rank of this host by ``exec``; empty if none has.

    Args:
        pid: of the rank; its program was that of this process.
    """
    try:
        own, now = os.path.realpath("/proc/self/exe"), os.readlink(f"/proc/{pid}/exe")
    except OSError:
        return ""
    return "" if os.path.basename(now).startswith("python") or now == own else os.path.basename(now)
