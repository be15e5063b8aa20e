"""Unfinished lines of ranks are live: progress bars, and text without an end of line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from kernels import ALL, Cell, Notebook
from monarch._core.shapes.ranks import parse_ranks

WAIT = "import os, sys, time\nwhile not os.path.exists({go!r}): time.sleep(0.01)\n"


def waiting(notebook: Notebook, before: str, go: Path, after: str = "", line: str = "") -> Cell:
    """Return a cell that waits for a file after some code, and then runs more."""
    wait = WAIT.format(go=str(go))
    return notebook.send(f"%%mesh {line}\n{before}\n{wait}{after}")


def shown_by(cell: Cell, text: str) -> set[int]:
    """Return the ranks whose lines in the displays of a cell contain a text."""
    lines = re.findall(r"^\[ranks? ([^\]]+)\] (.*)$", cell.shown, re.M)
    return {rank for ranks, line in lines if text in line for rank in parse_ranks(ranks)}


@pytest.fixture
def go(tmp_path: Path) -> Path:
    """A file that cells wait for."""
    return tmp_path / "go"


def test_text_without_an_end_of_line_is_shown_at_once(notebook: Notebook, go: Path) -> None:
    cell = waiting(notebook, "print('loading', end='')", go, "print(' done')")
    cell.until(lambda: cell.shown == "[ranks 0-3] loading")
    go.touch()
    assert cell.wait().ok().shown == "[ranks 0-3] loading done" and not cell.stream()


def test_bars_of_ranks_are_one_display_with_a_line_per_state(notebook: Notebook, go: Path) -> None:
    before = "import sys\nfor i in range(3): sys.stderr.write(f'\\r{i}/5 on {rank // 2}')"
    cell = waiting(notebook, before, go, "sys.stderr.write(f'\\r5/5 on {rank // 2}\\n')\nprint('next')")
    cell.until(lambda: cell.shown == "[ranks 0-1] 2/5 on 0\n[ranks 2-3] 2/5 on 1")
    go.touch()
    assert cell.wait().ok().shown == "[ranks 0-1] 5/5 on 0\n[ranks 2-3] 5/5 on 1"
    assert cell.said("stdout") == {"next": ALL}


def test_quick_bar_is_no_error(notebook: Notebook) -> None:
    cell = notebook.mesh("import sys\nsys.stderr.write('\\r1/2\\r2/2\\n')\nNone").ok()
    assert "2/2" in cell.text and not cell.stream("stderr") and "1/2" not in cell.text


def test_wiped_bar_disappears_and_text_after_it_stays_a_line(notebook: Notebook, go: Path) -> None:
    before = "import sys\nsys.stderr.write('\\r50%')"
    cell = waiting(notebook, before, go, "sys.stderr.write('\\r   \\rlogged\\n')\nNone")
    cell.until(lambda: cell.shown == "[ranks 0-3] 50%")
    go.touch()
    cell.wait().ok()
    assert cell.said("stderr") == {"logged": ALL}


def test_saved_output_of_long_bars_is_bounded(notebook: Notebook) -> None:
    body = "import sys, time\nfor i in range(60): sys.stderr.write(f'\\r{i}/60'); time.sleep(0.02)\n"
    body += "print(file=sys.stderr)"
    cell = notebook.mesh(body).ok()
    assert len(cell.bundles) == 1 and cell.shown == "[ranks 0-3] 59/60" and not cell.stream()


@pytest.mark.slow
def test_bars_in_a_terminal_overwrite_its_last_line(own: Callable[..., Notebook], go: Path) -> None:
    book = own()
    book.run("%mesh up --procs 2").ok()
    book.client.is_complete("x = 1")
    book.client.get_shell_msg(timeout=30)
    wait = WAIT.format(go=str(go))
    cell = book.send(f"%%mesh\nprint('50%', end='\\r')\n{wait}print('100%')", cell_id="")
    cell.until(lambda: "50%" in cell.stream("stdout"))
    go.touch()
    cell.wait().ok()
    assert "[ranks 0-1] 100%" in cell.stream() and "\r" in cell.stream() and not cell.bundles


@pytest.mark.parametrize("kind", ["tqdm", "tqdm.auto", "tqdm.notebook"])
def test_tqdm_is_one_line_per_rank(notebook: Notebook, go: Path, kind: str) -> None:
    pytest.importorskip("tqdm")
    before = f"from {kind} import tqdm\nbar = tqdm(total=4, desc='outer')\n"
    before += "inner = tqdm(total=9, desc='inner', leave=False)\nbar.update(2); bar.refresh()"
    cell = waiting(notebook, before, go, "inner.close(); bar.update(2); bar.close()")
    cell.until(lambda: shown_by(cell, "outer:  50%") == ALL == shown_by(cell, "inner:   0%"))
    go.touch()
    cell.wait().ok()
    assert "outer: 100%" in cell.shown and "inner" not in cell.shown and not cell.stream()
    assert len(cell.bundles) == 1 and len(cell.shown.splitlines()) <= 4


def test_rich_progress_is_one_line_per_rank(notebook: Notebook, go: Path) -> None:
    before = (
        "from rich.progress import Progress\nbar = Progress(); bar.start(); task = bar.add_task('train', total=4)\n"
    )
    before += "bar.advance(task, 2)"
    cell = waiting(notebook, before, go, "bar.advance(task, 2); bar.stop()")
    cell.until(lambda: shown_by(cell, "50%") == ALL)
    go.touch()
    cell.wait().ok()
    assert "100%" in cell.shown and "\x1b[2K" not in cell.text and not cell.stream("stderr")
    assert len(cell.bundles) == 1 and len(cell.shown.splitlines()) <= 4


@pytest.mark.slow
def test_executed_notebook_keeps_one_line_of_progress(tmp_path: Path, spec: str) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    go = tmp_path / "go"
    bar = (
        "import sys, time\nfor i in range(20): sys.stderr.write(f'\\r{i}/20'); time.sleep(0.02)\nprint(file=sys.stderr)"
    )
    late = f"print('early', flush=True)\n{WAIT.format(go=str(go))}print('late')"
    release = f"import pathlib; pathlib.Path({str(go)!r}).touch(); h._run.wait()"
    cells = ["%mesh up --procs 2", f"%%mesh\n{bar}", f"%%mesh --nowait --out h\n{late}", release, "h.result()"]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in cells])
    nbclient.NotebookClient(book, kernel_name="monarch", timeout=60).execute()
    up, bars, background, _, result = (cell["outputs"] for cell in book.cells)
    assert [each["output_type"] for each in up] == ["display_data"] and "is up" in up[0]["data"]["text/plain"]
    assert [each["data"]["text/plain"] for each in bars] == ["[ranks 0-1] 19/20"]
    assert json.dumps([background, result]).count("late") == 1 and "late" in json.dumps(result)
    assert json.dumps([background, result]).count("early") <= 2
