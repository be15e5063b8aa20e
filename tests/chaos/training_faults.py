"""Random faults: processes are killed and suspended, connections and links are cut."""

from __future__ import annotations

import os
import random
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from monarch._node.current import current_node

Undo = Callable[[], object]
"""Ends a lasting fault."""


def family() -> dict[int, str]:
    """Name of each process that this one has started, or that those have."""
    parents: dict[int, int] = {}
    names: dict[int, str] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with suppress(OSError, ValueError):
                head, _, rest = Path("/proc", entry, "stat").read_text().rpartition(")")
                state, parent = rest.split()[:2]
                if state not in "ZX":
                    parents[int(entry)], names[int(entry)] = int(parent), head.partition("(")[2]
    # The agent of this host is the fork server's child; it has claimed the session's folder.
    agents = {int(path.name.split("-")[1]) for path in Path(current_node().folder).glob("pid-*-*")} & names.keys()
    found = {pid: names[pid] for pid in agents}
    ours = {os.getpid(), *agents}
    while True:
        new = {pid for pid, parent in parents.items() if parent in ours} - ours
        if not new:
            return found
        ours |= new
        found |= {pid: names[pid] for pid in new}


def find(what: str) -> list[int]:
    """Pids of all ranks, zygotes or agents of this program."""
    ours = family()
    if what == "rank":
        return sorted(pid for pid, name in ours.items() if name.startswith("t") and "[" in name)
    return sorted(pid for pid, name in ours.items() if name == f"monarch-{what}")


class Faults:
    """Causes one fault after the other, and undoes temporary ones in time.

    Args:
        chance: decides everything.
        deck: kinds of faults, each as often as it occurs in one shuffle.
        own: kinds that depend on the place of the program, by name; each may return the delay and function to undo it.
        progress: returns the number of steps done.
        tell: called with each fault.
    """

    def __init__(
        self,
        chance: random.Random,
        deck: list[str],
        own: dict[str, Callable[[random.Random], tuple[float, Undo] | None]],
        progress: Callable[[], int],
        tell: Callable[[str], object],
    ) -> None:
        self.chance, self.tell = chance, tell
        self.deck, self.own = deck, own
        self.progress = progress
        self.done: Counter[str] = Counter()
        self._open: list[tuple[float, Undo]] = []

    def run(self, end: threading.Event) -> None:
        """Run until the end is set; then everything suspended resumes."""
        left: list[str] = []
        try:
            while not end.is_set():
                left = left or self.chance.sample(self.deck, len(self.deck))
                self._do(left.pop())
                # Sometimes while the program still handles the previous one.
                self._wait(end, self.progress() + self.chance.choice([0, 0, 1, 3, 10, 10]), self.chance.random() * 0.3)
        finally:
            for _, undo in self._open:
                undo()
            self._open.clear()

    def _wait(self, end: threading.Event, steps: int, seconds: float) -> None:
        begun = time.monotonic()
        longest = begun + 6.0
        while not end.wait(0.01):
            now = time.monotonic()
            for each in [each for each in self._open if each[0] <= now]:
                self._open.remove(each)
                each[1]()
            if now - begun >= seconds and (self.progress() >= steps or now > longest):
                return

    def _do(self, what: str) -> None:
        self.tell(f"fault: {what}")
        kind, _, how = what.partition(" ")
        if kind in self.own:
            lasting = self.own[kind](self.chance)
            if lasting is not None:
                self._open.append((time.monotonic() + lasting[0], lasting[1]))
            self.done[what] += 1
            return
        pids = find(kind)
        self.chance.shuffle(pids)
        for pid in pids[: 2 if how == "twice" else 1]:
            with suppress(ProcessLookupError):
                if how.startswith("stopped"):
                    longest = 7.0 if how.endswith("long") else 0.8
                    os.kill(pid, signal.SIGSTOP)
                    until = time.monotonic() + (longest if longest > 1 else longest * self.chance.random())
                    self._open.append((until, lambda pid=pid: go_on(pid)))
                else:
                    os.kill(pid, self.chance.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSEGV]))
                self.done[what] += 1


def go_on(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def cut_connection(chance: random.Random) -> None:
    """Ends one of the connections that this process has with agents of other hosts."""
    ours: list[socket.socket] = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                ours.append(socket.socket(fileno=os.dup(int(name))))
    with suppress(OSError, IndexError):
        connected = [each for each in ours if each.family == socket.AF_INET and _peer(each)]
        chance.choice(connected).shutdown(socket.SHUT_RDWR)
    for each in ours:
        each.close()


def _peer(found: socket.socket) -> Any:
    try:
        return found.getpeername()
    except OSError:
        return None
