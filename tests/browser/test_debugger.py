"""JupyterLab's own debugger on ranks: a click in the gutter of a cell, variables, steps."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from browser.lab import Book, Lab
from leaks import wait_until

pytest.importorskip("debugpy")
Open = Callable[..., Book]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

CELL = """%%mesh
def work(n):
    total = 0
    for i in range(n):
        total += i
    return total
weights = torch.ones(2, 3) * rank
y = work(rank + 5)
y"""


class Panel:
    """The debugger in the right sidebar."""

    def __init__(self, book: Book) -> None:
        self.book = book
        self.page = book.page

    def start(self) -> None:
        """Turn it on, and wait until it shows the variables of the kernel."""
        self.book.used_up = True
        self.page.locator(".jp-DebuggerBugButton").first.click()
        self.page.locator(".jp-DebuggerBugButton[aria-pressed='true']").wait_for(timeout=30_000)
        self.page.locator(".cm-breakpoint-gutter").first.wait_for(timeout=30_000)

    def click_gutter(self, cell: int, line: int) -> None:
        """Set or remove a breakpoint."""
        gutter = self.book.cell(cell).locator(".cm-breakpoint-gutter .cm-gutterElement:not([style*='hidden'])")
        at = self.book.cell(cell).locator(".cm-line").nth(line - 1).bounding_box()
        column = gutter.first.bounding_box()
        assert at is not None and column is not None
        self.page.mouse.click(column["x"] + column["width"] / 2, at["y"] + at["height"] / 2)

    def frames(self) -> list[str]:
        """Return the call stack."""
        return self.page.locator(".jp-DebuggerCallstackFrame").all_inner_texts()

    def variables(self) -> dict[str, str]:
        """Return the variables that the tree shows."""
        names = self.page.locator(".jp-DebuggerVariables-body .jp-DebuggerVariables-name").all_inner_texts()
        values = self.page.locator(".jp-DebuggerVariables-body .jp-DebuggerVariables-detail").all_inner_texts()
        return {name.strip(" :"): value.strip() for name, value in zip(names, values, strict=False)}

    def press(self, button: str) -> None:
        """Press a button of the call stack: Next, Step In, Continue."""
        self.page.locator(f".jp-DebuggerSidebar [data-command='debugger:{button}']").first.click()

    def wait(self, condition: Callable[[], Any], what: str) -> None:
        """Wait until something is so."""
        self.book.wait(condition, what)


def test_gutter_breakpoint_stops_two_ranks(opened: Open) -> None:
    book = opened("%mesh up --procs 2", CELL, "mesh")
    book.run(0)
    book.idle()
    book.run(2)
    book.idle()
    tiles = book.output(2).locator(".mk-tile")
    tiles.nth(1).wait_for()
    panel = Panel(book)
    panel.start()
    panel.click_gutter(1, 6)
    book.page.locator(".jp-DebuggerBreakpoint").first.wait_for()
    book.run(1)
    # It shows one thread at a time.
    panel.wait(lambda: panel.frames() in ([work(0), top(0)], [work(1), top(1)]), "the stack of a rank")
    first = 0 if panel.frames()[0] == work(0) else 1
    panel.wait(lambda: panel.variables().get("n") == str(first + 5), "the variables of the first rank")
    book.page.locator(".cm-lineHighlight, .jp-DebuggerEditor-highlight").first.wait_for()
    book.shot("debugger_first_rank")
    other = 1 - first
    tiles.nth(other).click()
    panel.wait(lambda: panel.frames() == [work(other), top(other)], "the stack of the other rank")
    panel.wait(lambda: panel.variables().get("n") == str(other + 5), "its variables")
    assert panel.variables()["total"] == str(sum(range(other + 5)))
    book.shot("debugger_other_rank")
    panel.press("next")
    panel.wait(lambda: panel.frames() == [f"rank {other}: <module>\nCell [*]:9"], "the next line")
    book.shot("debugger_step")
    panel.press("continue")
    book.idle()
    assert "10" in book.text(1) and "15" in book.text(1)
    panel.wait(lambda: panel.frames() == [], "no stack")
    book.shot("debugger_over")


def work(rank: int) -> str:
    return f"rank {rank}: work\nCell [*]:6"


def top(rank: int) -> str:
    return f"rank {rank}: <module>\nCell [*]:8"


LOOP = """%%mesh
import os, sys
sys.path.insert(0, {folder!r})
from stepped import double
y = double(rank + 2)
for i in range(4):
    y = double(y)
