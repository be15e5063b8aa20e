"""What a thread waits in, as the kernel reports it."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest

from leaks import wait_until
from monarch._procs.os.blocked import Blocked, Wait, blocked, process_state


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
        assert seen(poll.poll, lambda: here.send(b"x"), lambda it: it == Blocked(Wait.SOCKET, (there.fileno(),)))


def test_blocked_tells_locks_sleeps_and_work_apart() -> None:
    lock = threading.Lock()
    lock.acquire()
    assert seen(lock.acquire, lock.release, lambda it: it.wait is Wait.OTHER)
    assert seen(lambda: time.sleep(0.5), lambda: None, lambda it: it.wait is Wait.SLEEP)
    going = threading.Event()

    def work() -> None:
        while not going.is_set():
            sum(range(100_000))

    assert seen(work, going.set, lambda it: it.wait is Wait.NONE)
    assert blocked(1).wait is Wait.NONE


def test_blocked_knows_main_thread_of_fork() -> None:
    """Python has the id of the forking process, which is not a thread of the fork."""
    code = (
        "import os, threading, time\nfrom monarch._procs.os.blocked import blocked\n"
        "main = threading.main_thread().ident\npid = os.fork()\n"
        "if pid: os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
        "def look():\n    time.sleep(0.2)\n    os._exit(blocked(main).wait.name != 'SLEEP')\n"
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
