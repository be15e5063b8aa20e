"""The commands of the prompts at a breakpoint and of ``%mesh debug``."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest

from dialogs import Dialog, said
from kernels import Notebook
from leaks import wait_until
from monarch_kernel.output.waiting import MARK

WORK = """%%mesh
import time
import torch.distributed as dist
def work(n, k=2):
    total = 0
    for i in range(n):
        total += i
    breakpoint()
    return total"""
AT_WORK = "%%mesh\nx = 3\nif rank == 1:\n    x = work(3)\nprint('x is', x)"
FAILS = "%%mesh\ndef cut(a):\n    b = a\n    return 1 // b\nif rank < 2:\n    cut(rank * 0)"


@pytest.fixture(autouse=True)
def nothing_is_left_paused(notebook: Notebook) -> Iterator[None]:
    notebook.run(WORK).ok()
    yield
    notebook.interrupt()
    notebook.run("%mesh clear").ok()
    notebook.run("%mesh resume").ok()
    notebook.run("%mesh interrupt")


def test_first_prompt_of_a_notebook_names_help(own: Callable[..., Notebook]) -> None:
    notebook = own()
    notebook.run("%mesh up --procs 2").ok()
    for times in (1, 0):
        dialog = Dialog(notebook, "%%mesh\nbreakpoint()")
        dialog.prompt()
        assert dialog.shown().count("'help' lists the commands") == times
        assert "quit              stop the cell" in dialog.ask("help")
        dialog.answer("c")
        dialog.cell.wait().ok()


def test_frames_and_source_as_in_pdb(notebook: Notebook) -> None:
    dialog = Dialog(notebook, AT_WORK)
    dialog.prompt()
    for line, shown in (
        ("u", "x = work(3)"),
        ("up", "this is the outermost frame"),
        ("l", "->"),
        ("", "has no more lines"),
        ("x", "rank 1: 3"),
        ("d", "breakpoint()"),
        ("d", "this is the innermost frame"),
        ("frame 7", "expected a frame from 0 (innermost) to 1, got 7"),
        ("ll", "def work(n, k=2):"),
        ("a", "  n = 3\n  k = 2"),
        ("whatis total", "<class 'int'>"),
        ("until --line 9", "line 9 in work: return total"),
    ):
        assert shown in dialog.ask(line), line
    dialog.answer("c")
    assert "[rank 1] x is 3" in dialog.cell.wait().ok().stream()


def test_assignments_change_the_code(notebook: Notebook) -> None:
    dialog = Dialog(notebook, AT_WORK)
    dialog.prompt()
    dialog.shown()
    for line in ("total = 50", "!k = 7", "total += 1"):
        dialog.answer(line)
        dialog.prompt()
    assert dialog.ask("total, k") == "rank 1: (51, 7)\n"
    assert "ZeroDivisionError" in dialog.ask("1 / 0")
    assert "ValueError: wrong" in dialog.ask("raise ValueError('wrong')")
    dialog.answer("c")
    assert "[rank 1] x is 51" in dialog.cell.wait().ok().stream()


def test_line_of_the_cell_says_which_ranks_are_paused(notebook: Notebook) -> None:
    dialog = Dialog(notebook, AT_WORK)
    dialog.prompt()

    def line() -> str:
        shown = dialog.cell.contents("display_data", "update_display_data")
        return next((each["data"].get("text/plain", "") for each in shown[::-1] if MARK in each["metadata"]), "")

    dialog.cell.until(lambda: "paused" in line())
    assert "running" not in line()
    dialog.answer("c")
    dialog.cell.wait().ok()


def test_misspelt_commands_are_told(notebook: Notebook) -> None:
    dialog = Dialog(notebook, AT_WORK)
    dialog.prompt()
    dialog.shown()
    assert "'stpe' is neither a name nor a command here; help lists the commands" in dialog.ask("stpe")
    assert "'no such thing' is not a command here" in dialog.ask("no such thing")
    assert "expected an expression" in dialog.ask("p")
    assert "barrier would wait for other ranks" in dialog.ask("dist.barrier()")
    assert "barrier would wait for other ranks" in dialog.ask("a = dist.barrier()")
    assert "Enter" in dialog.ask("help")
    assert "has no breakpoints" in dialog.ask("b")
    # As in pdb: a line of the cell in which the rank has stopped.
    assert re.search(r"breakpoint \d+: .*cell \[\d+\] line 7", dialog.ask("b 7"))


def test_enter_repeats_steps_and_no_statements(notebook: Notebook) -> None:
    dialog = Dialog(notebook, AT_WORK)
    dialog.prompt()
    dialog.shown()
    dialog.answer("total = total + 1")
    dialog.prompt()
    dialog.answer("")
    dialog.prompt()
    assert dialog.ask("total") == "rank 1: 4\n"
    assert "return total" in dialog.ask("n")
    assert "print('x is', x)" in dialog.ask("")
    dialog.answer("")
    dialog.cell.wait().ok()


@pytest.mark.parametrize("line", ["q", "exit", "quit()", "\x04"])
def test_leaving_stops_the_cell(notebook: Notebook, line: str) -> None:
    dialog = Dialog(notebook, AT_WORK)
    dialog.prompt()
    dialog.shown()
    dialog.answer(line)
    assert dialog.cell.wait().status == "error"
    # Where ranks are is not told again.
    assert "breakpoint()" not in dialog.shown()
    assert "KeyboardInterrupt" in dialog.cell.text


def test_ranks_are_listed_and_idle_ones_refused(notebook: Notebook) -> None:
    dialog = Dialog(notebook, AT_WORK)
    dialog.prompt()
    dialog.shown()
    assert wait_until(lambda: "ranks 0,2-3: idle" in dialog.ask("rank"))
    assert "rank 2: idle; only paused ranks can be selected" in dialog.ask("rank 2")
    assert "no rank 9" in dialog.ask("rank 9")
    dialog.answer("rank all")
    assert dialog.prompt() == "(mesh rank 1) "


def test_step_that_waits_for_paused_ranks_is_canceled(notebook: Notebook) -> None:
    others = "if rank != 1:\n    for _ in range(20):\n        time.sleep(0.02)\nelse:\n    breakpoint()"
    dialog = Dialog(notebook, f"%%mesh\n{others}\ndist.barrier()\ny = 1\nfor _ in range(20):\n    time.sleep(0.02)")
    dialog.prompt()
    assert "dist.barrier()" in dialog.ask("n")
    text = dialog.ask("n")
    assert "is still running; stops at the end of the step" in text
    assert "ranks 0,2-3: paused too; if the step needs them, enter 'continue'" in text
    dialog.answer("continue")
    dialog.cell.wait().ok()
    assert "line 8" not in dialog.shown()


def test_debug_of_failed_and_of_paused_ranks(notebook: Notebook) -> None:
    assert notebook.run(FAILS).status == "error"
    assert "rank 2 did not fail in the last call and is not paused" in notebook.run("%mesh debug 2").text
    dialog = Dialog(notebook, "%mesh debug 0")
    assert dialog.prompt() == "(mesh rank 0) "
    dialog.shown()
    for line, shown in (
        ("up", "cut(rank * 0)"),
        ("d", "return 1 // b"),
        ("l", "->"),
        ("a", "a = 0"),
        ("n", "next: rank 0 is not paused, so it cannot continue"),
        ("c", "continue: rank 0 is not paused, so it cannot continue"),
        ("rank 3", "rank 3: idle"),
    ):
        assert shown in dialog.ask(line), line
    dialog.answer("b = 5")
    dialog.prompt()
    assert dialog.ask("1 // b") == "rank 0: 0\n"
    dialog.answer("EOF")
    dialog.cell.wait().ok()


def test_debug_ends_when_all_ranks_go_on(notebook: Notebook) -> None:
    notebook.mesh("for i in range(10_000):\n    time.sleep(0.01)", "--nowait --out h").ok()
    said(notebook, "%mesh pause")
    assert "rank 1: paused" in said(notebook, "%mesh next 1")
    assert "resumed rank 1" in said(notebook, "%mesh continue 1")
    assert "rank 1 is not paused; paused on mesh 'mesh': ranks 0,2-3" in notebook.run("%mesh next 1").text
    dialog = Dialog(notebook, "%mesh debug")
    assert dialog.prompt() == "(mesh ranks 0,2-3) "
    dialog.answer("rank 0")
    assert dialog.prompt() == "(mesh rank 0) "
    dialog.answer("rank all")
    assert dialog.prompt() == "(mesh ranks 0,2-3) "
    dialog.answer("c")
    assert "resumed ranks 0,2-3" in dialog.cell.wait().ok().stream()
    said(notebook, "%mesh interrupt")


@pytest.fixture
def console(notebook: Notebook) -> Iterator[str]:
    """The subshell of another console."""
    subshell = notebook.control("create_subshell_request")["subshell_id"]
    yield subshell
    notebook.control("delete_subshell_request", subshell_id=subshell)


def test_pause_from_elsewhere_has_the_prompt(notebook: Notebook, console: str) -> None:
    lasts = "for i in range(3000):\n    time.sleep(0.01)\n    if over: break"
    notebook.mesh("over = False").ok()
    dialog = Dialog(notebook, f"%%mesh\n{lasts}")
    assert wait_until(lambda: notebook.run("%mesh where", subshell=console).ok().stream().count("running") == 1)
    notebook.run("%mesh pause", subshell=console).ok()
    assert dialog.prompt() == "(mesh ranks 0-3) "
    assert "ranks 0-3: paused at cell" in dialog.shown()
    assert "ranks 0-3: True" in dialog.ask("i < 3000")
    assert "ranks 0-3: paused" in dialog.ask("n")
    dialog.answer("over = True")
    dialog.prompt()
    dialog.answer("c")
    dialog.cell.wait().ok()


def test_pause_of_an_endpoint_has_the_prompt(notebook: Notebook, console: str) -> None:
    code = """%%mesh spawn sleepers
