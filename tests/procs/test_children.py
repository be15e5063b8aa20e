"""What child processes wait in, and whether any of them runs."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from leaks import wait_until
from monarch._debug.why.child_places import place_in_child
from monarch._procs.os.blocked import process_state
from monarch._procs.os.child_stacks import StackLine, stacks_of
from monarch._procs.os.children import at_other_end, doing_of_child, family_runs, process_runs
from monarch._procs.os.file_locks import holders_in, lock_holders


@contextmanager
def child(code: str, **options: Any) -> Iterator[Any]:
    process = subprocess.Popen([sys.executable, "-S", "-c", code], **options)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_holder_of_a_file_lock_is_found(tmp_path: Path) -> None:
    with open(tmp_path / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        code = f"import fcntl; fcntl.flock(open({str(tmp_path / 'lock')!r}, 'w'), fcntl.LOCK_EX)"
        with child(code) as one, child(code) as other:
            assert wait_until(lambda: lock_holders(one.pid) == (os.getpid(),))
            assert wait_until(lambda: lock_holders(other.pid) == (os.getpid(),))
    assert lock_holders(os.getpid()) == ()


def test_file_lock_without_a_process_has_no_holder() -> None:
    lines = ["1: FLOCK ADVISORY WRITE 7 08:01:5 0 EOF", "2: OFDLCK ADVISORY WRITE -1 08:01:6 0 EOF"]
    assert [*holders_in([*lines, "2: -> OFDLCK ADVISORY WRITE 9 08:01:6 0 EOF"], 9)] == []
    assert [*holders_in([lines[0], "1: -> FLOCK ADVISORY WRITE 9 08:01:5 0 EOF"], 9)] == [7]


def test_waits_of_a_child_are_told() -> None:
    with child("import time; time.sleep(60)") as asleep:
        assert wait_until(lambda: doing_of_child(asleep.pid) == "asleep")
    with child("print('x' * 10**6)", stdout=subprocess.PIPE) as writer:
        assert wait_until(lambda: doing_of_child(writer.pid) == "waiting to write to a pipe")
    with child("input()", stdin=subprocess.PIPE) as reader:
        assert wait_until(lambda: doing_of_child(reader.pid) == "waiting to read from a pipe")
        os.kill(reader.pid, 19)
        assert wait_until(lambda: doing_of_child(reader.pid) == "suspended by a signal")
        os.kill(reader.pid, 18)
    assert doing_of_child(reader.pid) == ""


def test_child_at_the_other_end_of_a_pipe_is_found() -> None:
    with child("import time; time.sleep(60)", stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        pipe = os.readlink(f"/proc/self/fd/{process.stdout.fileno()}")
        found = at_other_end(pipe)
        assert found is not None and found[0] == process.pid and "-c import time" in found[1]
    assert at_other_end(pipe) is None


def test_child_that_computes_is_told_from_one_that_waits() -> None:
    with child("import time; time.sleep(60)") as asleep:
        assert wait_until(lambda: doing_of_child(asleep.pid) == "asleep" and not family_runs())
        with child("while True: pass") as busy:
            assert wait_until(family_runs)
            assert all(family_runs() for _ in range(20)) and doing_of_child(busy.pid) == ""
            assert process_runs(busy.pid) and not process_runs(asleep.pid)


def test_stack_of_a_child_is_served_and_its_call_goes_on() -> None:
    code = """
import os, time
from monarch._procs.os.child_stacks import serve, stacks_of
serve()
def waits():
    os.read(0, 1)
waits()
print("ended")
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with (
        child(code, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env) as served,
        child("import time; time.sleep(60)") as other,
    ):
        assert wait_until(lambda: doing_of_child(served.pid) == "waiting to read from a pipe")
        stacks: dict[int, list[StackLine]] = {}
        # An overloaded machine takes longer than the patience of one request.
        assert wait_until(lambda: stacks.update(stacks_of([served.pid, other.pid])) or stacks)
        assert [(line.function, line.number) for line in stacks[served.pid]] == [("waits", 6), ("<module>", 7)]
        assert stacks.keys() == {served.pid} and other.poll() is None, "a process without a handler is left alone"
        assert served.communicate(b"x", timeout=20)[0] == b"ended\n"


def test_child_that_runs_is_not_asked_for_its_stack() -> None:
    code = """
import sys
from monarch._procs.os.child_stacks import serve
serve()
print("serves", flush=True)
while True:
    pass
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with child(code, stdout=subprocess.PIPE, env=env) as busy:
        assert busy.stdout is not None and busy.stdout.readline() == b"serves\n"
        assert wait_until(lambda: process_state(busy.pid) == "R")
        assert stacks_of([busy.pid]) == {}, "frames of a thread that runs may be half made"


def test_child_that_sleeps_for_moments_is_not_asked() -> None:
    """It may run Python again when the signal comes."""
    code = """
import sys, time
from monarch._procs.os.child_stacks import serve
serve()
print("serves", flush=True)
while True:
    time.sleep(0.001)
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with child(code, stdout=subprocess.PIPE, env=env) as blinks:
        assert blinks.stdout is not None and blinks.stdout.readline() == b"serves\n"
        assert [stacks_of([blinks.pid]) for _ in range(20)] == [{}] * 20


def test_collective_of_a_child_is_told_with_its_line() -> None:
    torch = "/usr/lib/python3/site-packages/torch/distributed"
    stack = [
        StackLine(f"{torch}/distributed_c10d.py", 3137, "all_reduce"),
        StackLine(f"{torch}/c10d_logger.py", 83, "wrapper"),
        StackLine("cell [2]", 9, "train"),
    ]
    assert place_in_child(os.getpid(), stack) == "in all_reduce at cell [2] line 9 in train"
    assert place_in_child(os.getpid(), stack[:2]) == ""
