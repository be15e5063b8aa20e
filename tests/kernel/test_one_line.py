"""``%mesh CODE``: one line on the ranks; commands and their mistakes stay commands."""

from __future__ import annotations

import re

import pytest

from kernels import Notebook
from monarch_kernel.grammar.line_words import without_comment
from monarch_kernel.grammar.one_line import is_code
from monarch_kernel.grammar.typed_lines import arrange

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
    assert re.search(r"\n    nosuch \* 2\n    \^{6}\n", notebook.run("%mesh nosuch * 2").text)
    error = notebook.run("%mesh 1 / (rank - 2)")
    assert error.status == "error" and "ZeroDivisionError" in error.text and "rank 2" in error.text


def test_value_of_a_line_is_assigned_and_not_shown(notebook: Notebook) -> None:
    cell = notebook.run("if True:\n    values = %mesh print('once') or rank * 10").ok()
    assert cell.said() == {"once": {0, 1, 2, 3}} and cell.shown == ""
    assert notebook.run("sum(values.values())").ok().shown == "60"
    failed = notebook.run("values = None\nvalues = %mesh 1 / rank")
    assert failed.status == "error" and notebook.run("values").ok().shown == ""
    assert notebook.run("%mesh rank").ok().shown.splitlines()[0] == "[rank 0] 0"


def test_verbs_still_take_variables_of_the_notebook(notebook: Notebook) -> None:
    notebook.run("where = 'mesh'\n%mesh use {where}").ok()
    notebook.run("def use(name):\n    get_ipython().run_line_magic('mesh', 'use {name}')\nuse('mesh')").ok()
    mistake = notebook.run("%mesh restrat")
    assert mistake.status == "error" and "did you mean 'restart'?" in mistake.text


@pytest.mark.parametrize(
    ("typed", "read"),
    [
        ("%%mesh[0]\nx\n", "%%mesh [0]\nx\n"),
        ("# a comment\n\n%%mesh\nx\n", "%%mesh\nx\n"),
        ("%%mesh --help\n\n", "%mesh help\n"),
        ("%%mesh --help\nx\n", "%%mesh --help\nx\n"),
        ("%%meshes[0]\nx\n", "%%meshes[0]\nx\n"),
        ("x = 1\n%%mesh[0]\n", "x = 1\n%%mesh[0]\n"),
        ("%mesh up?\n", "%mesh up ?\n"),
        ("%%writefile x\n# note\n%mesh up?\n", "%%writefile x\n# note\n%mesh up?\n"),
    ],
)
def test_lines_are_arranged_for_ipython(typed: str, read: str) -> None:
    assert "".join(arrange(typed.splitlines(keepends=True))) == read


def test_comments_end_lines_of_verbs_and_headers(notebook: Notebook) -> None:
    assert notebook.run("%mesh use mesh  # the first one").ok().stream() == "cells now run on mesh 'mesh'\n"
    cell = notebook.run("# on one rank\n%%mesh[2]  # the third\nprint(rank)\n1 / 0")
    assert cell.said() == {"2": {2}} and re.search(r"\n      cell \[\d+\] line 4: ", cell.text)
    assert without_comment("up 'a # b' c#d # e") == "up 'a # b' c#d "


def test_header_below_code_is_refused_with_advice(notebook: Notebook) -> None:
    cell = notebook.run("x = 1\n%%mesh [0]\nx")
    assert cell.status == "error" and "must be the first line" in cell.text and "line 2: %%mesh [0]" in cell.text


def test_help_without_code_lists_the_commands(notebook: Notebook) -> None:
    assert "Options of cells" in notebook.run("%%mesh --help").ok().text


def test_log_of_a_rank_that_no_mesh_has_is_refused(notebook: Notebook) -> None:
    assert "no mesh has rank 9; the last rank is 3" in notebook.run("%mesh log --rank 9").text
