"""``breakpoint()`` in an endpoint of a program: a prompt in its terminal, or a line without one."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROGRAM = """
from monarch.actor import Actor, endpoint, this_host

class Adder(Actor):
    @endpoint
    def add(self, x):
        y = x + 1
        breakpoint()
        z = y * 2
        return z

if __name__ == "__main__":
    mesh = this_host().spawn_procs({"gpus": 2})
    print("sum", mesh.spawn("adder", Adder).add.call(3).get().values(), flush=True)
"""
SOON = 60.0


class Screen:
    """A program in a terminal."""

    def __init__(self, path: Path) -> None:
        self.end, other = pty.openpty()
        command = [sys.executable, str(path)]
        self.process = subprocess.Popen(command, stdin=other, stdout=other, stderr=other, start_new_session=True)
        os.close(other)
        self.text = ""

    def until(self, text: str) -> str:
        """Read until a text comes; return what came up to it."""
        deadline = time.monotonic() + SOON
        while text not in self.text:
            assert time.monotonic() < deadline, self.text
            if select.select([self.end], [], [], 0.1)[0]:
                try:
                    self.text += os.read(self.end, 4096).decode()
                except OSError as error:  # the program has ended
                    raise AssertionError(self.text) from error
        found, _, self.text = self.text.partition(text)
        return found

    def type(self, text: str) -> None:
        """Type a line."""
        os.write(self.end, f"{text}\n".encode())

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait()
        os.close(self.end)


def test_prompt_in_a_terminal(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    screen = Screen(path)
    try:
        # Together, or one after the other on a busy machine.
        seen = ""
        while not {"0", "1"} <= set("".join(re.findall(r"ranks? ([\d-]+): paused \(breakpoint\)", seen))):
            seen += (
                screen.until("paused (breakpoint) at program.py line 8 in add: breakpoint()") + "paused (breakpoint)"
            )
        screen.until("(rank")
        screen.type("rank all")
        screen.until("(ranks 0-1) ")
        screen.type("x, y")
        screen.until("ranks 0-1: (3, 4)")
        screen.type("rank 1")
        screen.until("(rank 1) ")
        screen.type("next")
        screen.until("rank 1: paused at program.py line 9 in add: z = y * 2")
        screen.type("where")
        screen.until("line 9 in add")
        screen.type("rank")
        screen.until("rank 1: selected")
        for line, answer in (
            ("up", "this is the outermost frame"),
            ("l", "->  9          z = y * 2"),
            ("a", "x = 3"),
            ("whatis y", "<class 'int'>"),
            ("stpe", "'stpe' is neither a name nor a command here; help lists the commands"),
            ("no such", "'no such' is not a command here; help lists them"),
            ("y = 10", "\n"),
            ("vars", "y = 10"),
        ):
            screen.until("(rank 1) ")
            screen.type(line)
            screen.until(answer)
        screen.until("(rank 1) ")
        screen.type("")
        screen.until("(rank 1) ")
        screen.type("n")
        screen.until("rank 1: paused at program.py line 10 in add: return z")
        # The step has told it, and it is not told again before the prompt.
        assert "line 10" not in screen.until("(rank 1) ")
        screen.type("rank all")
        screen.until("(ranks 0-1) ")
        screen.type("continue")
        screen.until("[8, 20]")
        assert screen.process.wait(SOON) == 0
    finally:
        screen.close()


def test_a_prompt_follows_each_stop(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    late = "if current_rank().rank: time.sleep(1)\n        breakpoint()"
    text = PROGRAM.replace("import Actor", "import Actor, current_rank").replace("breakpoint()", late)
    path.write_text("import time\n" + text)
    screen = Screen(path)
    try:
        # The ranks that have not come to it yet are paused, or come to it while rank 0 is asked about.
        for rank in (0, 1):
            screen.until(f"rank {rank}: paused (breakpoint)")
            screen.until("\n(rank")
            screen.type("continue")
        screen.until("[8, 8]")
        assert screen.process.wait(SOON) == 0
    finally:
        screen.close()


@pytest.mark.parametrize("end", ["q\n", "exit()\n", "\x04"])
def test_quit_ends_the_program(tmp_path: Path, end: str) -> None:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    screen = Screen(path)
    try:
        screen.until("(rank")
        # The end of the input, as Ctrl-D types it.
        os.write(screen.end, end.encode())
        screen.until("KeyboardInterrupt")
        assert screen.process.wait(SOON) != 0
    finally:
        screen.close()


def test_line_without_a_terminal(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    text = PROGRAM.replace('print("sum"', 'import threading\n    stop = threading.Event()\n    print("sum"')
    path.write_text(
        text.replace(".call(3).get()", ".call(3)").replace(".values()", "")
        + """
    import time
    from monarch._debug.stops import stops
    while not all(each.state == "paused" for each in mesh.where().values()):
        time.sleep(0.01)
    while not stops().now:
        # The program is told as its thread is free, and may end before.
        time.sleep(0.01)
    print(mesh.where().values()[0].reason, mesh.resume().values(), flush=True)
"""
    )
    ran = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=SOON, check=False)
    assert "breakpoint [True, True]" in ran.stdout, ran.stderr
    assert "monarch: rank 0: paused (breakpoint)" in ran.stderr and "mesh.resume()" in ran.stderr
