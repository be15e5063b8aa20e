"""Cells on ranks in a real kernel: variables, results and output."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kernels import ALL, Notebook
from leaks import Kit


def test_variables_persist_between_cells(notebook: Notebook) -> None:
    notebook.mesh("x = rank * 10").ok()
    cell = notebook.mesh("x += 1\nx").ok()
    for rank in range(4):
        assert f"[rank {rank}] {rank * 10 + 1}" in cell.shown


def test_equal_values_are_shown_once(notebook: Notebook) -> None:
    cell = notebook.mesh("world_size").ok()
    assert cell.shown == "[ranks 0-3] 4"
    assert len(cell.bundles) == 1 and "text/html" in cell.bundles[0]


@pytest.mark.parametrize(
    "body", ["1;", "'a;'  ;", "1; # a comment", "1;\n\n# a comment\n", "x = 1", "None", " ", "# only", "'ü'; # ;"]
)
def test_cell_without_a_value_shows_nothing(notebook: Notebook, body: str) -> None:
    assert not notebook.mesh(body).ok().text.strip()


@pytest.mark.parametrize("body", ["'a;'", "';' # ;", "1 # no semicolon;", "('ü',\n 1)", "(1)"])
def test_semicolon_elsewhere_hides_nothing(notebook: Notebook, body: str) -> None:
    assert notebook.mesh(body).ok().shown


def test_top_level_await_works(notebook: Notebook) -> None:
    cell = notebook.mesh("import asyncio\nawait asyncio.sleep(0)\nz = await asyncio.sleep(0, result=rank + 5)\nz").ok()
    assert "[rank 3] 8" in cell.shown
    assert "[ranks 0-3] 7" in notebook.mesh("await asyncio.sleep(0, result=7)").ok().shown


@pytest.mark.skipif(sys.version_info < (3, 11), reason="awaits share an event loop from Python 3.11 on")
def test_task_may_be_awaited_by_the_last_expression(notebook: Notebook) -> None:
    begins = "import asyncio\nawait asyncio.sleep(0)\ntask = asyncio.create_task(asyncio.sleep(0.01, rank + 5))"
    cell = notebook.mesh(f"{begins}\nawait task").ok()
    assert "[rank 3] 8" in cell.shown


def test_functions_and_classes_see_the_variables(notebook: Notebook) -> None:
    notebook.mesh("def double():\n    return 2 * seen\nseen = rank").ok()
    notebook.mesh("class Point:\n    at = seen").ok()
    assert "[rank 2] (4, 2)" in notebook.mesh("double(), Point.at").ok().shown


def test_underscore_is_the_last_value(notebook: Notebook) -> None:
    notebook.mesh("rank + 40").ok()
    assert "[rank 2] 42" in notebook.mesh("_").ok().shown


def test_namespace_has_the_documented_names(notebook: Notebook) -> None:
    cell = notebook.mesh("(rank, world_size, point['procs'], mesh.name, str(device), torch.ones(1).item())").ok()
    assert "[rank 3] (3, 4, 3, 'mesh', 'cpu', 1.0)" in cell.shown


def test_tensors_show_shape_and_dtype(notebook: Notebook) -> None:
    cell = notebook.mesh("torch.arange(6.0).reshape(2, 3) + rank").ok()
    for word in ("[2, 3]", "float32", "rank 3"):
        assert word in cell.shown
    assert "tensor(" not in cell.shown


@pytest.mark.parametrize(
    ("where", "ranks"),
    [
        ("[1]", [1]), ("[-1]", [3]), ("[0,3]", [0, 3]), ("[::2]", [0, 2]), ("[1:3]", [1, 2]), ("[:]", [0, 1, 2, 3]),
        ("[procs=1:3]", [1, 2]), ("[procs=-1]", [3]), ("mesh[procs=0]", [0]), ("mesh[3,0]", [0, 3]),
        ("mesh", [0, 1, 2, 3]),
    ],
)  # fmt: skip
def test_slice_selects_ranks(notebook: Notebook, where: str, ranks: list[int]) -> None:
    cell = notebook.mesh("f'at {rank}.'", where).ok()
    assert [rank for rank in range(4) if f"at {rank}." in cell.shown] == ranks


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("[4]", ["no rank 4", "0 to 3"]), ("[gpus=0]", ["gpus", "procs"]), ("[procs=4]", ["procs", "4"]),
        ("other", ["no mesh named 'other'", "mesh"]), ("--wrong", ["unknown option '--wrong'"]),
        ("[", ["the bracket in '[' is not closed"]),
        ("[2:2]", ["the slice selects no rank"]),
    ],
)  # fmt: skip
def test_invalid_header_is_an_error(notebook: Notebook, line: str, words: list[str]) -> None:
    cell = notebook.mesh("1", line)
    assert cell.status == "error"
    for word in words:
        assert word in cell.reply["evalue"]
    # The error shows no frames of the magic.
    assert len(cell.text.splitlines()) <= 4


def test_results_are_in_a_variable(notebook: Notebook) -> None:
    assert not notebook.mesh("rank ** 2", "--out squares").ok().stream()
    cell = notebook.run("print(squares, squares is _mesh, sorted(squares.values()), squares.sizes)").ok()
    assert "[0, 1, 4, 9]" in cell.stream() and "True" in cell.stream() and "'procs': 4" in cell.stream()
    notebook.mesh("-rank", "[0,3]").ok()
    assert "[0, -3]" in notebook.run("print(list(_mesh.values()))").ok().stream()


def test_unpicklable_value_is_shown(notebook: Notebook) -> None:
    cell = notebook.mesh("import threading\nthreading.Lock()").ok()
    assert "lock" in cell.shown
    assert notebook.run("print(_mesh.item(procs=0))").ok().stream() == "None\n"


def test_value_of_a_rank_local_class_is_shown(notebook: Notebook) -> None:
    notebook.mesh("class Local:\n    def __repr__(self): return 'local thing'\nLocal()").ok()
    assert "local thing" in notebook.mesh("Local()").ok().shown
    assert notebook.run("1").ok().shown == "1"


def test_value_with_a_failing_repr_shows_the_error(notebook: Notebook) -> None:
    cell = notebook.mesh("class Bad:\n    def __repr__(self): return 1 / 0\nBad()").ok()
    assert "ZeroDivisionError" in cell.shown


def test_quiet_shows_nothing_and_keeps_results(notebook: Notebook) -> None:
    assert notebook.mesh("print('words')\ndisplay('seen')\n'value'", "--quiet").ok().text.strip() == ""
    assert "value" in notebook.run("_mesh").ok().shown
    assert notebook.run("%mesh log").ok().said()["words"] == ALL


FAST = """
from monarch_kernel.cells import runner

