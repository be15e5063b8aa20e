"""The Meshes panel and the widget in JupyterLab, with real ranks."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from typing import Any

import pytest

from browser.lab import AXE, Book, Lab, violations
from monarch._core.shapes.ranks import parse_ranks

Open = Callable[..., Book]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

TRAIN = """%%mesh
import time, monarch
for step in range(10_000):
    monarch.log_metric("loss", 1 / (1 + step) + rank / 10, step=step)
    if rank == 2: time.sleep(0.05)
    print("step", step, flush=True) if step % 10 == 0 else None
    time.sleep(0.05)
"""


@pytest.fixture
def quiet(opened: Open) -> Callable[..., tuple[Book, list[str]]]:
    """A function that opens a notebook, and the errors on the page's console since then."""

    def open_one(*cells: str) -> tuple[Book, list[str]]:
        book = opened(*cells)
        errors: list[str] = []
        book.page.on("console", lambda each: errors.append(each.text) if each.type == "error" else None)
        book.page.on("pageerror", lambda error: errors.append(str(error)))
        return book, errors

    return open_one


def panel(book: Book) -> Any:
    return book.page.locator("#monarch-meshes")


def show_panel(book: Book) -> Any:
    book.evaluate("app.commands.execute('monarch:show-meshes')")
    panel(book).locator(".mk-tile").first.wait_for()
    return panel(book)


def start(book: Book) -> None:
    book.run(0)
    book.idle()


def test_panel_follows_a_running_cell_and_stops_it(quiet: Any) -> None:
    book, errors = quiet("%mesh up 4", TRAIN, "1 + 1")
    start(book)
    view = show_panel(book)
    assert view.locator(".mk-tile").count() == 4
    book.run(1)
    view.locator(".mk-tile.mk-running, .mk-tile.mk-blocked").first.wait_for()
    view.locator(".mk-chart").first.wait_for()
    book.wait(lambda: "on ranks 0-3" in view.locator(".mk-calls").inner_text(), "the running cell in the panel")
    view.locator(".mk-tile").nth(2).click()
    view.locator(".mk-details .mk-code").first.wait_for()
    book.wait(lambda: "in <module>" in view.locator(".mk-details").inner_text(), "the live stack")
    book.shot("panel-running")
    view.locator(".mk-details .mk-close").click()
    view.get_by_role("button", name="Interrupt: all ranks").click()
    book.idle()
    # As after Stop.
    book.wait(lambda: "stopped: ranks 0-3: interrupted" in book.said(1), "what Stop says")
    assert "MeshCellError" not in book.said(1)
    book.wait(
        lambda: re.search(r"cell \[2\] stopped after", view.locator(".mk-calls").inner_text()), "the stopped cell"
    )
    assert not view.locator(".mk-calls .mk-bad").count()
    assert not errors


def test_panel_says_why_a_cell_waits_and_interrupts_it(quiet: Any) -> None:
    book, errors = quiet("%mesh up 4", "%%mesh\nif rank != 2: dist.all_reduce(torch.ones(1))")
    start(book)
    view = show_panel(book)
    book.run(1)
    cause = "ranks 0-1,3 wait for rank 2, which finished without calling all_reduce()"
    book.wait(lambda: f"stuck: {cause}" in view.locator(".mk-calls").inner_text(), "the cause in the panel")
    book.wait(lambda: f"stuck: {cause}" in book.said(1), "the cause below the cell")
    book.shot("panel-stuck")
    view.get_by_role("button", name="Interrupt: all ranks").click()
    book.idle()
    book.wait(lambda: f"when stopped: {cause}" in book.said(1), "the cause after the interrupt")
    assert not view.locator(".mk-waits").count()
    assert not errors


