"""The prompt of a breakpoint in JupyterLab: its input box goes when nobody waits for the answer."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable

import pytest

from browser.lab import Book

Open = Callable[..., Book]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
BOX = ".jp-Stdin-input"


def test_box_goes_when_ranks_are_resumed_in_the_panel(opened: Open) -> None:
    book = opened("%mesh up --procs 2", "%%mesh\nbreakpoint()\nprint('after')", "print('next')", "%%mesh spawn aa")
    book.run(0)
    book.idle()
    book.until("book.node.querySelectorAll('.mk-badge').length >= 2")
    assert not book.page.locator(".mk-badge.mk-wrong").count()
    book.run(1)
    book.page.locator(BOX).wait_for()
    book.until("book.sessionContext.pendingInput")
    book.page.locator(BOX).fill("half a line")
    book.evaluate("app.commands.execute('monarch:resume-ranks')")
    book.wait(lambda: "after" in book.said(1), "the cell goes on")
    book.idle()
    assert not book.page.locator(BOX).count()
    book.run(2)
    book.wait(lambda: "next" in book.said(2), "a cell runs after the prompt")
    assert "input box" not in book.said(1)
    book.shot("prompt-over")


def test_prompt_of_a_killed_rank_ends_with_a_clear_line(opened: Open) -> None:
    cell = "%%mesh\nx = rank\nif rank == 1: breakpoint()\ndist.barrier()"
    book = opened("%mesh up --procs 2", "%%mesh\nimport os\nos.getpid()", cell, "%mesh", "%%mesh [0]\nx + 40")
    for number in (0, 1):
        book.run(number)
        book.idle()
    pid = int(re.findall(r"\[rank 1\] (\d+)", book.said(1))[0])
    book.run(2)
    book.page.locator(BOX).wait_for()
    book.until("book.sessionContext.pendingInput")
    os.kill(pid, signal.SIGKILL)
    book.wait(lambda: "killed by signal 9" in book.said(2), "the cell says that the rank is dead")
    book.idle()
    assert not book.page.locator(BOX).count()
    book.shot("prompt-of-a-killed-rank")
    assert re.search(r"rank 1 was killed by signal 9 \(SIGKILL\) at cell \[\d+\] line 3", book.said(2)), book.said(2)
    assert "ranks that waited for it continue" in book.said(2), book.said(2)
    book.run(4)
    book.wait(lambda: "[rank 0] 40" in book.said(4), "the other rank goes on")