y"""
MODULE = "def double(x):\n    y = x * 2\n    return y\n"


def stopped_in_loop(opened: Open, folder: Path) -> tuple[Book, Panel]:
    """Open a notebook whose ranks stand at a breakpoint of the gutter."""
    (folder / "stepped.py").write_text(MODULE)
    cells = ("%mesh up --procs 2", "%%mesh\nimport os\nos.getpid()", LOOP.format(folder=str(folder)), "%mesh", "mesh")
    book = opened(*cells)
    for number in (0, 1):
        book.run(number)
        book.idle()
    panel = Panel(book)
    panel.start()
    panel.click_gutter(2, 5)
    book.page.locator(".jp-DebuggerBreakpoint").first.wait_for()
    book.run(2)
    panel.wait(lambda: panel.frames(), "a rank stops")
    return book, panel


def pids(book: Book) -> list[int]:
    return [int(pid) for pid in re.findall(r"\[rank \d\] (\d+)", book.said(1))]


def test_breakpoint_in_a_module_file(opened: Open, lab: Lab, tmp_path: Path) -> None:
    book, panel = stopped_in_loop(opened, tmp_path)
    panel.press("stepIn")
    panel.wait(lambda: any("double" in each for each in panel.frames()), "a step goes into the module")
    # The front end opens the file in a tab.
    source = book.page.locator(".cm-editor:visible").filter(has_text="return y")
    line = source.locator(".cm-line").filter(has_text="return y")
    line.wait_for()
    gutter = source.locator(".cm-breakpoint-gutter .cm-gutterElement:not([style*='hidden'])").first
    gutter.wait_for(state="attached")
    column, at = gutter.bounding_box(), line.bounding_box()
    assert at is not None and column is not None
    book.page.mouse.click(column["x"] + column["width"] / 2, at["y"] + at["height"] / 2)
    panel.wait(lambda: book.page.locator(".jp-DebuggerBreakpoint").count() == 2, "the list has the breakpoint")
    book.shot("breakpoint-in-a-module")
    panel.press("continue")
    panel.wait(lambda: "y" in panel.variables() and "double" in "".join(panel.frames()[:1]), "it stops there")
    assert panel.variables()["y"] in ("4", "6"), panel.variables()
    book.shot("stopped-in-a-module")
    # The tab of the file comes to the front with each stop, so its notebook's button is not in reach.
    (session,) = lab.ask("sessions")
    lab.ask(f"kernels/{session['kernel']['id']}/interrupt", "POST")
    panel.wait(lambda: not panel.frames(), "Stop ends the cell")


def test_rank_killed_at_a_breakpoint_strands_nothing(opened: Open, tmp_path: Path) -> None:
    book, panel = stopped_in_loop(opened, tmp_path)
    os.kill(pids(book)[1], signal.SIGKILL)
    # Rank 0 stands at the breakpoint too, or is paused because of rank 1.
    book.wait(lambda: "killed by signal 9" in book.said(2) or "rank 1" not in "".join(panel.frames()), "it goes")
    book.shot("killed-at-a-breakpoint-before")
    if panel.frames():
        panel.press("continue")
    book.wait(lambda: "killed by signal 9" in book.said(2), "the cell tells of the death")
    book.idle()
    book.wait(lambda: not panel.frames(), "no rank stands")
    book.shot("killed-at-a-breakpoint")


def test_stop_at_a_breakpoint_strands_nothing(opened: Open, tmp_path: Path) -> None:
    book, panel = stopped_in_loop(opened, tmp_path)
    book.stop()
    book.wait(lambda: "KeyboardInterrupt" in book.said(2), "Stop ends the cell")
    book.idle()
    book.wait(lambda: not panel.frames(), "no rank stands")
    book.run(3)
    book.wait(lambda: "idle" in book.said(3), "ranks are idle")
    book.shot("stopped-at-a-breakpoint")


@pytest.mark.parametrize("end", ["restart", "close"])
def test_end_of_the_notebook_at_a_breakpoint_leaves_no_rank(opened: Open, lab: Lab, tmp_path: Path, end: str) -> None:
    book, _ = stopped_in_loop(opened, tmp_path)
    ranks = pids(book)
    if end == "restart":
        # The server refuses to end a kernel that it still restarts.
        book.evaluate("book.sessionContext.restartKernel()")
        book.wait(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in ranks), "the ranks end")
        book.until("book.sessionContext.session?.kernel?.status === 'idle'")
    else:
        book.page.goto("about:blank")
        lab.end_kernels()
    assert wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in ranks))


def test_page_closed_at_a_breakpoint_can_be_opened_again(opened: Open, lab: Lab, tmp_path: Path) -> None:
    book, _ = stopped_in_loop(opened, tmp_path)
    ranks = pids(book)
    name = next(each["path"] for each in lab.ask("sessions"))
    book.page.goto("about:blank")
    assert all(os.path.exists(f"/proc/{pid}") for pid in ranks)
    space = f"{lab.url}/lab/workspaces/again/tree/{name}?token={lab.token}"
    book.page.goto(space)
    book.page.wait_for_selector(".jp-NotebookPanel .jp-Notebook .jp-Cell")
    book.page.locator(".jp-NotebookPanel-toolbar [data-command='notebook:interrupt-kernel']").wait_for()
    book.stop()
    book.idle()
    book.run(3)
    book.wait(lambda: "idle" in book.said(3), "Stop has freed the ranks")
