"""``monarch debug``: a prompt for the ranks of a program that runs, hangs, or is at a breakpoint."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from leaks import wait_until

PROGRAM = """
import sys, time
from pathlib import Path
from monarch.actor import Actor, current_rank, endpoint, this_host

class Trainer(Actor):
    @endpoint
    def train(self, folder):
        step = 0
        while not Path(folder, "end").exists():
            step += 1
            Path(folder, f"steps{current_rank().rank}").write_text(str(step))
            time.sleep(0.01)

    @endpoint
    def look(self, folder):
        x = 20 + current_rank().rank
        breakpoint()
        return x

    @endpoint
    def hang(self, folder):
        import torch.distributed as dist
        from monarch.distributed import group
        group()
        if current_rank().rank == 0:
            dist.barrier()
        while not Path(folder, "end").exists():
            time.sleep(0.01)
        if current_rank().rank == 1:
            dist.barrier()

if __name__ == "__main__":
    what, folder = sys.argv[1:]
    mesh = this_host().spawn_procs({"gpus": 2})
    # Of the same name.
    other = this_host().spawn_procs({"gpus": 1})
    future = getattr(mesh.spawn("trainer", Trainer), what).call(folder)
    print("called", flush=True)
    print("ended", list(future.get().values()), flush=True)
"""


class Program:
    """A program whose ranks run."""

    def __init__(self, folder: Path, what: str) -> None:
        path = folder / "program.py"
        path.write_text(PROGRAM)
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, str(path), what, str(folder)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        assert self.process.stdout is not None and self.process.stdout.readline() == "called\n"

    def steps(self) -> int:
        """Return how far the slower rank is."""
        try:
            return min(int((self.folder / f"steps{rank}").read_text() or 0) for rank in range(2))
        except FileNotFoundError:
            return 0

    def goes_on(self) -> bool:
        """Return whether both ranks make more steps."""
        before = self.steps()
        return wait_until(lambda: self.steps() > before + 2)

    def ended(self) -> str:
        """Let it end, and return what it says."""
        (self.folder / "end").touch()
        return self.process.communicate(timeout=60)[0]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], Program]]:
    begun: list[Program] = []

    def run(what: str) -> Program:
        begun.append(Program(tmp_path, what))
        return begun[-1]

    yield run
    for each in begun:
        each.process.kill()
        each.process.communicate()


def client(pid: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "monarch", "debug", str(pid)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def said(pid: int, *lines: str) -> str:
    """Return what the command says to some lines."""
    return client(pid).communicate("\n".join([*lines, ""]), timeout=60)[0]


def test_running_program_is_paused_looked_at_and_goes_on(start: Callable[[str], Program]) -> None:
    program = start("train")
    assert wait_until(lambda: program.steps() > 0)
    text = said(program.process.pid, "pause", "rank 1", "print step > 0", "next", "where", "rank all", "why", "quit")
    assert ": running at program.py line " in text and ": paused at program.py line " in text and "in train" in text
    assert "(rank 1) rank 1: True" in text
    assert "paused by the debugger" in text
    assert program.goes_on()
    text = said(program.process.pid, "pause", "continue", "next", "no such thing", "rank 7")
    assert "resumed ranks 0-1" in text and "next: ranks 0-1 are not paused" in text
    assert "'no such thing' is not a command here" in text and "no rank 7" in text
    text = said(program.process.pid, "mesh", "mesh procs#2", "mesh procs")
    assert "mesh 'procs': 2 ranks\nmesh 'procs#2': 1 rank\n" in text and "(rank 0) " in text
    assert program.goes_on()
    assert program.ended() == "ended [None, None]\n"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_killed_client_strands_nothing(start: Callable[[str], Program], number: int) -> None:
    program = start("train")
    debugger = client(program.process.pid)
    assert debugger.stdin is not None and debugger.stdout is not None
    debugger.stdin.write("pause\nnext\n")
    debugger.stdin.flush()
    text = ""
    while text.count("paused at") < 2:
        text += os.read(debugger.stdout.fileno(), 4096).decode()
    debugger.send_signal(number)
    debugger.communicate(timeout=20)
    assert program.goes_on()
    assert program.ended() == "ended [None, None]\n"


def test_ranks_at_a_breakpoint_stay_there_when_the_client_quits(start: Callable[[str], Program]) -> None:
    program = start("look")
    assert wait_until(lambda: "rank 1: paused (breakpoint)" in said(program.process.pid, "where"))
    text = said(program.process.pid, "rank 1", "x", "next", "where", "quit")
    assert "rank 1: 21" in text and "rank 1: paused at program.py line" in text
    assert program.process.poll() is None
    lines = ("rank 1", "l", "frame 9", "y = 5", "y", "!l = 6", "vars l", "rank", "exit()")
    text = said(program.process.pid, *lines)
    assert "->" in text and "got 9" in text and "rank 1: 5" in text and "l = 6" in text
    assert "rank 1: selected" in text and "has ended" not in text
    assert "resumed ranks 0-1" in said(program.process.pid, "rank all", "continue")
    assert program.ended() == "ended [20, 21]\n"


def test_hanging_program_is_explained(start: Callable[[str], Program]) -> None:
    program = start("hang")
    assert wait_until(lambda: "in barrier" in said(program.process.pid, "why"))
    assert program.ended() == "ended [None, None]\n"


def test_unknown_process_is_refused_with_a_list(start: Callable[[str], Program]) -> None:
    program = start("train")
    done = subprocess.run([sys.executable, "-m", "monarch", "debug", "1"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "process 1 is not running a mesh; these are:" in done.stderr
    assert f"{program.process.pid}  program.py" in done.stderr
    assert program.ended() == "ended [None, None]\n"
