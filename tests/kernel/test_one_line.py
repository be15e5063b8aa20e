"""``%mesh CODE``: one line on the ranks; verbs and their mistakes stay verbs."""

from __future__ import annotations

import pytest

from kernels import Notebook
from monarch_kernel.magics.one_line import is_code

VERBS = ["up", "down", "log", "help", "restart", "table", "use", "break"]


@pytest.mark.parametrize(
    "line",
    ["x", "x + 1", "x = 3", "print(rank)", "{k: 1 for k in 'ab'}", "await f()", "!ls", "model.weight", "re", "rank"],
)
def test_code_runs_on_ranks(line: str) -> None:
    assert is_code(line, VERBS)


@pytest.mark.parametrize(
    "line", ["", "up", "up --procs 4", "upp", "restrat", "help up", "--help", "log?", "up ==", "x y"]
)
def test_verbs_and_their_mistakes_are_no_code(line: str) -> None:
    assert not is_code(line, VERBS)


def test_lines_have_the_names_of_cells(notebook: Notebook) -> None:
    notebook.mesh("x = rank * 10").ok()
    assert notebook.run("%mesh x[0] if False else 7").ok().shown == "[ranks 0-3] 7"
    assert notebook.run("%mesh x").ok().shown.splitlines() == [f"[rank {rank}] {rank * 10}" for rank in range(4)]
    notebook.run("%mesh y = {rank: 'a{b}'}").ok()
    assert notebook.run("%mesh y[rank]").ok().shown == "[ranks 0-3] 'a{b}'"
    assert notebook.run("%mesh print('one line')").ok().said() == {"one line": {0, 1, 2, 3}}
    error = notebook.run("%mesh 1 / (rank - 2)")
    assert error.status == "error" and "ZeroDivisionError" in error.text and "rank 2" in error.text


def test_verbs_still_take_variables_of_the_notebook(notebook: Notebook) -> None:
    notebook.run("where = 'mesh'\n%mesh use {where}").ok()
    notebook.run("def use(name):\n    get_ipython().run_line_magic('mesh', 'use {name}')\nuse('mesh')").ok()
    mistake = notebook.run("%mesh restrat")
    assert mistake.status == "error" and "did you mean 'restart'?" in mistake.text