import time
class Sleeper(Actor):
    @endpoint
    def sleep(self, times):
        for i in range(times):
            time.sleep(0.01)
        return i"""
    notebook.run(code).ok()
    for call in ("sleepers.sleep.call(3000).get()", "await sleepers.sleep.call(3000)"):
        dialog = Dialog(notebook, call)
        assert wait_until(lambda: notebook.run("%mesh where", subshell=console).ok().stream().count("running") == 1)
        notebook.run("%mesh pause", subshell=console).ok()
        assert dialog.prompt() == "(mesh ranks 0-3) "
        dialog.answer("times = 0")
        dialog.prompt()
        dialog.answer("q")
        assert dialog.cell.wait().status == "error"


def test_continue_from_a_pause_is_for_those_to_come_too(notebook: Notebook, console: str) -> None:
    def where() -> str:
        return notebook.run("%mesh where", subshell=console).ok().stream()

    # Ranks in a collective do not pause before its end.
    body = "if rank == 3:\n    while True:\n        time.sleep(0.01)\ndist.barrier()"
    dialog = Dialog(notebook, f"%%mesh\n{body}")
    assert wait_until(lambda: "ranks 0-2: running" in where() and "barrier" in where())
    notebook.run("%mesh pause", subshell=console).ok()
    assert dialog.prompt() == "(mesh rank 3) "
    assert "ranks 0-2: in a call; pauses when it returns" in where()
    dialog.answer("c")
    dialog.cell.until(lambda: "resumed ranks 0-3" in dialog.cell.stream())
    assert "ranks 0-2: running" in where() and "rank 3: running" in where()
    notebook.interrupt()
    dialog.cell.wait()


def test_errors_are_told_without_their_place_in_cpp(notebook: Notebook) -> None:
    text = "[../gloo/pair.cc:534] Connection closed by peer\nException raised from read at tcp.cpp:3\nframe #0: c10"
    assert notebook.mesh(f"raise RuntimeError({text!r})").status == "error"
    assert "failed (RuntimeError: Connection closed by peer) at cell" in said(notebook, "%mesh where")


def test_steps_from_a_library_count_the_lines_of_the_user(notebook: Notebook, console: str) -> None:
    # The code of the library is far below line 7.
    body = (
        "import statistics\nimport time\nbig = [1] * 3_000_000\ntotal = statistics.variance(big)\na = 1\nb = 2\nc = 3"
    )
    dialog = Dialog(notebook, f"%%mesh [1:2]\n{body}")
    assert wait_until(lambda: "line 5: total" in notebook.run("%mesh where 1", subshell=console).ok().stream())
    notebook.run("%mesh pause 1", subshell=console).ok()
    assert dialog.prompt() == "(mesh rank 1) "
    assert "line 5: total" in dialog.shown()
    dialog.answer("until 7")
    dialog.cell.until(lambda: "line 7: b = 2" in dialog.cell.stream())
    dialog.prompt()
    dialog.answer("c")
    dialog.cell.wait().ok()
