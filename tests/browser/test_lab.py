"""JupyterLab as users see it: cells on ranks, errors, the stop button, completion."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable

import nbformat
import pytest

from browser.lab import Book, Lab
from leaks import wait_until
from quickstart import short_quickstart

Open = Callable[..., Book]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def ranks(book: Book, number: int) -> list[int]:
    """Return the process ids that ranks printed in a cell."""
    return [int(pid) for pid in re.findall(r"pid (\d+)", book.text(number))]


def test_launcher_has_the_kernel(opened: Open, lab: Lab) -> None:
    book = opened("1")
    book.page.goto(f"{lab.url}/lab/workspaces/empty?token={lab.token}")
    card = book.page.locator(".jp-LauncherCard[title*='Monarch']").first
    card.wait_for(timeout=20_000)
    assert "Monarch" in card.inner_text()
    logo = card.locator("img")
    assert logo.count() == 1 and logo.evaluate("image => image.complete && image.naturalWidth > 0")
    book.shot("launcher")


def test_lab_shows_outputs_and_errors(opened: Open) -> None:
    book = opened(
        "%mesh up --procs 4",
        "%%mesh\nprint('hello')\nworld_size",
        "%%mesh\ntorch.ones(2, 3) * rank\n[rank] * 3",
        "%%mesh\nwords = ['zero', 'one']\nwords[rank]",
        "%mesh",
    )
    for number in range(5):
        book.run(number)
        book.idle()
    up = book.text(0).strip()
    assert re.fullmatch(r"mesh 'mesh' is up: procs=4, in \d+\.\d\d s", up), "progress is written over"
    assert "[ranks 0-3] hello" in book.text(1) and "all 4 ranks" in book.text(1)
    assert [f"rank {rank}" in book.text(2) for rank in range(4)] == [True] * 4
    boxes = book.output(2).locator("div[style*='min-width']")
    tops = {round(boxes.nth(at).bounding_box()["y"]) for at in range(boxes.count())}
    assert boxes.count() == 4 and len(tops) < 4, "values stand side by side"
    error = book.text(3)
    assert "failed on ranks 2-3" in error and "words[rank]" in error and "monarch_kernel" not in error
    folded = book.output(3).locator("details")
    assert folded.count() == 1 and not folded.evaluate("element => element.open")
    book.shot("outputs")
    folded.locator("summary").click()
    assert "IndexError: list index out of range" in folded.inner_text()
    book.cell(3).scroll_into_view_if_needed()
    book.shot("error")


def test_output_is_readable_in_the_dark_theme(opened: Open) -> None:
    book = opened("%mesh up --procs 2", "%%mesh\nrank * 10", "%%mesh\n1 / rank")
    book.evaluate("app.commands.execute('apputils:change-theme', {theme: 'JupyterLab Dark'})")
    for number in range(3):
        book.run(number)
        book.idle()
    book.until("document.body.dataset.jpThemeLight === 'false'")
    badge = book.output(1).locator("span").first
    colours = badge.evaluate("e => { const s = getComputedStyle(e); return [s.color, s.backgroundColor]; }")
    assert colours[0] != colours[1]
    book.shot("dark")
    book.evaluate("app.commands.execute('apputils:change-theme', {theme: 'JupyterLab Light'})")


def test_stop_button_stops_all_ranks(opened: Open) -> None:
    book = opened(
        "%mesh up --procs 4",
        "%%mesh\nkept = rank\nprint('runs')\nwhile True: pass",
        "%%mesh\nkept",
    )
    book.run(0)
    book.idle()
    book.run(1)
    book.wait(lambda: "runs" in book.text(1), "the cell runs")
    begun = time.perf_counter()
    book.stop()
    book.idle()
    taken = time.perf_counter() - begun
    print(f"idle {taken:.2f} s after the click")
    assert taken < 10
    assert "stopped: ranks 0-3: interrupted" in book.text(1)
    book.run(2)
    book.idle()
    assert "rank 3" in book.text(2)
    book.shot("stopped")


def test_menu_restart_leaves_no_rank(opened: Open) -> None:
    book = opened("%mesh up --procs 2", "%%mesh\nimport os\nprint('pid', os.getpid())")
    for number in range(2):
        book.run(number)
        book.idle()
    pids = ranks(book, 1)
    assert len(pids) == 2
    book.menu("Kernel", "Restart Kernel…")
    book.page.locator(".jp-Dialog-button.jp-mod-accept").click()
    assert wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids), 10)
    book.idle()


def test_long_output_does_not_stall_the_page(opened: Open) -> None:
    book = opened(
        "%mesh up --procs 8",
        "%%mesh\nfor i in range(1250): print('line', rank, i)",
        "%mesh log",
    )
    book.run(0)
    book.idle()
    book.run(1)
    slowest = 0.0
    while True:
        begun = time.perf_counter()
        status = book.evaluate("book.sessionContext.session.kernel.status")
        slowest = max(slowest, time.perf_counter() - begun)
        # The cell shows five thousand of the lines, and their end; maybe drawn after the kernel is idle.
        said = book.said(1)
        if status == "idle" and "more lines of this cell" in said and said.count("line ") > 5_000:
            break
        book.page.wait_for_timeout(50)
    print(f"the page answered within {slowest:.2f} s")
    assert slowest < 5
    book.run(2)
    book.idle(60)
    everything = book.evaluate("book.content.model.cells.get(2).outputs.get(0).toJSON().text")
    text = everything if isinstance(everything, str) else "".join(everything)
    for rank in range(8):
        assert all(f"line {rank} {i}\n" in text for i in (0, 600, 1249))
    assert text.count("line ") == 10_000


def test_completion_works_while_typing(opened: Open) -> None:
    book = opened(
        "%mesh up --procs 2",
        "%%mesh\nclass Thing:\n    def method_on_ranks(self, a, b=2):\n        '''Said on the rank.'''\n"
        "thing_here = Thing()",
        "%%mesh\nthing_",
        "%%mesh\nthing_here.method_on_ranks",
    )
    for number in range(2):
        book.run(number)
        book.idle()
    book.cell(2).locator(".cm-content").click()
    book.page.keyboard.press("Control+End")
    book.page.keyboard.press("Tab")
    item = book.page.locator(".jp-Completer-item", has_text="thing_here")
    item.first.wait_for(timeout=10_000)
    book.shot("completion")
    book.page.keyboard.press("Enter")
    book.until("book.content.widgets[2].model.sharedModel.source.includes('thing_here')")
    book.cell(3).locator(".cm-content").click()
    book.page.keyboard.press("Control+End")
    book.page.keyboard.press("Shift+Tab")
    tip = book.page.locator(".jp-Tooltip")
    tip.wait_for(timeout=10_000)
    assert "(a, b=2)" in tip.inner_text() and "Said on the rank." in tip.inner_text()
    book.shot("tooltip")


BODY = "for i in range(3):\n    x = 1.5 + len('text')  # comment"


def test_cell_body_is_highlighted_as_python(opened: Open) -> None:
    lines = ("%%mesh", "%%mesh trainers[gpus=0:4, hosts=1] --timeout 10", "%%mesh [::2] --out it")
    book = opened(BODY, *(f"{line}\n{BODY}" for line in lines))

    def tokens(number: int) -> list[tuple[str, str]]:
        spans = book.cell(number).locator(".cm-line span")
        return [tuple(pair) for pair in spans.evaluate_all("all => all.map(e => [e.textContent, e.className])")]

    book.wait(lambda: len(tokens(0)) > 4, "colours")
    plain = tokens(0)
    assert {"for", "in", "1.5", "'text'", "# comment"} <= {text for text, _ in plain}
    for number in range(1, 1 + len(lines)):
        book.wait(lambda number=number: tokens(number)[-len(plain) :] == plain, f"colours of {lines[number - 1]}")


def test_figures_of_several_ranks_are_shown(opened: Open) -> None:
    pytest.importorskip("matplotlib")
    book = opened(
        "%mesh up --procs 4",
        "%%mesh\nimport matplotlib.pyplot as plt\nfig, ax = plt.subplots(figsize=(3, 2))\n"
        "ax.plot([0, rank])\nax.set_title(f'rank {rank}');",
    )
    for number in range(2):
        book.run(number)
        book.idle(60)
    images = book.output(1).locator("img")
    book.wait(lambda: images.count() == 4, "a figure of each rank")
    assert images.evaluate_all("all => all.every(image => image.complete && image.naturalWidth > 100)")
    book.shot("figures")


def test_quickstart_runs_in_the_browser(opened: Open, lab: Lab) -> None:
    pytest.importorskip("sklearn")
    nbformat.write(short_quickstart(), lab.root / "quickstart.ipynb")
    book = opened(name="quickstart.ipynb")
    book.run_all(150)
    cells = book.evaluate("[...book.content.model.cells].map(cell => cell.id)")
    book.wait(lambda: "is down" in book.said(cells.index("down")), "the last cell", 60)
    assert "[ranks 0-3] hello from all of us" in book.said(cells.index("folded"))
    assert "failed on ranks 2-3" in book.said(cells.index("error"))
    assert re.search(r"test accuracy 9[5-9]\.\d%", book.said(cells.index("result")))
    # Only visible outputs are on the page.
    book.evaluate("book.content.scrollToItem(args[0])", cells.index("train"))
    plot = book.output(cells.index("train")).locator("img")
    plot.first.wait_for(timeout=10_000)
    assert plot.count() == 1 and plot.evaluate("image => image.complete && image.naturalWidth > 300")
    book.shot("quickstart-plot")
    book.evaluate("book.content.scrollToItem(args[0])", cells.index("error"))
    book.output(cells.index("error")).get_by_text("failed on ranks 2-3").first.wait_for(timeout=10_000)
    book.shot("quickstart-error")


def test_line_about_running_ranks_leaves_no_gap(opened: Open) -> None:
    book = opened("%mesh up 2", "%%mesh\nimport time\nif rank == 1: time.sleep(6)\nrank", "%%mesh\nrank")
    for number in (0, 2):
        book.run(number)
        book.idle()
    book.run(1)
    book.wait(lambda: re.search("rank 1 running for .*, rank 0 finished", book.text(1)), "the line")
    book.shot("waiting")
    book.idle()
    assert "running" not in book.text(1)
    heights = [book.output(number).evaluate("e => e.getBoundingClientRect().height") for number in (1, 2)]
    assert heights[0] == heights[1], "the same result takes the same room"
    book.shot("waiting-over")