def test_ranks_are_paused_and_resumed_by_buttons_and_commands(quiet: Any) -> None:
    book, errors = quiet("%mesh up 4", TRAIN)
    start(book)
    view = show_panel(book)

    def button(name: str) -> Any:
        return view.get_by_role("button", name=re.compile(f"^{name}: "))

    at_rest = [True, False, True, True]
    names = ("Interrupt", "Pause", "Resume", "Heal")
    book.wait(lambda: [button(name).is_disabled() for name in names] == at_rest, "the buttons of idle ranks")
    assert button("Resume").get_attribute("title") == "None of these ranks is paused"
    book.run(1)
    book.wait(lambda: view.locator(".mk-tile.mk-running, .mk-tile.mk-blocked").count() == 4, "the running cell")
    button("Pause").click()
    view.locator(".mk-tile.mk-paused").nth(3).wait_for()
    item = book.page.locator(".mk-statusbar")
    book.wait(lambda: item.inner_text() == "4 ranks, 4 paused", "the status bar")
    book.wait(lambda: button("Pause").is_disabled() and not button("Interrupt").is_disabled(), "the buttons")
    view.locator(".mk-note").wait_for()
    button("Resume").click()
    book.wait(lambda: "resumed ranks 0-3" in view.locator(".mk-note").inner_text(), "the new answer")
    book.page.clock.install()
    book.used_up = True
    book.evaluate("app.commands.execute('monarch:pause-ranks')")
    view.locator(".mk-tile.mk-paused").nth(3).wait_for()
    book.evaluate("app.commands.execute('monarch:resume-ranks')")
    book.wait(lambda: not view.locator(".mk-tile.mk-paused").count(), "running ranks")
    button("Kill").click()
    view.get_by_role("alertdialog").wait_for()
    book.shot("panel-kill")
    view.get_by_role("button", name="Cancel").click()
    book.stop()
    book.idle()
    # The result of the last action goes by itself, after 12 s.
    book.page.clock.fast_forward(12_000)
    book.wait(lambda: not view.locator(".mk-note").count(), "no old answer")
    assert not errors


def test_chart_begins_again_with_the_second_run(quiet: Any) -> None:
    log = "%%mesh\nimport monarch\nfor step in range(51): monarch.log_metric('loss', {} + step / 50 + rank, step=step)"
    book, errors = quiet("%mesh up 2", log.format(1), log.format(7))
    start(book)
    view = show_panel(book)
    for number, text in ((1, "step 50: mean 2.5"), (2, "step 50: mean 8.5")):
        book.run(number)
        book.idle()
        book.wait(lambda text=text: text in view.locator(".mk-readout").first.inner_text(), text)
    book.shot("panel-second-run")
    # No line of the first run is left, whose values were below 3.
    spoken = view.locator("canvas[aria-label*=loss]").get_attribute("aria-label")
    assert "8.5" in spoken and "2.5" not in spoken
    assert not errors


def test_widget_shows_a_mesh_under_its_cell(quiet: Any) -> None:
    book, errors = quiet("%mesh up 4", "%mesh view", TRAIN)
    start(book)
    book.run(1)
    book.idle()
    tiles = book.output(1).locator(".mk-tile")
    tiles.nth(3).wait_for()
    assert not book.output(1).locator(".monarch-static").first.is_visible()
    book.run(2)
    book.output(1).locator(".mk-tile.mk-running, .mk-tile.mk-blocked").first.wait_for()
    book.shot("widget")
    book.stop()
    book.idle()
    assert not errors


def test_view_goes_on_when_another_of_its_mesh_is_cleared(quiet: Any) -> None:
    spin = "%%mesh\nimport time\nwhile True: time.sleep(0.01)"
    book, errors = quiet("%mesh up --procs 2", "mesh", "mesh", spin)
    start(book)
    for number in (1, 2):
        book.run(number)
        book.output(number).locator(".mk-tile").nth(1).wait_for()
    book.idle()
    book.evaluate("book.content.model.cells.get(1).outputs.clear()")
    book.wait(lambda: not book.output(1).locator(".mk-tile").count(), "one view is left")
    book.run(3)
    # Long before the view asks by itself whether the kernel is there.
    book.wait(lambda: book.output(2).locator(".mk-tile.mk-running").count() == 2, "the running cell", 10)
    book.stop()
    book.idle()
    # A rank that is pinned in one is pinned in the other.
    book.run(1)
    book.output(1).locator(".mk-tile").nth(1).click()
    book.output(2).locator(".mk-details").wait_for()
    assert not errors


