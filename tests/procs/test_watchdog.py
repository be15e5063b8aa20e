"""Commands that take back what was asked of an engine, at the end of a program."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from leaks import wait_until
from monarch._procs.launch.watchdog import Watchdog

FORKED = """
import os, signal, sys
from monarch._procs.launch.watchdog import Watchdog
made = Watchdog(f"echo $word > {sys.argv[1]}", "job 7")
child = os.fork()
if not child:
    signal.pause()
if sys.argv[2] == "killed":
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.kill(os.getpid(), signal.SIGKILL)
made.end(20, "now")
made.end(20, "again")
# The child still has the pipe.
assert os.waitpid(child, os.WNOHANG) == (0, 0)
os.kill(child, signal.SIGKILL)
os.waitpid(child, 0)
"""


@pytest.mark.parametrize("how", ["ended", "killed"])
def test_command_runs_also_while_a_fork_of_the_program_lives(tmp_path: Path, how: str) -> None:
    out = tmp_path / "out"
    done = subprocess.run([sys.executable, "-c", FORKED, str(out), how], capture_output=True, text=True, timeout=60)
    assert done.returncode == (-9 if how == "killed" else 0) and not done.stderr, done.stderr
    assert wait_until(lambda: out.exists() and out.read_text() == ("\n" if how == "killed" else "now\n"), 10)


def test_failure_of_the_command_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    Watchdog("echo no rights >&2; exit 3", "job 7").end(20)
    assert capsys.readouterr().err == "monarch: job 7 may still be running; the command to end it failed: no rights\n"
    Watchdog("exit 3", "job 7").end(20)
    assert "failed: code 3\n" in capsys.readouterr().err
    Watchdog("exit 3", "job 7").end(20, report=False)
    Watchdog("exit 0", "job 7").end(20)
    assert not capsys.readouterr().err


def test_command_that_does_not_end_is_killed_with_its_children(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "pid"
    Watchdog(f"sleep 1000 & echo $! > {out}; wait", "job 7").end(1)
    assert "no answer in 1 s" in capsys.readouterr().err
    assert wait_until(lambda: not os.path.exists(f"/proc/{out.read_text().strip()}"), 10)
