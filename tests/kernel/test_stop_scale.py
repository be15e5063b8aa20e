"""Stop of many silent ranks: one deadline for any number."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kernels import Notebook
from leaks import wait_until
from monarch._core.stop_ladder import BOUND
from monarch._procs.os.blocked import process_state

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

MULTIPLE = 3.0
"""Extra time for the ladder here, where all these processes share the cores."""
RECORD = """
from monarch_kernel.calls import stop_run as stop
class Recorded(stop.StopLadder):
    def begin(self, now):
        self.times = [now]
        ladders.append(self)
        return super().begin(now)
    def tick(self, now):
        commands = super().tick(now)
        self.times.append(now)
        return commands
ladders = []
stop.StopLadder = Recorded
"""
SILENT = """
import ctypes, os, signal
name = f"{PATH}/{rank}-{os.getpid()}"
open(name, "w").close()
if rank % 2:
    os.kill(os.getpid(), signal.SIGSTOP)
else:
    # Waiting for a lock in C with the GIL held: no signal ends that, and it uses no CPU.
    lock = ctypes.create_string_buffer(64)
    ctypes.PyDLL(None).pthread_mutex_lock(lock)
    ctypes.PyDLL(None).pthread_mutex_lock(lock)
"""


def waits(name: str) -> bool:
    """Return whether the rank that wrote this file has stopped working."""
    rank, _, pid = name.partition("-")
    return process_state(int(pid)) == ("T" if int(rank) % 2 else "S")


@pytest.mark.parametrize("ranks", [96, 256])
def test_stop_of_many_silent_ranks_has_one_deadline(own: Callable[..., Notebook], tmp_path: Path, ranks: int) -> None:
    book = own()
    book.guard = 200.0
    begun = time.perf_counter()
    book.run(f"%mesh up --procs {ranks}").ok()
    up = time.perf_counter() - begun
    book.run(RECORD).ok()
    cell = book.send(f"%%mesh\nPATH = {str(tmp_path)!r}\n{SILENT}")
    assert wait_until(lambda: len(os.listdir(tmp_path)) == ranks, 100)
    assert wait_until(lambda: all(map(waits, os.listdir(tmp_path))), 100)
    begun = time.perf_counter()
    book.interrupt()
    cell.wait()
    seconds = time.perf_counter() - begun
    (line,) = [line for line in cell.stream("stderr").splitlines() if line.startswith("not stopped yet:")]
    # Each names its own pid.
    assert line.count("suspended by a signal") == ranks // 2
    assert line.count("inside a C call that holds the GIL") == 1 and "interrupt" not in line
    took = float(book.run("print(ladders[-1].times[-1] - ladders[-1].times[0])").ok().stream())
    print(f"up {up:.2f} s, ladder {took:.2f} s, cell {seconds:.2f} s")
    assert took < MULTIPLE * BOUND and seconds < MULTIPLE * 2.0
    # The second stop replaces all, and announces it within the same bound.
    book.run("%mesh down").ok()
    assert wait_until(lambda: not any(process_state(int(name.partition("-")[2])) for name in os.listdir(tmp_path)), 20)