@pytest.mark.skipif(not AXE.exists(), reason="axe is not installed; `make test-ts` installs it")
def test_view_and_panel_are_accessible_in_their_pages(quiet: Any) -> None:
    book, errors = quiet("%mesh up --procs 4", "mesh")
    start(book)
    book.run(1)
    book.output(1).locator(".mk-tile").nth(3).click()
    book.output(1).locator(".mk-details").wait_for()
    panel = show_panel(book)
    book.idle()
    for part in (".jp-OutputArea .mk-view", "#monarch-meshes"):
        assert not violations(book.page, part)
    panel.get_by_role("tab", name="Logs").click()
    panel.locator(".mk-logs").wait_for()
    assert not violations(book.page, "#monarch-meshes")
    assert not errors


def test_widget_is_used_by_keys_alone(quiet: Any) -> None:
    book, errors = quiet("%mesh up --procs 16", "mesh", "1 + 1")
    start(book)
    book.run(1)
    output, press = book.output(1), book.page.keyboard.press
    output.locator(".mk-tile").nth(15).wait_for()
    book.idle()
    output.get_by_role("button", name="Kill").focus()
    press("Enter")
    output.get_by_role("alertdialog").wait_for()
    press("Escape")
    output.get_by_role("alertdialog").wait_for(state="detached")
    output.get_by_role("button", name="Dump stacks").focus()
    press("Space")
    output.locator(".mk-note").wait_for()
    output.locator(".mk-tile[tabindex='0']").focus()
    # JupyterLab has its own uses for most of these keys.
    for key in ("ArrowRight", "ArrowDown", "ArrowDown", "ArrowUp", "Enter"):
        press(key)
    rank = book.page.evaluate("Number(document.activeElement.dataset.rank)")
    assert rank > 1
    output.locator(".mk-details h4", has_text=f"Rank {rank}").wait_for()
    press("Escape")
    output.locator(".mk-details").wait_for(state="detached")
    press("Control+End")
    press("Space")
    output.get_by_role("button", name="Kill: rank 15").wait_for()
    assert book.evaluate("[book.content.activeCellIndex, book.content.mode]") == [1, "command"]
    # Others go to the notebook as ever.
    press("Shift+Enter")
    book.until("book.content.activeCellIndex === 2")
    assert not errors


def test_buttons_act_while_a_cell_of_a_python_kernel_runs(opened: Open) -> None:
    spin = "%%mesh\nimport time\nwhile True: time.sleep(0.01)"
    book = opened("%load_ext monarch_kernel\n%mesh up --procs 2", "mesh", spin, kernel="python3")
    start(book)
    book.run(1)
    output = book.output(1)
    output.locator(".mk-tile").nth(1).wait_for()
    book.idle()
    book.run(2)
    book.wait(lambda: output.locator(".mk-tile.mk-running").count() == 2, "the running cell")
    output.get_by_role("button", name="Dump stacks").click()
    output.locator(".mk-note", has_text="in <module>").wait_for()
    output.get_by_role("button", name="Interrupt").click()
    book.idle()
    assert "interrupted" in book.said(2)


def test_view_says_at_once_that_its_kernel_was_killed(quiet: Any) -> None:
    book, _ = quiet("import os\nos.getpid()", "%mesh up --procs 2", "mesh", TRAIN)
    for number in range(3):
        book.run(number)
        book.idle()
    view = book.output(2)
    view.locator(".mk-tile").nth(1).wait_for()
    book.run(3)
    book.wait(lambda: view.locator(".mk-tile.mk-running, .mk-tile.mk-blocked").count() == 2, "the running cell")
    os.kill(int(book.said(0)), signal.SIGKILL)
    view.get_by_text("The kernel has ended or was restarted.").wait_for()
    assert not view.get_by_role("button", name="Interrupt").count()
    assert view.locator(".mk-title span").inner_text() == "2 ranks"
    book.used_up = True


