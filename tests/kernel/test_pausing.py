"""``%mesh pause``, ``resume``, ``where`` and ``print``: ranks stop at any line, are looked at, and go on."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kernels import ALL, Cell, Notebook
from leaks import wait_until

COUNTS = """import time
def count(until):
    n = 0
    step = rank + 1
    while n < until:
        n += 1
        time.sleep(0.002)
    return n
print('runs')
count({until})"""


@pytest.fixture(autouse=True)
def nothing_is_left_paused(notebook: Notebook) -> Iterator[None]:
    yield
    notebook.run("%mesh resume").ok()
    notebook.run("%mesh interrupt")


def runs(notebook: Notebook, body: str, line: str = "--nowait --out h") -> Cell:
    cell = notebook.mesh(body, line).ok()
    return cell.until(lambda: cell.said().get("runs") == ALL)


def said(notebook: Notebook, line: str) -> str:
    return notebook.run(line).ok().stream("stdout")


def test_ranks_stop_at_a_line_and_go_on_from_there(notebook: Notebook) -> None:
    runs(notebook, COUNTS.format(until=1000))
    text = said(notebook, "%mesh pause")
    assert text.startswith("paused ranks 0-3 of mesh 'mesh'; %mesh resume lets them continue")
    stacks = said(notebook, "%mesh where")
    assert re.search(
        r"paused\n +cell \[\d+\] line \d+ in count: (n \+= 1|time.sleep\(0.002\)|while n < until:)", stacks
    )
    assert re.search(r"cell \[\d+\] line 11: count\(1000\)", stacks)
    assert len(re.findall(r"paused: cell \[\d+\] line \d+; %mesh resume", notebook.run("%mesh").text)) == 4
    there = said(notebook, "%mesh print n")
    assert said(notebook, "%mesh print n") == there
    assert "resumed ranks 0-3" in said(notebook, "%mesh resume")
    assert notebook.run("h.result()").ok().shown.endswith("ranks 0-3: 1000")


def test_expressions_see_the_variables_of_the_line(notebook: Notebook) -> None:
    bad = "class Bad(Exception):\n    def __str__(self):\n        raise ValueError\ndef bad():\n    raise Bad"
    notebook.mesh(bad).ok()
    runs(notebook, COUNTS.format(until=10**9))
    said(notebook, "%mesh pause")
    try:
        assert said(notebook, "%mesh print step").splitlines() == [f"rank {rank}: {rank + 1}" for rank in range(4)]
        assert said(notebook, "%mesh print [step + i for i in range(2)][:1] == [rank + 1]") == "ranks 0-3: True\n"
        assert said(notebook, "%mesh print {'a': until}['a']") == "ranks 0-3: 1000000000\n"
        assert said(notebook, "%mesh print --on [1:3] step * 10").splitlines() == ["rank 1: 20", "rank 2: 30"]
        assert said(notebook, "%mesh print --up 1 'step' in dir()") == "ranks 0-3: False\n"
        assert "the code has 1 caller here, so --up takes at most 1" in said(notebook, "%mesh print --up 2 n")
        assert "rank 0: Bad, whose str() raised (ValueError)" in said(notebook, "%mesh print --on [0] bad()")
        assert said(notebook, "%mesh print missing") == "ranks 0-3: NameError: name 'missing' is not defined\n"
        assert "tensor" in said(notebook, "%mesh print torch.ones(3)").lower()
    finally:
        notebook.run("h.cancel()")


def test_wrong_arguments_are_explained(notebook: Notebook) -> None:
    assert "expected an expression" in notebook.run("%mesh print").text
    assert "is not an expression: invalid syntax" in notebook.run("%mesh print x = 1").text
    assert "all_reduce would wait for other ranks" in notebook.run("%mesh print dist.all_reduce(x)").text
    assert "no rank 9" in notebook.run("%mesh pause 9").text or "9" in notebook.run("%mesh pause 9").text
    assert "no rank of mesh 'mesh' was paused" in said(notebook, "%mesh resume")


def test_interrupt_ends_a_paused_cell_and_its_pause(notebook: Notebook) -> None:
    runs(notebook, COUNTS.format(until=10**9))
    said(notebook, "%mesh pause")
    assert "stopped: ranks 0-3" in said(notebook, "%mesh interrupt")
    assert notebook.mesh("rank * 0").ok().shown == "[ranks 0-3] 0"


def test_idle_rank_stops_at_the_beginning_of_its_next_cell(notebook: Notebook) -> None:
    assert "idle; pauses at the start of its next call" in said(notebook, "%mesh pause 2")
    handle = notebook.mesh("print('runs')\nrank", "--nowait --out h").ok()
    handle.until(lambda: handle.said().get("runs") == {0, 1, 3})
    assert "rank 2: paused" in said(notebook, "%mesh where")
    assert "resumed rank 2" in said(notebook, "%mesh resume")
    notebook.run("h.result()").ok()


def test_others_wait_in_a_collective_for_a_paused_rank(notebook: Notebook) -> None:
    body = "import time\nprint('runs')\nfor i in range(200):\n    time.sleep(0.002)\n    dist.barrier()\ni"
    runs(notebook, body)
    assert "paused rank 1 of" in said(notebook, "%mesh pause mesh[1:2]")
    wait_until(lambda: "dist.barrier()" in said(notebook, "%mesh where [0]"))
    assert said(notebook, "%mesh print --on [1:2] i") == said(notebook, "%mesh print --on [1:2] i")
    said(notebook, "%mesh resume 1")
    assert notebook.run("h.result()").ok().shown.endswith("ranks 0-3: 199")


def test_rank_in_c_pauses_when_the_call_returns(notebook: Notebook, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    body = f"print('runs')\nif rank == 0:\n    text = open('{pipe}').read()\nrank"
    runs(notebook, body)
    pids = notebook.run("%mesh where").ok()
    assert "open(" in pids.stream()
    # A system call that a signal interrupts begins again after the handler, which waits: so it is paused there.
    assert "paused rank 0" in said(notebook, "%mesh pause 0")
    said(notebook, "%mesh resume")
    pipe.write_text("x")
    notebook.run("h.result()").ok()


def test_many_pauses_lose_nothing(notebook: Notebook) -> None:
    runs(notebook, "print('runs')\ntotal = 0\nfor i in range(3_000_000):\n    total += i\ntotal")
    for _ in range(20):
        notebook.run("%mesh pause").ok()
        notebook.run("%mesh resume").ok()
    assert notebook.run("h.result()").ok().shown.endswith(f"ranks 0-3: {sum(range(3_000_000))}")


@pytest.mark.slow
def test_killed_paused_rank_is_replaced(own: Callable[..., Notebook]) -> None:
    book = own()
    book.run("%mesh up --procs 2").ok()
    cell = book.mesh(
        "import os, time\nprint('pid', os.getpid())\nwhile True: time.sleep(0.01)", "--nowait --out h"
    ).ok()
    cell.until(lambda: cell.stream().count("pid") == 2)
    book.run("%mesh pause").ok()
    pid = int(re.findall(r"pid (\d+)", cell.stream())[0])
    os.kill(pid, signal.SIGKILL)
    assert wait_until(lambda: "dead" in book.run("%mesh where").text)
    assert "Error" in book.run("h.result()").text
    book.run("%mesh heal").ok()
    assert book.mesh("rank * 0").ok().shown == "[ranks 0-1] 0"
    book.run("%mesh pause").ok()
    book.run("%mesh restart").ok()
    assert book.mesh("rank * 0").ok().shown == "[ranks 0-1] 0"


@pytest.mark.slow
def test_pause_of_a_restarted_rank_waits_for_the_next_cell(own: Callable[..., Notebook]) -> None:
    """The definitions that a new rank runs first use up no pause."""
    book = own()
    book.run("%mesh up --procs 2 --restart").ok()
    book.mesh("def f():\n    return 1").ok()
    book.mesh("import os\nif rank: os.kill(os.getpid(), 9)")
    assert wait_until(lambda: "rank 1: restarted" in book.run("%mesh who").ok().shown)
    assert "ranks 0-1: idle; pauses at the start" in book.run("%mesh pause").ok().text
    book.mesh("f()", "--nowait --out answer").ok()
    assert wait_until(lambda: "ranks 0-1: paused" in book.run("%mesh where").ok().text)
    book.run("%mesh resume").ok()
    assert book.run("list(answer.result(20).values())").ok().shown == "[1, 1]"


@pytest.mark.slow
def test_rank_that_calls_all_the_time_pauses_in_its_own_code(notebook: Notebook) -> None:
    """Most of its time it is in code of the package, where it is not paused."""
    body = """from monarch.actor import Actor, endpoint, this_proc
