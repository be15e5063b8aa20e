"""The line of a running cell that says which ranks still run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kernels import Cell, Notebook
from monarch_kernel.output.waiting import MARK

pytestmark = pytest.mark.slow


def lines(cell: Cell) -> list[str]:
    """Return the states of the line, in order; empty once it is gone."""
    displays = cell.contents("display_data", "update_display_data")
    return [each["data"].get("text/plain", "") for each in displays if MARK in each["metadata"]]


def waiting(notebook: Notebook, code: str, go: Path) -> Cell:
    return notebook.send(code.replace("GO", f"while not os.path.exists({str(go)!r}): time.sleep(0.01)"))


def test_line_names_ranks_that_still_run_and_disappears(notebook: Notebook, tmp_path: Path) -> None:
    go = tmp_path / "go"
    cell = waiting(notebook, "%%mesh\nimport os, time\nif rank == 2:\n    GO\nrank", go)
    text = r"rank 2 running for \d+s \(since [\d:]+\), ranks 0-1,3 finished"
    cell.until(lambda: sum(bool(re.fullmatch(text, line)) for line in lines(cell)) > 1)
    go.touch()
    cell.wait().ok()
    assert lines(cell)[-1] == ""
    assert len({each["transient"]["display_id"] for each in cell.contents("update_display_data")}) == 1
    # It is gone before the result of the cell is complete for a reader.
    assert "[rank 3] 3" in cell.shown


def test_line_is_of_calls_in_plain_cells_too(notebook: Notebook, tmp_path: Path) -> None:
    notebook.run(
        "%%mesh spawn waiters\nfrom monarch.actor import Actor, endpoint\nimport os, time\nclass W(Actor):\n"
        "    @endpoint\n    def wait(self, path):\n        while not os.path.exists(path): time.sleep(0.01)"
    ).ok()
    cell = notebook.send(f"waiters.slice(procs=slice(0, 2)).wait.call({str(tmp_path / 'go')!r}).get()")
    cell.until(lambda: lines(cell))
    assert lines(cell)[0].startswith("ranks 0-1 running for ")
    (tmp_path / "go").touch()
    assert lines(cell.wait().ok())[-1] == ""
    notebook.run("waiters.stop().get()").ok()


def test_cell_behind_another_waits(notebook: Notebook, tmp_path: Path) -> None:
    go = tmp_path / "go"
    waiting(notebook, "%%mesh --nowait\nimport os, time\nGO", go).wait().ok()
    cell = notebook.send("%%mesh\nrank")
    cell.until(lambda: lines(cell))
    assert lines(cell)[0].startswith("ranks 0-3 waiting for ")
    go.touch()
    assert lines(cell.wait().ok())[-1] == ""


def test_stopped_cell_has_no_line(notebook: Notebook) -> None:
    cell = notebook.send("%%mesh\nwhile True: pass")
    cell.until(lambda: lines(cell))
    notebook.interrupt()
    cell.wait()
    assert lines(cell)[-1] == ""


def test_quick_calls_and_executed_notebooks_have_no_line(notebook: Notebook) -> None:
    cell = notebook.run("%%mesh\nimport time\nfor _ in range(15): time.sleep(0.1)", cell_id="").ok()
    assert not lines(cell)
    cell = notebook.run(
        "import time\nuntil = time.monotonic() + 2.5\nwhile time.monotonic() < until:\n    %mesh rank"
    ).ok()
    assert not lines(cell)