def test_logs_are_filtered_by_rank_text_and_stream(quiet: Any) -> None:
    print_all = "%%mesh\nimport sys\nprint('hello from', rank)\nprint('careful', rank, file=sys.stderr)"
    book, errors = quiet("%mesh up 4", print_all)
    start(book)
    book.run(1)
    book.idle()
    show_panel(book)
    book.evaluate("app.commands.execute('monarch:show-logs')")
    code = panel(book).locator(".mk-logs .mk-code")
    book.wait(lambda: code.count() and "hello from 3" in code.inner_text(), "the log")
    panel(book).get_by_role("textbox", name="Ranks").fill("1-2")
    panel(book).get_by_label("Stream").select_option("stderr")
    book.wait(lambda: sorted(code.inner_text().split("\n")) == ["[1] careful 1", "[2] careful 2"], "the filter")
    book.shot("panel-logs")
    assert not errors


def test_log_follows_its_end_unless_somebody_reads_further_up(quiet: Any) -> None:
    noisy = "%%mesh\nimport time\nfor at in range(10_000):\n    print('line', at)\n    time.sleep(0.01)"
    book, errors = quiet("%mesh up 2", noisy)
    start(book)
    show_panel(book)
    book.evaluate("app.commands.execute('monarch:show-logs')")
    code = panel(book).locator(".mk-logs .mk-code")
    book.run(1)

    def below() -> float:
        """Return how many pixels of the log are below what is visible."""
        return code.evaluate("box => box.scrollHeight - box.scrollTop - box.clientHeight")

    # More lines than are shown: their number no longer changes.
    book.wait(lambda: "Show older lines" in panel(book).inner_text() and below() < 2, "the end of the log")
    last = code.inner_text()
    book.wait(lambda: code.inner_text() != last and below() < 2, "the end of more lines")
    assert panel(book).get_by_label("Stream").is_visible()
    book.shot("panel-logs-end")
    code.evaluate("box => { box.scrollTop = 100; }")
    newer = panel(book).get_by_role("button", name="Show newer lines")
    newer.wait_for()
    held = code.inner_text()
    assert (code.evaluate("box => box.scrollTop"), code.inner_text()) == (100, held)
    newer.click()
    book.wait(lambda: code.inner_text() != held and below() < 2, "the end again")
    book.stop()
    book.idle()
    assert not errors


def test_panel_shows_the_mesh_of_another_notebook(quiet: Any, opened: Open) -> None:
    far = opened("%mesh up trainers --procs 3", TRAIN)
    start(far)
    book, errors = quiet("1 + 1")
    book.evaluate("app.commands.execute('monarch:show-meshes')")
    view = panel(book)
    row = view.locator(".mk-mesh").filter(has_text="trainers")
    row.wait_for()
    assert "No mesh is running" in view.inner_text() and "book" in row.inner_text()
    assert not book.page.locator(".mk-statusbar").is_visible()
    book.shot("panel-empty")
    row.click()
    view.locator(".mk-tile").nth(2).wait_for()
    far.run(1)
    view.locator(".mk-tile.mk-running, .mk-tile.mk-blocked").first.wait_for()
    view.locator(".mk-chart").first.wait_for()
    assert not view.locator(".mk-actions").count()
    view.locator(".mk-tile").nth(1).click()
    view.get_by_role("heading", name="Rank 1").wait_for()
    book.shot("panel-of-another")
    far.stop()
    far.idle()
    assert not errors


