"""What a thread waits in, as the kernel reports it."""

from __future__ import annotations

import math
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest

from leaks import wait_until
from monarch._procs.os.blocked import (
    Blocked,
    WaitKind,
    blocked,
    cpu_of_family,
    cpu_shares,
    is_ending,
    process_state,
    ran_on_cpu,
)


def seen(work: Callable[[], object], end: Callable[[], object], what: Callable[[Blocked], bool]) -> bool:
    """Check that a thread is seen to wait this way; then end it."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        return wait_until(lambda: what(blocked(thread.ident or 0)))
    finally:
        end()
        thread.join(20)
        assert not thread.is_alive()


def test_blocked_names_socket_of_read_and_poll() -> None:
    here, there = socket.socketpair()
    with here, there:
        assert seen(lambda: there.recv(1), lambda: here.send(b"x"), lambda it: it.files == (there.fileno(),))
        poll = select.poll()
        poll.register(there, select.POLLIN)
        reads = [there.fileno()]
        assert seen(lambda: select.select(reads, [], []), lambda: here.send(b"x"), lambda it: it.files == tuple(reads))
        there.recv(9)
        assert seen(poll.poll, lambda: here.send(b"x"), lambda it: it == Blocked(WaitKind.SOCKET, (there.fileno(),)))


def test_blocked_tells_locks_sleeps_and_work_apart() -> None:
    lock = threading.Lock()
    lock.acquire()
    assert seen(lock.acquire, lock.release, lambda it: it.wait is WaitKind.OTHER)
    assert seen(lambda: time.sleep(0.5), lambda: None, lambda it: it.wait is WaitKind.SLEEP)
    going = threading.Event()

    def work() -> None:
        while not going.is_set():
            sum(range(100_000))

    assert seen(work, going.set, lambda it: it.wait is WaitKind.NONE)
    assert blocked(1).wait is WaitKind.NONE


def test_blocked_knows_main_thread_of_fork() -> None:
    """Python has the id of the forking process, which is not a thread of the fork."""
    code = (
        "import os, threading, time\nfrom monarch._procs.os.blocked import blocked\n"
        "main = threading.main_thread().ident\npid = os.fork()\n"
        "if pid: os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
        "def look():\n    for _ in range(2000):\n        if blocked(main).wait.name == 'SLEEP': os._exit(0)\n"
        "        time.sleep(0.01)\n    os._exit(1)\n"
        "threading.Thread(target=look).start()\ntime.sleep(20)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.parametrize(("number", "letter"), [(19, "T"), (18, "S")])
def test_process_state_matches_the_kernel(number: int, letter: str) -> None:
    process = subprocess.Popen(["sleep", "60"])
    try:
        os.kill(process.pid, number)
        assert wait_until(lambda: process_state(process.pid) == letter)
    finally:
        process.kill()
        process.wait()
    assert process_state(process.pid) == ""


def test_killed_process_is_ending_before_it_is_gone() -> None:
    for _ in range(5):
        code = "import time; data = bytearray(b'x') * (100 << 20); print(flush=True); time.sleep(60)"
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None and process.stdout.readline() == b"\n"
            assert not is_ending(process.pid)
            process.kill()
            # Twice, since the kernel takes the signal a moment before it notes the exit.
            assert is_ending(process.pid) or is_ending(process.pid)
        assert not is_ending(process.pid)


def test_cpu_times_are_those_of_one_thread() -> None:
    idle, main = threading.Event(), threading.main_thread().ident or 0
    thread = threading.Thread(target=idle.wait)
    thread.start()
    try:
        before = ran_on_cpu(main), ran_on_cpu(thread.ident or 0)
        used = time.thread_time()
        while time.thread_time() - used < 0.1:
            pass
        assert ran_on_cpu(main) - before[0] >= 0.09
        assert ran_on_cpu(thread.ident or 0) - before[1] < 0.05
    finally:
        idle.set()
        thread.join()
    assert ran_on_cpu(thread.ident or 0) == math.inf


def test_two_processes_on_one_cpu_wait_for_it() -> None:
    """A suspended process does not wait for a CPU; two that share one do, in turn."""
    one = min(os.sched_getaffinity(0))
    code = f"import os\nos.sched_setaffinity(0, [{one}])\nwhile True: pass"
    processes = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
    try:
        assert wait_until(lambda: all(min(cpu_shares(process.pid)) > 0.2 for process in processes))
        for process in processes:
            process.send_signal(signal.SIGSTOP)
        assert wait_until(lambda: all(process_state(process.pid) == "T" for process in processes))
        before = [cpu_shares(process.pid) for process in processes]
        assert not wait_until(lambda: [cpu_shares(process.pid) for process in processes] != before, 0.2)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert cpu_shares(processes[0].pid) == (0.0, 0.0)


def test_cpu_of_children_that_have_ended_counts() -> None:
    before = cpu_of_family()
    for _ in range(3):
        subprocess.run([sys.executable, "-c", "import time\nwhile time.process_time() < 0.3: pass"], check=True)
    assert cpu_of_family() - before >= 0.8
