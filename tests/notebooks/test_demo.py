"""The demo runs a notebook in the terminal, to its end, to an error, or until stopped."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import nbformat
import pytest

from leaks import wait_until
from quickstart import short_quickstart

# Not by an import, which would take a second of each process that only collects tests.
_MISSING = [name for name in ("sklearn", "matplotlib") if find_spec(name) is None]
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(_MISSING), reason=f"needs {', '.join(_MISSING)}")]
ROOT = Path(__file__).parents[2]


def write(path: Path, *cells: str) -> Path:
    """Return a notebook of one step."""
    made: list[Any] = [nbformat.v4.new_markdown_cell("# The one step")]
    made += [nbformat.v4.new_code_cell(text, id=f"cell-{number}") for number, text in enumerate(cells)]
    spec = {"name": "monarch", "display_name": "Monarch", "language": "python"}
    nbformat.write(nbformat.v4.new_notebook(cells=made, metadata={"kernelspec": spec}), path)
    return path


def start(*args: object) -> subprocess.Popen[str]:
    command = [sys.executable, str(ROOT / "notebooks" / "demo.py"), *map(str, args)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, "COLUMNS": "120"}
    )


@pytest.mark.slow
def test_demo_runs_the_notebook(tmp_path: Path) -> None:
    nbformat.write(short_quickstart(), tmp_path / "quickstart.ipynb")
    demo = start(tmp_path / "quickstart.ipynb", "--out", tmp_path / "executed.ipynb")
    said = demo.communicate(timeout=100)[0]
    assert demo.returncode == 0, said
    assert re.search(r"^test accuracy 9[5-9]\.\d% on 360 digits", said, re.M)
    assert "how long each step took" in said and re.search(r"^Train on all ranks +\d+\.\d\d$", said, re.M)
    assert "make lab" in said and "executed.ipynb" in said
    book = nbformat.read(tmp_path / "executed.ipynb", as_version=4)
    assert all(cell.outputs for cell in book.cells if cell.cell_type == "code" and cell.id in ("up", "train", "result"))


def test_demo_shows_each_cell_in_one_line(tmp_path: Path) -> None:
    printed = "import sys\nfrom os import path\n\n# A comment.\nprint('\\x1b[31mred\\x1b[0m')\nprint('two')"
    cells = ["import os", printed, "%%capture\nprint('one')", "x = (\n    1\n)"]
    demo = start(write(tmp_path / "lines.ipynb", *cells), "--out", tmp_path / "executed.ipynb")
    said = demo.communicate(timeout=60)[0]
    assert demo.returncode == 0, said
    shown = [line.strip() for line in said.partition("The one step")[2].partition("how long")[0].splitlines()]
    assert [line for line in shown if line] == [
        ">>> import os",
        ">>> print('\\x1b[31mred\\x1b[0m') …",
        "red",
        "two",
        ">>> %%capture ⏎ print('one')",
        ">>> x = ( …",
    ]


def test_demo_shows_a_failing_cell(tmp_path: Path) -> None:
    book = write(tmp_path / "bad.ipynb", "%mesh up --procs 2", "%%mesh\n1 / rank", "print('never')")
    demo = start(book, "--out", tmp_path / "executed.ipynb")
    said = demo.communicate(timeout=60)[0]
    assert demo.returncode == 1
    assert "cell cell-1 failed: MeshCellError" in said and "rank 0: ZeroDivisionError" in said and "never" not in said
    assert (tmp_path / "executed.ipynb").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_demo_can_be_stopped(tmp_path: Path, number: int) -> None:
    waits = f"%%mesh\nopen('{tmp_path}/' + str(rank), 'w').close()\nimport time\nwhile True: time.sleep(0.01)"
    demo = start(write(tmp_path / "long.ipynb", "%mesh up --procs 2", waits), "--out", tmp_path / "executed.ipynb")
    assert wait_until(lambda: all((tmp_path / str(rank)).exists() for rank in range(2)), 30)
    demo.send_signal(number)
    said = demo.communicate(timeout=60)[0]
    assert demo.returncode == 130 and "stopped" in said


def test_demo_refuses_a_missing_notebook(tmp_path: Path) -> None:
    demo = start(tmp_path / "nowhere.ipynb")
    assert "does not exist" in demo.communicate(timeout=60)[0] and demo.returncode == 2
