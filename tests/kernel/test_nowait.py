"""Cells that the notebook does not wait for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kernels import ALL, Notebook

WAITS = "import os, time\nprint('runs')\nwhile not os.path.exists('{0}'): time.sleep(0.01)\n"


@pytest.fixture
def go(tmp_path: Path) -> Path:
    """A file that cells wait for."""
    return tmp_path / "go"


def test_nowait_cell_does_not_block_the_notebook(notebook: Notebook, go: Path) -> None:
    cell = notebook.mesh(WAITS.format(go) + "rank * 2", "--nowait --out handle").ok()
    assert "running on ranks 0-3" in cell.shown
    assert notebook.run("handle.done").ok().shown == "False"
    late = notebook.run("handle.result(0.01)")
    assert late.status == "error" and "did not finish within 0.01 s" in late.reply["evalue"]
    go.touch()
    assert notebook.run("list(handle.result().values())").ok().shown == "[0, 2, 4, 6]"
    assert notebook.run("handle.done, handle is _mesh").ok().shown == "(True, True)"
    # Its output is in its own cell.
    cell.until(lambda: cell.said().get("runs") == ALL)


def test_handle_can_be_awaited(notebook: Notebook, go: Path) -> None:
    notebook.mesh(WAITS.format(go) + "rank", "[0,3] --nowait --out handle").ok()
    go.touch()
    assert notebook.run("list((await handle).values())").ok().shown == "[0, 3]"


@pytest.mark.parametrize("ask", ["handle.result()", "handle.get()", "await handle"])
def test_handle_raises_the_error_of_its_cell(notebook: Notebook, ask: str) -> None:
    notebook.mesh("if rank == 1: raise KeyError('boom')", "--nowait --out handle").ok()
    cell = notebook.run(ask)
    assert cell.reply["ename"] == "MeshCellError" and "rank 1: KeyError: 'boom'" in cell.text


@pytest.mark.parametrize("stop", ["interrupt", "cancel"])
def test_nowait_cell_can_be_cancelled(notebook: Notebook, stop: str) -> None:
    cell = notebook.mesh("kept = 1\nprint('runs')\nwhile True: pass", "--nowait --out handle").ok()
    cell.until(lambda: cell.said().get("runs") == ALL)
    assert "ranks 0-3: interrupted" in notebook.run(f"handle.{stop}()").ok().shown
    assert notebook.run("handle.result()").status == "error"
    assert notebook.mesh("kept").ok().shown == "[ranks 0-3] 1"


def test_nowait_cell_with_one_interrupted_rank_was_stopped(notebook: Notebook) -> None:
    body = "print('runs')\nif rank == 1:\n    while True: pass\ndist.barrier()"
    cell = notebook.mesh(body, "--nowait --out handle").ok()
    cell.until(lambda: cell.said().get("runs") == ALL)
    notebook.run("%mesh interrupt 1").ok()
    assert "ranks 0,2-3 waited for it in a collective" in notebook.run("handle.result()").text
    assert notebook.run("handle").ok().shown.endswith(": stopped>")


LATE = """
import signal
def late(*_):
    n = 0
    while n < 20_000_000: n += 1  # longer than a stop waits before it frees ranks
    raise KeyboardInterrupt
if rank == 1:
    before = signal.signal(signal.SIGINT, late)
    try:
        print('runs')
        while True: pass
    finally:
        signal.signal(signal.SIGINT, before)
