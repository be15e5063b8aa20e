"""After an error, its frames stay on the ranks until their next call, and can be looked into."""

from __future__ import annotations

import re

import pytest

from dialogs import Dialog, said
from kernels import Notebook

FAILS = """import weakref
class Big:
    pass
def outer(n):
    here = 'outer'
    return inner(n)
def inner(n):
    global seen
    big = Big()
    seen = weakref.ref(big)
    return n // (rank - 1)
outer(7)"""


@pytest.fixture
def failed(notebook: Notebook) -> Notebook:
    assert notebook.mesh(FAILS).status == "error"
    return notebook


def test_frames_of_an_error_are_looked_into(failed: Notebook) -> None:
    text = said(failed, "%mesh where")
    assert re.search(r"rank 1:\n  failed \(ZeroDivisionError: .*\)\n  cell \[\d+\] line 12 in inner: return n", text)
    assert "cell [" in text and "line 13: outer(7)" in text and "ranks 0,2-3: idle" in text
    assert said(failed, "%mesh print --on [1:2] n") == "rank 1: 7\n"
    assert said(failed, "%mesh print --on [1:2] --up 1 here") == "rank 1: 'outer'\n"


def test_frames_go_with_the_next_call_or_when_they_are_forgotten(failed: Notebook) -> None:
    alive = "%mesh print --on [1:2] seen() is not None"
    assert said(failed, alive) == "rank 1: True\n"
    assert "rank 1: released the last error" in said(failed, "%mesh forget")
    assert said(failed, alive) == "rank 1: False\n"
    assert "ranks 0-3: idle" in said(failed, "%mesh where")
    assert "no error to release" in said(failed, "%mesh forget")
    assert failed.mesh(FAILS).status == "error"
    assert failed.mesh("seen() is not None", "[1:2]").ok().shown == "[rank 1] False"
    assert "failed in its last call" in failed.run("%mesh debug").text


def test_debug_enters_the_failed_ranks(failed: Notebook) -> None:
    for line in ("%mesh debug", "%debug"):
        dialog = Dialog(failed, line)
        assert dialog.prompt() == "(mesh rank 1) "
        assert "ZeroDivisionError" in dialog.shown()
        assert dialog.ask("n + 1").endswith("rank 1: 8\n")
        dialog.answer("quit")
        dialog.cell.wait().ok()
    assert "no prompt here" in failed.run("%mesh debug").ok().stream()


def test_debug_of_the_notebook_itself(notebook: Notebook) -> None:
    assert notebook.run("local = 3\n1 // 0").status == "error"
    dialog = Dialog(notebook, "%debug")
    assert dialog.prompt().startswith("ipdb>")
    assert "3" in dialog.ask("local")
    dialog.answer("q")
    dialog.cell.wait()


def test_errors_of_endpoints_are_kept(notebook: Notebook) -> None:
    notebook.run(
        "%%mesh spawn parts\nclass Part(Actor):\n    @endpoint\n    def cut(self, x):\n        return x / 0"
    ).ok()
    assert notebook.run("parts.cut.call(3).get()").status == "error"
    assert re.search(r"failed \(ZeroDivisionError: .*\) at cell \[\d+\] line 5 in cut", said(notebook, "%mesh where"))
    assert said(notebook, "%mesh print x") == "ranks 0-3: 3\n"
    said(notebook, "%mesh forget")


def test_interrupts_are_not_kept(notebook: Notebook) -> None:
    notebook.mesh("import time\nprint('runs')\ntime.sleep(100)", "--nowait --out h").ok()
    notebook.run("h.cancel()")
    notebook.run("%mesh interrupt")
    assert "failed" not in said(notebook, "%mesh where")
