"""After a death in a cell, the reports about the other ranks are true."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from kernels import ALL, Cell, Notebook
from leaks import Kit

pytestmark = pytest.mark.slow


@pytest.fixture
def mortal(notebook: Notebook, leaks: Kit) -> Iterator[Notebook]:
    """The notebook, for tests that replace a rank."""
    yield notebook
    notebook.run("%mesh heal").ok()
    leaks.rebase()


def cell_with_a_death(notebook: Notebook, body: str) -> Cell:
    """Run a cell on all ranks, and kill rank 1 in the middle of it."""
    pid = int(notebook.mesh("import os\nos.getpid()", "[1]").ok().shown.rpartition(" ")[2])
    cell = notebook.send(f"%%mesh\nimport time\nprint('runs')\n{body}")
    cell.until(lambda: cell.said().get("runs") == ALL)
    os.kill(pid, signal.SIGKILL)
    return cell.wait()


def test_death_in_a_collective_names_only_the_dead(mortal: Notebook) -> None:
    mortal.mesh("dist.barrier()").ok()
    cell = cell_with_a_death(mortal, "if rank == 0: time.sleep(1000)\ndist.all_reduce(torch.ones(1))")
    assert "ranks 0-1" not in cell.text and "the death of ranks" not in cell.text
    assert "rank 1: SupervisionError: the process" in cell.text
    assert re.search(r"ranks? 0[^:]*: Interrupted: interrupted because rank 1 died", cell.text)
    assert mortal.mesh("rank", "[0]").ok().shown == "[rank 0] 0"


def test_where_names_the_death_rather_than_connections(mortal: Notebook) -> None:
    pid = int(mortal.mesh("dist.barrier()\nimport os\nos.getpid()").ok().shown.splitlines()[1].rpartition(" ")[2])
    mortal.mesh("import time\ntime.sleep(1000) if rank == 1 else dist.barrier()", "--nowait --out handle").ok()
    mortal.take(lambda: "ranks 0,2-3 in barrier" in mortal.run("%mesh why").ok().text, "no wait in the barrier")
    os.kill(pid, signal.SIGKILL)
    assert "a collective was aborted because rank 1 died" in mortal.run("handle.result()").text
    text = mortal.run("%mesh where").ok().text
    # Either the collective or the whole group is named, by what a rank has learned first.
    assert re.search(r"^ranks? 0.*: failed \(GroupError: .*rank 1", text) and "Connection" not in text, text


def test_death_quotes_no_stderr_of_earlier_cells(mortal: Notebook) -> None:
    mortal.mesh("import os, sys\nprint('old', file=sys.stderr)").ok()
    cell = mortal.mesh("os.kill(os.getpid(), 9)", "[1]")
    assert "SIGKILL" in cell.text and "last lines" not in cell.text
    mortal.run("%mesh heal").ok()
    cell = mortal.mesh("import sys\nprint('new', file=sys.stderr)\nos.abort()", "[1]")
    assert "last lines of stderr of rank 1:\n    new" in cell.text


def test_last_prints_of_a_dead_rank_are_in_its_cell(mortal: Notebook) -> None:
    cell = mortal.mesh("import os, sys\nprint('last')\nprint('words', file=sys.stderr)\nif rank == 1: os._exit(3)")
    assert cell.said()["last"] == ALL and cell.said()["words"] == ALL
    assert mortal.run("%mesh heal").ok().said().keys().isdisjoint({"last", "words"})
    notes = "import faulthandler, os\nfaulthandler.enable()\nos.kill(os.getpid(), 11)"
    cell = mortal.mesh(notes, "[1]")
    assert 'of rank 1:\n    Fatal Python error: Segmentation fault\n      File "cell [' in cell.text


def test_death_reports_computing_ranks_as_interrupted(mortal: Notebook) -> None:
    mortal.mesh("log = []").ok()
    cell = cell_with_a_death(mortal, "for k in range(10**6):\n    time.sleep(0.01)\n    log.append(k)")
    assert "goes on" not in cell.text
    assert "ranks 0,2-3: Interrupted: interrupted because rank 1 died" in cell.text
    before = mortal.mesh("len(log)", "[0]").ok().shown
    assert mortal.mesh("len(log)", "[0]").ok().shown == before


def test_queued_cell_of_a_mesh_with_a_death_does_not_run(mortal: Notebook, tmp_path: Path) -> None:
    """Survivors drop a cell that had not begun when it was reported as interrupted."""
    pid = int(mortal.mesh("import os\nos.getpid()", "[1]").ok().shown.rpartition(" ")[2])
    first = mortal.mesh("import os, time\npid = os.getpid()\nprint('runs')\ntime.sleep(600)", "--nowait --out h").ok()
    first.until(lambda: first.said().get("runs") == ALL)
    cell = mortal.send(f"%%mesh\nopen(f'{tmp_path}/{{rank}}', 'w').close()")
    cell.until(lambda: "waiting for cell [" in cell.stream("stderr"))
    os.kill(pid, signal.SIGKILL)
    cell.wait()
    assert "ranks 0,2-3: Interrupted" in cell.text
    mortal.run("%mesh heal").ok()
    assert mortal.mesh("world_size").ok().shown == "[ranks 0-3] 4"
    assert not list(tmp_path.iterdir())


STUBBORN = """
if rank == 2:
    while True:
        try: time.sleep(1000)
        except KeyboardInterrupt: pass
time.sleep(1000)
"""


def test_survivor_that_does_not_end_is_named_and_ended_by_stop(mortal: Notebook) -> None:
    cell = cell_with_a_death(mortal, STUBBORN)
    assert "ranks 0,3: Interrupted: interrupted because rank 1 died\n" in cell.text
    assert "rank 2: Interrupted: interrupted because rank 1 died, but still running; Stop interrupts again" in cell.text
    mortal.run("%mesh heal").ok()
    assert re.search(r"^ +2 .*busy: cell \[\d+\] line \d+", mortal.run("%mesh").ok().shown, re.M)
    waits = mortal.send("%%mesh\nrank")
    waits.until(lambda: "rank 2: waiting for cell [" in waits.stream())
    assert "Stop ends it too" in waits.stream()
    mortal.interrupt()
    waits.wait()
    assert "rank 2: replaced by a new process (ignored interrupts)" in waits.text, waits.text
    assert mortal.mesh("rank * 0").ok().shown == "[ranks 0-3] 0"


def test_stop_at_idle_ends_what_a_death_has_left(mortal: Notebook) -> None:
    cell = cell_with_a_death(mortal, STUBBORN)
    mortal.run("%mesh heal").ok()
    idle = mortal.run("'idle'").ok()
    mortal.interrupt()
    mortal.take(lambda: "rank 2: replaced by a new process" in cell.stream() + idle.stream(), "no new process")
    assert mortal.mesh("rank * 0").ok().shown == "[ranks 0-3] 0"
