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
    assert "runs on ranks 0-3" in cell.shown
    assert notebook.run("handle.done").ok().shown == "False"
    late = notebook.run("handle.result(0.01)")
    assert late.status == "error" and "has not ended within 0.01 s" in late.reply["evalue"]
    go.touch()
    assert notebook.run("list(handle.result().values())").ok().shown == "[0, 2, 4, 6]"
    assert notebook.run("handle.done, handle is _mesh").ok().shown == "(True, True)"
    # Its output is in its own cell.
    cell.until(lambda: cell.said().get("runs") == ALL)


def test_handle_can_be_awaited(notebook: Notebook, go: Path) -> None:
    notebook.mesh(WAITS.format(go) + "rank", "[0,3] --nowait --out handle").ok()
    go.touch()
    assert notebook.run("list((await handle).values())").ok().shown == "[0, 3]"


@pytest.mark.parametrize("ask", ["handle.result()", "await handle"])
def test_handle_raises_the_error_of_its_cell(notebook: Notebook, ask: str) -> None:
    notebook.mesh("if rank == 1: raise KeyError('boom')", "--nowait --out handle").ok()
    cell = notebook.run(ask)
    assert cell.reply["ename"] == "MeshCellError" and "rank 1: KeyError: 'boom'" in cell.text


@pytest.mark.parametrize("stop", ["interrupt", "cancel"])
def test_nowait_cell_can_be_cancelled(notebook: Notebook, stop: str) -> None:
    cell = notebook.mesh("kept = 1\nprint('runs')\nwhile True: pass", "--nowait --out handle").ok()
    cell.until(lambda: cell.said().get("runs") == ALL)
    assert "ranks 0-3: stopped by an interrupt" in notebook.run(f"handle.{stop}()").ok().shown
    assert notebook.run("handle.result()").status == "error"
    assert notebook.mesh("kept").ok().shown == "[ranks 0-3] 1"


def test_later_cells_wait_only_for_ranks_of_a_nowait_cell(notebook: Notebook, go: Path) -> None:
    notebook.mesh(WAITS.format(go), "[0] --nowait --out handle").ok()
    assert notebook.mesh("rank", "[2]").ok().shown == "[rank 2] 2"
    behind = notebook.send("%%mesh\n'behind'")
    go.touch()
    assert behind.wait().ok().shown == "[ranks 0-3] 'behind'"


def test_kernel_ends_while_a_nowait_cell_runs(own: Callable[..., Notebook]) -> None:
    book = own()
    book.run("%mesh up --procs 2").ok()
    book.mesh("while True: pass", "--nowait").ok()
    # The kit checks for leaks.
    book.manager.shutdown_kernel()