class Sum(Actor):
    @endpoint
    def add(self, x):
        return x
adder = this_proc().spawn('adder', Sum)
print('runs')
n = 0
while n < 100_000_000:
    n = adder.add.call_one(n).get() + 1"""
    runs(notebook, body)
    for _ in range(5):
        text = said(notebook, "%mesh pause")
        assert text.startswith("paused ranks 0-3"), text
        assert re.search(r"paused at cell \[\d+\] line \d+: (n = |while )", text), text
        there = said(notebook, "%mesh print n")
        assert said(notebook, "%mesh print n") == there
        said(notebook, "%mesh resume")
    assert said(notebook, "%mesh print n") != there
    notebook.run("h.cancel()")


def test_interrupt_before_a_pause_does_not_pause_cleanup(notebook: Notebook, tmp_path: Path) -> None:
    body = f"""import time
print('runs')
try:
    # In C: the pause is due when it returns.
    dist.barrier() if rank == 0 else time.sleep(1000)
finally:
    open('{tmp_path}/' + str(rank), 'w').write('cleaned up')"""
    runs(notebook, body)
    wait_until(lambda: "barrier" in said(notebook, "%mesh where 0"))
    text = said(notebook, "%mesh pause 0")
    assert "no rank is paused yet" in text and "in a call; pauses when it returns, at cell" in text
    notebook.run("%mesh interrupt")
    assert wait_until(lambda: len(list(tmp_path.iterdir())) == 4)
    assert notebook.mesh("rank * 0").ok().shown == "[ranks 0-3] 0"


def test_expressions_that_interrupt_or_fork_leave_code_paused(notebook: Notebook) -> None:
    runs(notebook, COUNTS.format(until=10**9))
    said(notebook, "%mesh pause")
    there = said(notebook, "%mesh print n")
    assert said(notebook, "%mesh print (_ for _ in ()).throw(KeyboardInterrupt)") == "ranks 0-3: KeyboardInterrupt\n"
    # The child leaves after the expression, for which its parent waits in it.
    forks = "(lambda os: (lambda pid: os.waitpid(pid, 0)[1] if pid else 0)(os.fork()))(__import__('os'))"
    assert said(notebook, f"%mesh print {forks}") == "ranks 0-3: 0\n"
    assert "paused" in said(notebook, "%mesh where") and said(notebook, "%mesh print n") == there
    assert "stopped: ranks 0-3" in said(notebook, "%mesh interrupt")


def test_endpoints_of_actors_pause_and_stop(notebook: Notebook) -> None:
    notebook.run("""import time