def test_failed_rank_is_shown_and_healed_from_the_panel(quiet: Any) -> None:
    book, errors = quiet("%mesh up 4", "%%mesh\nimport os\nif rank == 1: os._exit(3)")
    start(book)
    show_panel(book)
    book.run(1)
    book.idle()
    tile = panel(book).locator(".mk-tile.mk-failed")
    tile.wait_for()
    item = book.page.locator(".mk-statusbar")
    book.wait(lambda: "1 dead" in item.inner_text(), "the status bar")
    book.evaluate("app.commands.execute('monarch:next-failed-rank')")
    panel(book).get_by_role("heading", name="Rank 1").wait_for()
    book.shot("panel-failed")
    panel(book).get_by_role("button", name=re.compile("^Heal")).click()
    tile.wait_for(state="detached")
    assert not errors


def test_badge_names_the_ranks_of_a_cell_and_changes_them(quiet: Any) -> None:
    book, errors = quiet("%mesh up 4", "%%mesh [0:2] --timeout 20\nrank")
    start(book)
    badge = book.cell(1).locator(".mk-badge")
    book.wait(lambda: badge.count() and "0-1" in badge.inner_text(), "the badge")
    # JupyterLab has a toolbar on the active cell only.
    in_toolbar = book.cell(1).locator(".jp-cell-toolbar .mk-badge")
    in_toolbar.wait_for()
    book.shot("badge-active")
    book.cell(0).locator(".cm-content").click()
    in_toolbar.wait_for(state="detached")
    assert badge.is_visible() and "0-1" in badge.inner_text()
    book.shot("badge")
    # In a narrow notebook the toolbar stays.
    show_panel(book)
    book.cell(1).locator(".cm-content").click()
    in_toolbar.wait_for()
    book.cell(1).locator(".jp-cell-toolbar [data-command='notebook:move-cell-up']").wait_for()
    book.shot("badge-narrow")
    book.cell(0).locator(".cm-content").click()
    in_toolbar.wait_for(state="detached")
    badge.click()
    book.page.locator(".jp-Dialog input").fill("[3]")
    book.page.locator(".jp-Dialog .jp-mod-accept").click()
    book.until("book.content.widgets[1].model.sharedModel.source.startsWith('%%mesh [3] --timeout 20\\nrank')")
    book.wait(lambda: re.search(r"\b3$", badge.inner_text()), "the new badge")
    assert not errors


def test_badge_says_what_is_wrong_with_a_first_line(quiet: Any) -> None:
    book, errors = quiet("%mesh up 2", "%%mesh others\n1", "%%mesh --timeout 10 [0]\n1")
    start(book)
    badges = [book.cell(number).locator(".mk-badge") for number in (1, 2)]
    book.wait(lambda: all(badge.count() for badge in badges), "the badges")
    texts = [badge.text_content() for badge in badges]
    assert texts == ["⚠ no mesh 'others'; running: mesh", "⚠ write %%mesh [0] --timeout 10"]
    assert all("mk-wrong" in badge.get_attribute("class") for badge in badges)
    book.shot("badge-wrong")
    assert not errors


def test_commands_act_while_the_panel_is_closed(quiet: Any) -> None:
    book, errors = quiet("%mesh up 2", TRAIN)
    badge = book.cell(1).locator(".mk-badge")
    book.wait(lambda: "No mesh is running" in panel(book).text_content(), "the answer of the kernel")
    assert not badge.count()
    start(book)
    book.wait(lambda: badge.count() and "all ranks" in badge.inner_text(), "the badge, after a mesh has come")
    book.run(1)
    book.wait(lambda: "step 0" in book.said(1), "the running cell")
    assert not panel(book).is_visible()
    book.evaluate("app.commands.execute('monarch:dump-stacks')")
    stacks = book.page.locator(".jp-Dialog .mk-outcome")
    stacks.wait_for()
    # Ranks of a loop are at one line or at two.
    named = re.findall(r"\branks? ([\d,-]+):", stacks.inner_text())
    assert {rank for ranks in named for rank in parse_ranks(ranks)} == {0, 1} and "in <module>" in stacks.inner_text()
    book.shot("command-stacks")
    book.page.locator(".jp-Dialog .jp-mod-accept").click()
    book.evaluate("app.commands.execute('monarch:interrupt-ranks')")
    book.idle()
    assert not panel(book).is_visible() and not errors


