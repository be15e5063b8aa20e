"""The last rung of Stop, ``%mesh kill``, and the table that shows what ranks do."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest

from kernels import Cell, Notebook
from leaks import Kit

pytestmark = pytest.mark.slow

COMPUTES = "print('runs', flush=True)\nfor _ in range(40): a @ a @ a @ a"
COST = "to kill and restart, press Stop again when no cell runs, or run %mesh kill (variables and actor state are lost)"


@pytest.fixture
def busy(notebook: Notebook, leaks: Kit) -> Iterator[Notebook]:
    """The notebook, with a matrix whose products take seconds, on ranks that may be replaced."""
    notebook.mesh("mine = rank\ntorch.set_num_threads(1)\na = torch.randn(2500, 2500)").ok()
    yield notebook
    if "stopped, but" in notebook.run("%mesh").shown:
        notebook.run("%mesh kill").ok()
    leaks.rebase()


def stopped_in_c(notebook: Notebook) -> Cell:
    """Stop a cell inside a C call on rank 1."""
    cell = notebook.send(f"%%mesh [1]\n{COMPUTES.replace('a @ a @ a @ a', 'torch.linalg.svd(a)')}")
    cell.until(lambda: "runs" in cell.stream())
    notebook.interrupt()
    return cell.wait()


def state_of(notebook: Notebook, rank: int) -> str:
    """Return the row of a rank in the table."""
    return next(line for line in notebook.run("%mesh").ok().shown.splitlines() if line.split()[:1] == [str(rank)])


def test_first_stop_names_the_cost_of_a_second(busy: Notebook) -> None:
    cell = stopped_in_c(busy)
    assert "not stopped yet: rank 1: still inside a C call" in cell.text and COST in cell.text
    assert "KeyboardInterrupt: the notebook no longer waits for the cell, which is still running on rank 1" in cell.text
    assert re.search(r"stopped, but still in cell \[\d+\] line 3, \d+ s", state_of(busy, 1))
    assert state_of(busy, 0).endswith("idle")


def test_stop_at_idle_kills_what_the_first_has_left(busy: Notebook) -> None:
    first = stopped_in_c(busy)
    idle = busy.run("'idle'").ok()
    busy.interrupt()
    place = idle if "replaced" in idle.stream() else first
    busy.take(lambda: "rank 1: replaced by a new process" in first.stream() + idle.stream(), f"no kill: {place.text}")
    busy.run("%mesh").ok()
    assert busy.mesh("'mine' in globals()").ok().shown == "[ranks 0,2-3] True\n[rank 1] False"


def test_stop_of_a_waiting_cell_ends_only_the_wait(busy: Notebook) -> None:
    stopped_in_c(busy)
    waits = busy.send("%%mesh\nmine")
    waits.until(lambda: "waiting for rank 1, still in a C call of cell [" in waits.stream())
    assert "Stop ends only this wait; %mesh kill kills it (its variables are lost)" in waits.stream()
    busy.interrupt()
    waits.wait()
    assert "replaced" not in waits.text and "had not started" in waits.text
    assert "stopped, but still in" in state_of(busy, 1)
    assert "killed rank 1 of mesh 'mesh' (stopped, but still in cell" in busy.run("%mesh kill").ok().stream()


def test_kill_names_what_is_lost_and_brings_new_ranks(busy: Notebook) -> None:
    busy.mesh("def helper(): return 5").ok()
    said = busy.run("%mesh kill 1,3").ok().stream()
    assert "killed ranks 1,3 of mesh 'mesh' (idle)" in said
    assert re.search(r"lost: variables and actor state of ranks 1,3: .*\bmine\b", said)
    assert re.search(r"ranks 1,3 of mesh 'mesh': new processes, with the definitions of \d+ cell", said)
    assert busy.mesh("'mine' in globals(), helper()").ok().shown == "[ranks 0,2] (True, 5)\n[ranks 1,3] (False, 5)"
    # Groups work on the new ranks.
    assert busy.mesh("t = torch.ones(1); dist.all_reduce(t); t.item()").ok().shown == "[ranks 0-3] 4.0"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("9", "%mesh kill: no rank 9; this mesh has ranks 0-3"),
        ("[0:9]", "no ranks 4-8: this mesh has ranks 0 to 3"),
        ("nix", "no mesh named 'nix'; running: mesh"),
        ("", "%mesh kill: no rank of mesh 'mesh' is busy; name the ranks, as in %mesh kill 0,2"),
    ],
)
def test_kill_of_no_rank_is_refused(notebook: Notebook, words: str, text: str) -> None:
    assert text in notebook.run(f"%mesh kill {words}").text


def test_table_shows_what_ranks_run(notebook: Notebook) -> None:
    notebook.mesh("import time\nprint('runs')\ntime.sleep(60)", "[2] --nowait --out handle").ok()
    notebook.take(lambda: re.search(r"busy: cell \[\d+\] line 4, \d+ s$", state_of(notebook, 2)), "no line")
    (shown,) = notebook.run("%mesh").ok().bundles
    assert re.search(r"^rank +pid +memory +(restarts +)?state$", shown["text/plain"], re.M)
    assert re.search(r"^ +0 +\d+ +\d+ MiB .*idle$", shown["text/plain"], re.M)
    assert "<table" in shown["text/html"] and "mesh &#x27;mesh&#x27;: procs=4 (cells run on it)" in shown["text/html"]
    notebook.run("handle.cancel()").ok()


def test_table_shows_no_device_that_cells_have_set(notebook: Notebook) -> None:
    notebook.mesh("class Odd:\n    def __str__(self): raise KeyError\ndevice = Odd() if rank else 'tpu:9'").ok()
    shown = notebook.run("%mesh").ok().shown
    assert "device" not in shown and all(state_of(notebook, rank).endswith("idle") for rank in range(4)), shown
    notebook.mesh("del device").ok()


def test_restarted_rank_is_announced_with_what_it_lost(own: Callable[..., Notebook]) -> None:
    book = own()
    book.run("%mesh up 2 --restart").ok()
    # Only y can be copied, so only y is named.
    book.mesh("import threading\nlock = threading.Lock()\nitems = (n for n in [1])").ok()
    book.mesh("log = open('/dev/null', 'w')\ndef helper(): pass\ny = 3").ok()
    death = book.mesh("import os, signal\nif rank == 1: os.kill(os.getpid(), signal.SIGKILL)")
    assert "--restart replaces rank 1, which loses all variables" in death.text
    text = f"rank 1 of mesh 'mesh' was restarted after cell [{death.reply['execution_count']}] and lost all variables"
    death.until(lambda: text in death.stream())
    kept = "but the definitions of cells (other ranks have y); %mesh heal --copy-from 0 copies them"
    assert f"lost all variables {kept}" in death.stream()
    # Again in the next cell there, and only in that one.
    assert text not in book.mesh("rank", "[0]").ok().text
    assert text in book.mesh("rank", "[1]").ok().stream("stderr")
    assert text not in book.mesh("rank").ok().text
    assert book.run("%mesh").shown.splitlines()[1].split() == ["rank", "pid", "memory", "restarts", "state"]
    assert "copied from rank 0 to rank 1: y\n" in book.run("%mesh heal --copy-from 0").ok().stream()


def test_result_after_a_kill_does_not_advise_to_heal(notebook: Notebook, leaks: Kit) -> None:
    notebook.mesh("import time; time.sleep(1000)", "--nowait --out handle").ok()
    notebook.run("%mesh kill 1").ok()
    text = notebook.run("handle.result()").text
    assert "rank 1 has a new process now; run the cell again" in text and "heal" not in text
    leaks.rebase()
