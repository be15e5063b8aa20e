"""The places of child processes that a rank waits for: forks, and processes that run functions of cells."""

from __future__ import annotations

import linecache
import os
from collections import Counter
from collections.abc import Sequence

from monarch._core.places import is_users_file
from monarch._core.position import Frame
from monarch._procs.os.blocked import children_of
from monarch._procs.os.child_stacks import StackLine, stacks_of
from monarch._procs.os.children import doing_of_child

_MOST = 64
"""Child processes that are asked."""
_SHOWN = 4
"""Most lines."""
_COLLECTIVES = "torch/distributed/distributed_c10d.py"


def child_places() -> tuple[str, ...]:
    """Return where the child processes of this process are, equal places once; those that do not tell are left out."""
    stacks = stacks_of(children_of(os.getpid())[:_MOST])
    places = Counter(text for pid, stack in stacks.items() if (text := place_in_child(pid, stack)))
    lines = [f"{count} child process{'es' if count > 1 else ''} {place}" for place, count in places.most_common(_SHOWN)]
    left = places.total() - sum(count for _, count in places.most_common(_SHOWN))
    return (*lines, f"{left} child processes elsewhere") if left else tuple(lines)


def place_in_child(pid: int, stack: Sequence[StackLine]) -> str:
    """Return where a child process is: the innermost line of the user's code, and its collective or system call."""
    at = next((at for at, line in enumerate(stack) if is_users_file(line.file)), None)
    if at is None:
        return ""
    file, number, function = stack[at]
    operation = next((line.function for line in stack[:at] if line.file.endswith(_COLLECTIVES)), "")
    doing = f"in {operation}" if operation else doing_of_child(pid)
    text = linecache.getline(file, number).strip()
    return f"{doing} at {Frame(file, number, function, text)}".lstrip()