from monarch.actor import Actor, endpoint
class Counts(Actor):
    @endpoint
    def count(self, until):
        print('runs')
        n = 0
        while n < until:
            n += 1
            time.sleep(0.002)
        return n
counts = mesh.spawn('counts', Counts)""").ok()
    notebook.run("answer = counts.count.call(10**9)").ok()
    wait_until(lambda: "in count" in said(notebook, "%mesh where"))
    text = said(notebook, "%mesh pause")
    assert text.startswith("paused ranks 0-3") and "in count" in text
    there = said(notebook, "%mesh print n")
    assert said(notebook, "%mesh print n") == there
    assert "stopped: ranks 0-3" in said(notebook, "%mesh interrupt")
    assert "no rank of mesh 'mesh' was paused" in said(notebook, "%mesh resume")
    assert notebook.run("counts.count.call(3).get(timeout=20).values()").ok().shown == "[3, 3, 3, 3]"
    notebook.run("counts.stop().get(); del answer").ok()


@pytest.mark.slow
def test_expressions_that_do_not_end(notebook: Notebook) -> None:
    runs(notebook, COUNTS.format(until=10**9))
    assert "still running after 5 s, alongside the code of the rank" in said(
        notebook, "%mesh print --on [0] __import__('time').sleep(8)"
    )
    assert "an earlier expression is still running here" in said(notebook, "%mesh print --on [0] n")
    said(notebook, "%mesh pause")
    assert "%mesh interrupt ends it" in said(notebook, "%mesh print --on [1] __import__('time').sleep(1000)")
    assert "stopped: ranks 0-3" in said(notebook, "%mesh interrupt")