class Fast(runner.Run):
    def __init__(self, *args):
        super().__init__(*args)
        # All output of the ranks arrives before anything else happens here.
        for future in self.futures:
            future.exception(30)

runner.Run, run = Fast, runner.Run
"""


@pytest.mark.parametrize("how", ["--quiet", "--collect"])
def test_output_options_hold_when_ranks_are_fast(notebook: Notebook, how: str) -> None:
    notebook.run(FAST).ok()
    cell = notebook.mesh("for number in range(100): print('word', number)\n1", how).ok()
    notebook.run("runner.Run = run").ok()
    assert cell.said() == ({} if how == "--quiet" else {f"word {number}": ALL for number in range(100)})


def test_collect_shows_output_at_the_end(notebook: Notebook) -> None:
    cell = notebook.mesh("print('a')\nprint('b', rank)", "--collect").ok()
    assert cell.said() == {"a": ALL, **{f"b {rank}": {rank} for rank in range(4)}}


def test_collected_output_of_a_failure_is_shown(notebook: Notebook) -> None:
    cell = notebook.mesh("print('before')\n1 / 0", "--collect")
    assert cell.status == "error" and "before" in cell.stream()


def test_timeout_interrupts_the_ranks(notebook: Notebook) -> None:
    cell = notebook.mesh("kept = 1\nimport time\nif rank == 2: time.sleep(600)\nrank", "--timeout 0.2")
    assert cell.status == "error"
    assert "0.2 s" in cell.text and "rank 2: interrupted" in cell.text
    assert (
        "CallTimeoutError: cell [" in cell.text and "timed out after 0.2 s on rank 2, and was interrupted" in cell.text
    )
    assert re.search(r"rank 2: at cell \[\d+\] line 4: if rank == 2: time.sleep\(600\)", cell.text)
    # The results of the others are shown.
    assert "[rank 3] 3" in cell.shown
    assert "[ranks 0-3] 1" in notebook.mesh("kept").ok().shown


def test_timeout_names_the_line_of_each_group_of_ranks(notebook: Notebook) -> None:
    body = "import time\nif rank == 0:\n    time.sleep(600)\nelif rank == 1:\n    while True: pass\ndist.barrier()"
    # The first collective of a mesh may take longer than the timeout.
    notebook.mesh("dist.barrier()").ok()
    cell = notebook.mesh(body, "--timeout 2")
    assert cell.reply["ename"] == "CallTimeoutError"
    lines = {"rank 0": "4: time.sleep(600)", "rank 1": "6: while True: pass", "ranks 2-3": "7: dist.barrier()"}
    for ranks, line in lines.items():
        assert f"{ranks}: at cell [{cell.reply['execution_count']}] line {line}" in cell.text
    call = "get_ipython().run_cell_magic('mesh', '--timeout 0.1', 'while True: pass')"
    caught = notebook.run(f"try: {call}\nexcept TimeoutError: print('caught')").ok()
    assert "caught" in caught.stream("stdout")


def test_displays_are_tagged_with_the_rank(notebook: Notebook) -> None:
    body = "class Page:\n    def _repr_html_(self): return f'<b>page {rank}</b>'\ndisplay(Page())\ndisplay('x', 'y')"
    for _ in range(5):
        cell = notebook.mesh(body, "[0,2]").ok()
        pages = "".join(bundle["text/html"] for bundle in cell.bundles)
        assert "<b>page 0</b>" in pages and "<b>page 2</b>" in pages and "rank 2<" in pages
        # Simultaneous displays are one output; equal ones are shown once.
        if [bundle["text/plain"] for bundle in cell.bundles[1:]] == ["[ranks 0,2] 'x'", "[ranks 0,2] 'y'"]:
            break
    else:
        pytest.fail("five times a rank was late")


def test_displays_arrive_early_and_go_to_their_cell(notebook: Notebook, tmp_path: Path) -> None:
    wait = f"import os, time\nwhile not os.path.exists('{tmp_path}/go'): time.sleep(0.01)\n"
    cell = notebook.mesh(f"display('begun')\n{wait}display('end')", "--nowait --out late").ok()
    cell.until(lambda: "begun" in cell.shown)
    other = notebook.run("1 + 1").ok()
    (tmp_path / "go").touch()
    notebook.run("late.result()").ok()
    cell.until(lambda: "end" in cell.shown)
    assert "end" not in other.shown


def test_figures_are_shown(notebook: Notebook) -> None:
    pytest.importorskip("matplotlib")
    body = "import matplotlib\nmatplotlib.use('agg')\nimport matplotlib.pyplot as plt\nplt.plot([1, 2])"
    cell = notebook.mesh(body + ";", "[0,1]").ok()
    assert any("data:image/png;base64," in bundle["text/html"] for bundle in cell.bundles)
    assert not notebook.mesh("1;", "[0,1]").ok().bundles


def test_push_and_pull_copy_variables(notebook: Notebook) -> None:
    notebook.run("a, b = 3, [1]\n%mesh push a b").ok()
    assert "[ranks 0-3] (3, [1])" in notebook.mesh("a, b").ok().shown
    notebook.mesh("mine = rank").ok()
    assert "2" in notebook.run("%mesh pull mine --rank 2 --as yours\nprint(yours)").ok().stream()
    notebook.mesh("first, second = rank, 10 * rank").ok()
    assert "30 3" in notebook.run("%mesh pull second first --rank 3\nprint(second, first)").ok().stream()
    assert "--as: expected one variable, got 2" in notebook.run("%mesh pull first second --as one").text
    cell = notebook.run("%mesh pull nothing")
    assert cell.status == "error" and "nothing" in cell.text and "mine" in cell.text
    for line, words in {
        "push nowhere": "'nowhere'",
        "pull mine --rank 9": "--rank: expected a rank from 0 to 3, got 9",
        "pull": "required: NAME",
    }.items():
        cell = notebook.run(f"%mesh {line}")
        assert cell.status == "error" and words in cell.text
    assert "did you mean" not in notebook.run("%mesh push nope").text, "the shell's own open() is no variable"


def test_process_group_works_in_cells(notebook: Notebook, leaks: Kit) -> None:
    cell = notebook.mesh("t = torch.ones(1) * rank\ndist.all_reduce(t)\nt.item()").ok()
    assert cell.shown == "[ranks 0-3] 6.0"
    cell = notebook.mesh("u = torch.ones(1)\ndist.all_reduce(u)\nu.item(), dist.get_world_size()").ok()
    assert cell.shown == "[ranks 0-3] (4.0, 4)"
    leaks.rebase()


def test_value_hidden_by_semicolon_is_not_stored_as_a_line_says(notebook: Notebook) -> None:
    said = notebook.mesh("rank ** 2;  # hidden", "--out hidden").ok().stream()
    assert said == "note: hidden holds None for each rank, because the cell ends in a semicolon\n"
    assert notebook.run("hidden.values()").ok().shown == "[None, None, None, None]"
    assert not notebook.mesh("squares = rank ** 2", "--out nothing").ok().stream()


def test_cell_may_clear_its_namespace(own: Callable[..., Notebook]) -> None:
    book = own()
    book.run("%mesh up --procs 2").ok()
    assert book.mesh("a = 1\nglobals().clear()\n5").ok().shown == "[ranks 0-1] 5"
    assert "NameError" in book.mesh("a").text
