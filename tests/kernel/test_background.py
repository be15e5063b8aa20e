"""Background cells and forgotten calls: cells that wait for them say so."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from kernels import ALL, Cell, Notebook, tells_in
from leaks import Kit

pytestmark = pytest.mark.slow

WAITS = "import os, time\nprint('runs')\nwhile not os.path.exists('{0}'): time.sleep(0.01)\n"
SWALLOWS = """
import signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
print('runs')
while True:
    try: sum(range(1000))
    except BaseException: pass
"""
ACTORS = """
from monarch.actor import Actor, endpoint
class Works(Actor):
    def __init__(self): self.count = 0
    @endpoint
    def inc(self):
        self.count += 1
        return self.count
    @endpoint
    def loop(self):
        print('runs', flush=True)
        while True: pass
    @endpoint
    def sleep(self):
        import time
        print('runs', flush=True)
        from monarch._actors import interruptible
        interruptible._sleep(1000)
    @endpoint
    def swallow(self):
        import time
        print('runs', flush=True)
        while True:
            try: time.sleep(0.1)
            except KeyboardInterrupt: pass
"""


@pytest.fixture(autouse=True)
def same_ranks(notebook: Notebook, leaks: Kit) -> Iterator[None]:
    """Do not count replaced ranks as leaks."""
    yield
    notebook.run("1").ok()
    leaks.rebase()


@pytest.fixture(scope="module")
def book(notebook: Notebook) -> Iterator[Notebook]:
    notebook.run(f"%%mesh spawn works\n{ACTORS}").ok()
    yield notebook


def background(notebook: Notebook, body: str, line: str = "--nowait --out h") -> Cell:
    """Return a background cell, once it runs on all ranks."""
    cell = notebook.mesh(body, line).ok()
    return cell.until(lambda: cell.said().get("runs") == ALL)


def updates(cell: Cell) -> str:
    """Return the updates of the displays of a cell."""
    return "\n".join(each["data"]["text/plain"] for each in cell.contents("update_display_data"))


COST = (
    "; to kill and restart, press Stop again when no cell runs, or run %mesh kill (variables and actor state are lost)"
)


def said_by_stop(cell: Cell) -> str:
    """Return what the last Stop has said in a cell."""
    *_, line = [
        line for line in cell.stream("stderr").splitlines() if line.startswith(("stopped:", "not stopped yet:"))
    ]
    return line


def test_background_cell_shows_its_end(notebook: Notebook, tmp_path: Path) -> None:
    cell = background(notebook, WAITS.format(tmp_path / "go") + "rank")
    assert "running on ranks 0-3" in cell.shown and not updates(cell)
    (tmp_path / "go").touch()
    cell.until(lambda: ": finished" in updates(cell))
    assert notebook.run("list(h.result().values())").ok().shown == "[0, 1, 2, 3]"
    assert ": finished" in notebook.run("h").ok().shown


def test_background_cell_shows_its_failure(notebook: Notebook) -> None:
    cell = notebook.mesh("1 / rank", "--nowait").ok()
    cell.until(lambda: ": failed" in updates(cell) and "ZeroDivisionError" in cell.stream("stderr"))
    assert "rank 0: ZeroDivisionError: division by zero\n      cell [" in cell.stream("stderr")


def test_idle_stop_names_the_background_cell(notebook: Notebook) -> None:
    cell = background(notebook, "print('runs')\nwhile True: pass")
    last = notebook.run("1").ok()
    notebook.interrupt()
    last.until(lambda: "h.cancel() ends it" in last.stream("stderr"))
    assert re.search(r"cell \[\d+\] \(--nowait\) is still running on ranks 0-3", last.stream("stderr"))
    waits = notebook.send(f"{tells_in('result')}\nh.result()")
    waits.until(lambda: "waits" in waits.stream())
    notebook.interrupt()
    waits.wait()
    assert waits.reply["ename"] == "KeyboardInterrupt"
    assert "is still running on ranks 0-3; h.cancel() ends it" in waits.text
    assert notebook.run("h.done").ok().shown == "False"
    assert "ranks 0-3: interrupted" in notebook.run("h.cancel()").ok().shown
    cell.until(lambda: ": stopped" in updates(cell))


def test_cell_behind_a_background_cell_is_stopped_alone(notebook: Notebook) -> None:
    first = background(notebook, "kept = 7\nprint('runs')\nwhile True: pass")
    behind = notebook.send("%%mesh\nprint('behind')\nrank")
    behind.until(lambda: "waiting for cell [" in behind.stream("stderr"))
    assert re.search(
        r"ranks 0-3: waiting for cell \[\d+\] \(--nowait\), still running; .*h.cancel\(\)",
        behind.stream("stderr"),
    )
    notebook.interrupt()
    behind.wait()
    line = said_by_stop(behind)
    assert "ranks 0-3: had not started; cell [" in line and "continues; h.cancel() ends it" in line
    assert "behind" not in behind.stream("stdout") and not behind.shown
    assert notebook.run("h.done").ok().shown == "False" and not updates(first)
    assert "interrupted" in notebook.run("h.cancel()").ok().shown
    assert notebook.mesh("kept").ok().shown == "[ranks 0-3] 7"


def test_many_background_cells_are_one_line(notebook: Notebook, tmp_path: Path) -> None:
    go = tmp_path / "go"
    first = notebook.mesh(WAITS.format(go), "--nowait --out h0").ok()
    for number in range(1, 6):
        notebook.mesh("7", f"--nowait --out h{number}").ok()
    behind = notebook.send("%%mesh\nrank")
    behind.until(lambda: behind.stream("stderr").endswith("\n"))
    assert re.fullmatch(
        r"ranks 0-3: waiting for cell \[\d+\] \(--nowait\) and 5 more from cells \d+-\d+, still running; "
        r"Stop ends only this wait; call .cancel\(\) on a handle \(h0, ..., h5\) to end its cell\n",
        behind.stream("stderr"),
    )
    notebook.interrupt()
    behind.wait()
    last = notebook.run("1").ok()
    notebook.interrupt()
    last.until(lambda: "to end its cell" in last.stream("stderr"))
    assert last.stream("stderr").count("\n") == 1
    go.touch()
    assert notebook.run("h5.result(); h0.done").ok().shown == "True"
    first.until(lambda: ": finished" in updates(first))


def test_background_cell_that_ignores_interrupts_is_replaced(notebook: Notebook) -> None:
    background(notebook, SWALLOWS)
    text = notebook.run("h.cancel()").ok().text
    assert "C call" not in text and "replaced by new processes (ignored interrupts); their variables" in text
    assert notebook.mesh("world_size").ok().shown == "[ranks 0-3] 4"


@pytest.mark.parametrize("again", ["works.inc.call().get()", "%%mesh works\nself.count"])
def test_actor_inside_c_is_replaced_by_a_second_stop(book: Notebook, again: str) -> None:
    book.mesh("kept = 7").ok()
    cell = book.send("works.slice(procs=1).sleep.call().get()")
    cell.until(lambda: cell.said().get("runs") == {1})
    book.interrupt()
    cell.wait()
    assert "rank 1: still inside a C call" in said_by_stop(cell) and COST in said_by_stop(cell)
    waits = book.send(again)
    waits.until(lambda: "rank 1: waiting for works[" in waits.stream("stderr"))
    assert "was stopped but is still running; Stop ends only this wait; %mesh kill" in waits.stream("stderr")
    assert "variables and actor state are lost" in waits.stream("stderr")
    book.interrupt()
    assert "rank 1: had not started" in said_by_stop(waits.wait())
    # The kernel is idle now, so the next Stop kills.
    book.interrupt()
    waits.until(lambda: "rank 1: replaced by a new process" in waits.stream("stderr"))
    line = said_by_stop(waits)
    assert "rank 1: replaced by a new process (ignored interrupts); its variables and actor state are lost" in line
    book.run("works.inc.call().get()").ok()
    assert book.mesh("'kept' in globals()").ok().shown.splitlines() == ["[ranks 0,2-3] True", "[rank 1] False"]


def test_actor_ignoring_interrupts_is_replaced_by_second_stop(book: Notebook) -> None:
    cell = book.send("works.slice(procs=2).swallow.call().get()")
    cell.until(lambda: cell.said().get("runs") == {2})
    book.interrupt()
    assert f"rank 2: still running; ignored each interrupt{COST}" in said_by_stop(cell.wait())
    waits = book.send("works.inc.call().get()")
    waits.until(lambda: "rank 2: waiting for" in waits.stream("stderr"))
    book.interrupt()
    assert "rank 2: had not started" in said_by_stop(waits.wait())
    assert "killed rank 2" in book.run("%mesh kill").ok().stream()
    book.run("works.inc.call().get()").ok()


def test_forgotten_call_is_named_and_stopped_with_later_calls(book: Notebook) -> None:
    first = book.run("forgotten = works.loop.call()").ok()
    first.until(lambda: first.said().get("runs") == ALL)
    waits = book.send("works.inc.call().get()")
    waits.until(lambda: "ranks 0-3: waiting for works.loop(), called in cell [" in waits.stream("stderr"))
    assert "still running" in waits.stream("stderr") and "Stop ends it too" in waits.stream("stderr")
    book.interrupt()
    line = said_by_stop(waits.wait())
    assert "ranks 0-3: interrupted" in line and "also stopped works.loop(), called in cell [" in line
    assert book.run("forgotten.done").ok().shown == "True"
    book.run("works.inc.call().get()").ok()