print('runs')
dist.barrier()
"""


def test_late_stop_of_a_rank_keeps_the_groups_of_others(notebook: Notebook) -> None:
    cell = notebook.mesh(LATE, "--nowait --out handle").ok()
    cell.until(lambda: cell.said().get("runs") == ALL)
    notebook.run("%mesh interrupt 1").ok()
    text = notebook.run("handle.result()").text
    assert "ranks 0,2-3 waited for it in a collective" in text and "Connection closed" not in text


def test_later_cells_wait_only_for_ranks_of_a_nowait_cell(notebook: Notebook, go: Path) -> None:
    notebook.mesh(WAITS.format(go), "[0] --nowait --out handle").ok()
    assert notebook.mesh("rank", "[2]").ok().shown == "[rank 2] 2"
    behind = notebook.send("%%mesh\n'behind'")
    go.touch()
    assert behind.wait().ok().shown == "[ranks 0-3] 'behind'"


@pytest.fixture
def pair(own: Callable[..., Notebook]) -> Notebook:
    """A notebook with a mesh of two ranks."""
    book = own()
    book.run("%mesh up --procs 2").ok()
    return book


@pytest.mark.parametrize("size", [1, 3])
def test_result_has_the_ranks_the_cell_was_sent_to(pair: Notebook, go: Path, size: int) -> None:
    pair.mesh(WAITS.format(go) + "rank * 10", "--nowait --out handle").ok()
    pair.mesh("rank + 1", "[0] --nowait --out part").ok()
    go.touch()
    pair.run(f"%mesh resize {size}").ok()
    assert pair.run("handle.result()").ok().shown == "ValueMesh(procs=2)\nrank 0: 0\nrank 1: 10"
    assert pair.run("list(part.result().values())").ok().shown == "[1]"


def test_resize_waits_for_a_nowait_cell_with_a_collective(pair: Notebook, go: Path) -> None:
    body = WAITS.format(go) + "def late(): return 5\nx = torch.ones(1); dist.all_reduce(x); int(x)"
    pair.mesh(body, "--nowait --out handle").ok()
    resize = pair.send("%mesh resize 3")
    resize.until(lambda: "waiting for cell [2] (--nowait), still running; Stop ends only this wait" in resize.text)
    go.touch()
    # The new rank gets what the cell has defined.
    assert "now has procs=3; new: rank 2, with the definitions of 1 cell" in resize.wait().ok().text
    assert pair.run("list(handle.result().values())").ok().shown == "[2, 2]"
    assert pair.mesh("x = torch.ones(1); dist.all_reduce(x); int(x), late()").ok().shown == "[ranks 0-2] (3, 5)"


def test_cell_behind_a_paused_one_says_so_and_how_to_go_on(pair: Notebook, go: Path) -> None:
    pair.mesh(WAITS.format(go), "--nowait --out handle").ok()
    pair.run("%mesh pause").ok()
    behind = pair.send("%%mesh\nrank * 0")
    said = "(--nowait), paused; Stop ends only this wait, so that you can run %mesh resume"
    behind.until(lambda: said in behind.text)
    pair.interrupt()
    behind.wait()
    pair.run("%mesh resume").ok()
    go.touch()
    assert pair.mesh("rank * 0").ok().shown == "[ranks 0-1] 0"


@pytest.mark.slow
def test_stop_of_a_waiting_resize_leaves_the_mesh_as_it_was(pair: Notebook, go: Path) -> None:
    body = WAITS.format(go) + "x = torch.ones(1); dist.all_reduce(x); int(x), world_size"
    pair.mesh(body, "--nowait --out handle").ok()
    resize = pair.send("%mesh resize 3")
    resize.until(lambda: "waiting for cell [2] (--nowait)" in resize.text)
    pair.interrupt()
    assert "cell [2] (--nowait), which it was waiting for, continues" in resize.wait().text
    go.touch()
    assert pair.run("list(handle.result().values())").ok().shown == "[(2, 2), (2, 2)]"
    assert pair.mesh("x = torch.ones(1); dist.all_reduce(x); int(x), world_size").ok().shown == "[ranks 0-1] (2, 2)"
    assert "now has procs=3" in pair.run("%mesh resize 3").ok().text


@pytest.mark.slow
def test_kernel_ends_while_a_nowait_cell_runs(own: Callable[..., Notebook]) -> None:
    book = own()
    book.run("%mesh up --procs 2").ok()
    book.mesh("while True: pass", "--nowait").ok()
    # The kit checks for leaks.
    book.manager.shutdown_kernel()