def test_commands_say_what_is_missing_without_ranks(quiet: Any, opened: Open) -> None:
    book, errors = quiet("1")
    toast = book.page.locator(".Toastify__toast")
    book.wait(lambda: "No mesh is running" in panel(book).text_content(), "the answer of the kernel")
    book.evaluate("app.commands.execute('monarch:interrupt-ranks')")
    book.wait(lambda: "No mesh is running" in "".join(toast.all_inner_texts()), "the notification")
    other = opened("1", kernel="python3")
    other.evaluate("app.commands.execute('monarch:heal')")
    toast = other.page.locator(".Toastify__toast")
    other.wait(lambda: "Select the Monarch kernel" in "".join(toast.all_inner_texts()), "the notification")
    assert not errors


def test_panel_comes_back_after_a_restart_of_the_kernel(quiet: Any) -> None:
    book, errors = quiet("%mesh up 2")
    start(book)
    show_panel(book)
    book.menu("Kernel", "Restart Kernel…")
    book.page.locator(".jp-Dialog-button.jp-mod-accept").click()
    book.wait(lambda: "No mesh is running" in panel(book).inner_text(), "the empty panel")
    start(book)
    panel(book).locator(".mk-tile").nth(1).wait_for()
    assert not errors


def test_panel_finds_a_python_kernel_again_after_a_reload(opened: Open) -> None:
    book = opened("get_ipython().run_line_magic('load_ext', 'monarch_kernel')\n%mesh up 2", kernel="python3")
    start(book)
    show_panel(book)
    book.page.reload()
    book.page.wait_for_selector(".jp-NotebookPanel .jp-Notebook .jp-Cell")
    book.until("book?.sessionContext?.session?.kernel?.status === 'idle'")
    assert show_panel(book).locator(".mk-tile").count() == 2


def test_reloaded_page_shows_the_output_and_the_panel_again(quiet: Any) -> None:
    book, errors = quiet("%mesh up 2", TRAIN)
    start(book)
    book.run(1)
    book.wait(lambda: "step 20" in book.text(1), "output")
    book.page.reload()
    book.page.wait_for_selector(".jp-NotebookPanel .jp-Notebook .jp-Cell")
    book.until("book?.content?.model?.cells?.length > 1")
    # Both what came before and what comes after.
    book.wait(lambda: "step 0" in book.said(1) and "step 60" in book.said(1), "the output so far, and more")
    show_panel(book).locator(".mk-tile.mk-running, .mk-tile.mk-blocked").first.wait_for()
    book.shot("reloaded")
    book.stop()
    book.idle()
    assert not errors


def test_second_page_shows_output_of_cells_of_the_first(quiet: Any, opened: Open) -> None:
    book, errors = quiet(
        "%mesh up 2", "%%mesh\nprint('from', rank)", "import time\nprint('begun'); time.sleep(2); 40 + 2"
    )
    start(book)
    book.evaluate("app.commands.execute('docmanager:save')")
    book.until("!book.context.model.dirty")
    other = opened(name=book.evaluate("book.context.path"))
    try:
        show_panel(other)
        for cell, said in (1, "from 1"), (2, "begun"), (2, "42"):
            if said != "42":
                book.run(cell)
            other.wait(lambda cell=cell, said=said: said in other.said(cell), said)
        book.idle()
        # Otherwise both pages would ask which of them to save.
        other.wait(lambda: not other.evaluate("book.context.model.dirty"), "an unchanged notebook")
        other.shot("second-page")
    finally:
        other.page.close()
    assert not errors


