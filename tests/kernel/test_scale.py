"""A classroom: many sessions at once."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from leaks import Kit, processes, session_folders, wait_until

SESSIONS = 16
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

CLASSROOM = """
import os, sys
from monarch.actor import Actor, endpoint, this_host
class A(Actor):
    @endpoint
    def add(self, number):
        return number + int(os.environ["NUMBER"])
print("ready", flush=True)
sys.stdin.readline()
actors = this_host().spawn_procs({"gpus": 4}).spawn("a", A)
print(*actors.add.call(int(os.environ["NUMBER"])).get(100).values(), flush=True)
sys.stdin.readline()
print(*actors.add.call(1).get(100).values(), flush=True)
"""


def test_sessions_at_once_answer_and_clean_up(leaks: Kit) -> None:
    before, folders = processes(), session_folders()
    programs = [
        subprocess.Popen(
            [sys.executable, "-c", CLASSROOM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "NUMBER": str(number)},
        )
        for number in range(SESSIONS)
    ]
    try:
        assert [_next(program) for program in programs] == ["ready\n"] * SESSIONS
        for program in programs:
            _go(program)
        # All run at the same time, and each gets only the output of its own ranks.
        assert [_next(each) for each in programs] == [f"{2 * n} {2 * n} {2 * n} {2 * n}\n" for n in range(SESSIONS)]
        for program in programs:
            _go(program)
        assert [_next(each) for each in programs] == [f"{n + 1} {n + 1} {n + 1} {n + 1}\n" for n in range(SESSIONS)]
        assert [each.wait(60) for each in programs] == [0] * SESSIONS
    finally:
        for program in programs:
            program.kill()
            program.communicate()
    assert wait_until(lambda: processes().keys() <= before.keys() and session_folders() <= folders, 10)


def _go(program: subprocess.Popen[str]) -> None:
    assert program.stdin is not None
    program.stdin.write("\n")
    program.stdin.flush()


def _next(program: subprocess.Popen[str]) -> str:
    assert program.stdout is not None
    return program.stdout.readline()
