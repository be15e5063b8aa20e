"""A function that another thread calls at its next step."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

from leaks import wait_until
from monarch._python.thread_trace import Traceable


class Worker:
    """A thread that counts."""

    def __init__(self) -> None:
        self.count = 0
        self.ends = False
        self.thread = threading.Thread(target=self.outer)
        self.thread.start()
        # From here on, it is in no other function than these.
        assert wait_until(lambda: self.count)

    def outer(self) -> None:
        self.traceable = Traceable()
        while not self.ends:
            self.inner()

    def inner(self) -> None:
        for _ in range(100):
            self.count += 1


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker()
    # A garbage collection calls functions of others in any thread.
    gc.disable()
    yield made
    gc.enable()
    made.ends = True
    made.thread.join()


def test_the_thread_calls_it_once_with_its_frame(worker: Worker) -> None:
    for _ in range(200):
        seen: list[tuple[int, str]] = []
        called = threading.Event()

        def call(frame: FrameType, seen: list[Any] = seen, called: threading.Event = called) -> None:
            seen.append((threading.get_ident(), frame.f_code.co_name))
            called.set()

        assert worker.traceable.call_soon(call)
        assert called.wait(5)
        assert seen[0][0] == worker.thread.ident and seen[0][1] in ("outer", "inner")
        before = worker.count
        assert wait_until(lambda before=before: worker.count > before)
        assert len(seen) == 1 and sys.gettrace() is None


def test_the_thread_can_begin_to_trace_itself(worker: Worker) -> None:
    lines: list[str] = []

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        lines.append(event)
        if len(lines) > 10:
            sys.settrace(None)
        return trace

    worker.traceable.call_soon(lambda frame: sys.settrace(trace))
    assert wait_until(lambda: len(lines) > 10)
    assert {"call", "line"} <= set(lines)


def test_many_threads_at_once() -> None:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    workers = [Worker() for _ in range(4)]
    try:
        counts = [0] * len(workers)

        def count(at: int) -> None:
            counts[at] += 1

        until = time.monotonic() + 1.0
        while time.monotonic() < until:
            for at, each in enumerate(workers):
                each.traceable.call_soon(lambda frame, at=at: count(at))
        assert wait_until(lambda: all(counts))
    finally:
        sys.setswitchinterval(before)
        for each in workers:
            each.ends = True
            each.thread.join()


def test_a_traced_thread_runs_while_another_one_is_to_raise() -> None:
    # In Python 3.11, it would run in place at the beginning of the next function, so this is tried in a process.
    script = """
import sys, threading, time
from monarch._python.thread_trace import Traceable, has_raised, may_trace, raise_in

class Raised(KeyboardInterrupt):
    def __init__(self):
        super().__init__()
        has_raised()

def wait():
    waits.set()
    try:
        lock.acquire()
    except Raised:
        pass

def function():
    return 1

waits, lock = threading.Event(), threading.Lock()
lock.acquire()
thread = threading.Thread(target=wait)
thread.start()
waits.wait()
this = Traceable()
sys.settrace(lambda *_: None)
raise_in(thread.ident, Raised)
assert function() == 1
lock.release()
thread.join()
assert may_trace() and function() == 1
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=30)