def test_reopened_page_has_theme_panel_and_moving_picture(quiet: Any, opened: Open, lab: Lab) -> None:
    book, errors = quiet("%mesh up 2", "mesh", "%mesh down")
    book.evaluate("app.commands.execute('apputils:change-theme', {theme: 'JupyterLab Dark'})")
    book.until("document.body.dataset.jpThemeLight === 'false'")
    start(book)
    book.run(1)
    book.idle()
    show_panel(book)
    book.evaluate("app.commands.execute('docmanager:save')")
    book.until("!book.context.model.dirty")
    again = opened(name=book.evaluate("book.context.path"))
    book.page.close()
    try:
        # A new workspace has no panel; a page that is loaded again has it as it was.
        show_panel(again)
        again.until("app.restored")
        again.wait(lambda: again.output(1).locator(".mk-tile").count() == 2, "the live view")
        mine = "list.values.find(each => location.pathname.includes(each.metadata.id))"
        right = f"{mine}?.data['layout-restorer:data']?.right?.current"
        saved = f"app.serviceManager.workspaces.list().then(list => {right} === 'monarch-meshes')"
        again.wait(lambda: again.evaluate(saved), "the saved workspace")
        again.page.reload()
        again.page.wait_for_selector("#monarch-meshes .mk-tile")
        again.wait(lambda: again.output(1).locator(".mk-tile").count() == 2, "the live view")
        views = again.page.locator(".mk-view")
        again.wait(lambda: views.evaluate_all("all => all.every(e => e.className === 'mk-view mk-dark')"), "the theme")
        assert views.count() == 2
        again.shot("reopened-dark")
        # The page may have drawn the notebook before it has made it the current one.
        again.until("book?.content")
        assert "2 idle" in again.said(1)
        again.run(2)
        again.idle()
        again.wait(lambda: "2 stopped" in again.said(1), "the picture of the page before")
        again.shot("reopened-picture")
    finally:
        again.evaluate("app.commands.execute('apputils:change-theme', {theme: 'JupyterLab Light'})")
        again.until("document.body.dataset.jpThemeLight === 'true'")
    assert not errors


def test_launcher_opens_a_notebook_that_starts_a_mesh(opened: Open, lab: Lab) -> None:
    book = opened("1")
    book.page.goto(f"{lab.url}/lab/workspaces/fresh?token={lab.token}")
    book.page.locator(".jp-LauncherCard[title*='starts a mesh']").click()
    book.until("book?.content?.widgets?.[0]?.model.sharedModel.source === '%mesh up 4'")


def test_logs_stay_where_they_are_read(quiet: Any) -> None:
    """The window over the log slides meanwhile."""
    more = "for i in range(3000): print('line', i)\nwhile True:\n    i += 1; print('line', i); time.sleep(0.05)"
    book, errors = quiet("%mesh up 2", f"%%mesh\nimport time\n{more}")
    start(book)
    view = show_panel(book)
    book.run(1)
    view.get_by_role("tab", name="Logs").click()
    view.get_by_role("button", name="Show older lines").wait_for()
    box, newer = view.locator(".mk-logs .mk-code"), view.get_by_role("button", name="Show newer lines")
    read = "box => [box.scrollTop, box.firstElementChild.innerText]"
    box.evaluate("box => { box.scrollTop = 700; }")
    newer.wait_for()
    top, first = box.evaluate(read)
    # The kernel has sent later lines since.
    book.page.wait_for_timeout(2500)
    assert box.evaluate(read) == [top, first] and top == 700
    book.shot("logs-held")
    view.get_by_role("button", name="Show older lines").click()
    book.wait(lambda: box.evaluate("box => box.scrollTop") > 2000, "older lines above those that are read")
    newer.click()
    book.wait(lambda: not newer.count(), "the newest lines")
    assert box.evaluate("box => box.scrollHeight - box.scrollTop - box.clientHeight") < 24
    book.stop()
    book.idle()
    assert not errors
