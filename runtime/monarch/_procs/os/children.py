"""The child processes of this process: what one waits in, and those at the other end of a pipe."""

from __future__ import annotations

import os
import platform

from monarch._procs.os.blocked import (
    CallKind,
    WaitKind,
    call_number,
    children_of,
    kind_of_call,
    process_state,
    wait_of_call,
)

_MOST = 256
"""Descendants that are looked at."""
_LONGEST = 60
"""Characters that are shown of a command."""
_READS, _WRITES = {"x86_64": (0, 1), "aarch64": (63, 64)}.get(platform.machine(), (-1, -1))
_STATES = {
    "T": "suspended by a signal",
    "t": "stopped by a debugger",
    "Z": "dead",
    "X": "dead",
    "D": "waiting for a disk",
}
_IN_CALL = {
    CallKind.CHILD: "waiting for a child process of its own",
    CallKind.FILE_LOCK: "waiting for a file lock",
    CallKind.OPEN: "opening a file",
    CallKind.SYNC: "flushing a file to disk",
}


def doing_of_child(pid: int) -> str:
    """Return what a child process waits in, as in ``asleep``; empty if it runs, or that cannot be seen."""
    state = process_state(pid)
    if state in _STATES:
        return _STATES[state]
    if not state or state == "R":
        return ""
    path = f"/proc/{pid}/syscall"
    number, first = call_number(path)
    if number in (_READS, _WRITES):
        verb = "read from" if number == _READS else "write to"
        return f"waiting to {verb} {_file(pid, first)}"
    if kind_of_call(number) in _IN_CALL:
        return _IN_CALL[kind_of_call(number) or CallKind.CHILD]
    return "asleep" if wait_of_call(number) is WaitKind.SLEEP else ""


def _file(pid: int, number: int) -> str:
    link = _link(f"/proc/{pid}/fd/{number}")
    kind = link.partition(":")[0]
    if kind == "pipe":
        return "a pipe"
    return "a socket" if kind == "socket" else "a terminal" if link.startswith("/dev/") else "a file"


def family_runs() -> bool:
    """Return whether a thread of a descendant runs at this moment, or is ready to, or waits for a disk.

    Threads of this process count if they wait for a disk. A share of the CPU would not tell on an overloaded machine,
    or in a container that is throttled.
    """
    if "D" in _states_of(os.getpid()):
        return True
    left = children_of(os.getpid())
    for _ in range(_MOST):
        if not left:
            return False
        pid = left.pop()
        if process_runs(pid):
            return True
        left += children_of(pid)
    return False


def process_runs(pid: int) -> bool:
    """Return whether a thread of a process runs at this moment, or is ready to, or waits for a disk."""
    return any(state in ("R", "D") for state in _states_of(pid))


def _states_of(pid: int) -> list[str]:
    """Return the states of the threads of a process; none if it is gone."""
    found: list[str] = []
    try:
        tasks = os.listdir(f"/proc/{pid}/task")[:_MOST]
    except OSError:
        return found
    for task in tasks:
        try:
            with open(f"/proc/{pid}/task/{task}/stat") as file:
                found.append(file.read().rpartition(")")[2].split()[0])
        except (OSError, IndexError):
            continue
    return found


def only_child() -> int:
    """Return the pid of the only child of this process; 0 if it has none or several."""
    children = children_of(os.getpid())
    return children[0] if len(children) == 1 else 0


def child_named(pid: int) -> str:
    """Return a child process as text: its command, or that it is a fork; empty for 0."""
    command = command_of(pid) if pid else ""
    if not command:
        return ""
    return f"a fork of this process (pid {pid})" if command == command_of(os.getpid()) else f"{command} (pid {pid})"


def at_other_end(pipe: str) -> tuple[int, str] | None:
    """Return the pid and command of a descendant that has a pipe open; None if no descendant has.

    Args:
        pipe: its link in /proc, as in ``pipe:[123]``.
    """
    left = children_of(os.getpid())
    for _ in range(_MOST):
        if not left:
            return None
        pid = left.pop(0)
        try:
            numbers = os.listdir(f"/proc/{pid}/fd")
        except OSError:
            continue
        if any(_link(f"/proc/{pid}/fd/{number}") == pipe for number in numbers):
            return pid, command_of(pid)
        left += children_of(pid)
    return None


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def command_of(pid: int) -> str:
    """Return the command of a process, shortened; empty if it is gone."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            text = " ".join(file.read(4096).decode(errors="replace").split("\0")).strip()
    except OSError:
        return ""
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def suspended_zygotes(agent: int) -> list[int]:
    """Return the pids of an agent's zygotes, and of their forks that begin, if a signal or a debugger suspends them."""
    known = [pid for pid in children_of(agent) if _is_zygote(pid)]
    forks = [pid for zygote in known for pid in children_of(zygote) if _is_zygote(pid)]
    return [pid for pid in [*known, *forks] if process_state(pid) in ("T", "t")]


def _is_zygote(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/comm") as file:
            return file.read().startswith("monarch-zygote")
    except OSError:
        return False
