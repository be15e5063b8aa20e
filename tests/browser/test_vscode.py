"""Live views in VS Code's notebook: its own bundle of the widgets in a page, with a kernel behind it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from browser.editor import FILES, Editor
from browser.lab import Lab
from leaks import Kit

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
Open = Callable[..., Editor]
THEMES = {
    "vscode-light": "light",
    "vscode-dark": "dark",
    "vscode-high-contrast": "dark",
    "vscode-high-contrast-light": "light",
}
BEHIND = "getComputedStyle(document.documentElement).getPropertyValue('--vscode-editor-background')"
INK = "element => getComputedStyle(element).color"


@pytest.fixture
def window(context: Any, lab: Lab, leaks: Kit) -> Iterator[Open]:
    """A function that opens a window; its kernels end with the test."""
    missing = [path.name for path in FILES.values() if not path.exists()]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed; `make test-ts` installs the packages of the front end")
    pages: list[Any] = []

    def open_one(theme: str = "vscode-light") -> Editor:
        page = context.new_page()
        pages.append(page)
        return Editor(page, lab, theme)

    # The server and the browser start before the test.
    leaks.rebase()
    yield open_one
    for page in pages:
        page.close()
    lab.end_kernels()
    leaks.rebase()


def contrast(editor: Editor, element: Any) -> float:
    """Return the contrast of an element's text with what the editor has behind the page."""

    def luminance(channels: list[float]) -> float:
        parts = [each / 255 for each in channels]
        red, green, blue = (each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    behind = editor.frame.evaluate(BEHIND).strip()
    ink = [float(each) for each in re.findall(r"[\d.]+", element.evaluate(INK))[:3]]
    low, high = sorted((luminance([int(behind[at : at + 2], 16) for at in (1, 3, 5)]), luminance(ink)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("ranks", [8, 1, 64])
def test_view_is_live_and_its_buttons_act_while_a_cell_runs(window: Open, ranks: int) -> None:
    editor = window("vscode-dark").start()
    editor.run(f"%mesh up --procs {ranks}")
    view = editor.cell(editor.run("mesh"))
    view.locator(".mk-tile").nth(ranks - 1).wait_for()
    # The static picture below it is for notebooks without a kernel.
    assert view.locator(".monarch-static").count() == 1 and not view.locator(".monarch-static").is_visible()
    number = editor.send("%%mesh\nimport time\nwhile True: time.sleep(0.01)")
    editor.wait(lambda: re.search(rf"running\s+{ranks}\b", view.inner_text()), "the view shows running ranks")
    assert editor.is_running(number)
    editor.shot(f"running-{ranks}")
    view.get_by_role("button", name="Dump stacks").click()
    stacks = view.locator(".mk-note", has_text="cell [3]:3 in <module>")
    stacks.wait_for()
    assert editor.is_running(number)
    view.get_by_role("button", name="Interrupt").click()
    editor.wait(lambda: not editor.is_running(number), "the cell ends")
    assert "interrupted" in editor.text(number)
    editor.wait(lambda: re.search(rf"idle\s+{ranks}\b", view.inner_text()), "the view shows idle ranks")
    assert not editor.problems()


def test_view_and_picture_are_readable_in_each_theme(window: Open) -> None:
    editor = window().start()
    editor.run("%mesh up --procs 8")
    editor.run("%mesh view")
    title = editor.frame.locator(".mk-title h3")
    title.wait_for()
    assert title.evaluate("element => getComputedStyle(element).fontFamily").endswith("sans-serif")
    offline = window().open(editor.saved())
    picture = offline.frame.locator(".monarch-static b")
    for theme, kind in THEMES.items():
        editor.theme(theme)
        editor.frame.locator(f".mk-view.mk-{kind}").wait_for()
        offline.theme(theme)
        editor.shot(f"view-{theme}")
        offline.shot(f"picture-{theme}")
        assert contrast(editor, title) > 7 and contrast(offline, picture) > 7, theme
    editor.theme("vscode-dark", white_widgets=True)
    editor.frame.locator(".mk-view.mk-light").wait_for()
    assert not editor.problems() and not offline.problems()


def test_reopened_notebook_shows_the_picture_until_its_cell_runs(window: Open) -> None:
    first = window().start()
    first.run("%mesh up --procs 2")
    number, other = first.run("mesh"), first.run("%mesh view")
    first.frame.locator(".mk-tile").nth(3).wait_for()
    (kernel,) = [each["kernel"] for each in first.lab.ask("sessions")]
    second = window().open(first.saved(), kernel)
    assert "live view of mesh 'mesh': procs=2" in second.text(number) and "2 ranks: 2 idle" in second.text(number)
    assert second.run("mesh", number) == number
    second.frame.locator(".mk-tile").nth(1).wait_for()
    assert not second.cell(number).locator(".monarch-static").is_visible()
    assert second.cell(other).locator(".monarch-static").is_visible()
    # Both windows show the mesh from now on.
    running = second.send("%%mesh [0]\nimport time\nwhile True: time.sleep(0.01)")
    for each in (first, second):
        each.wait(lambda each=each: re.search(r"running\s+1\b", each.text(number)), "both views show the running rank")
    first.cell(number).get_by_role("button", name="Interrupt").click()
    second.wait(lambda: not second.is_running(running), "the cell ends")
    assert not first.problems() and not second.problems()


def test_view_of_a_rerun_cell_takes_over_its_conversation(window: Open) -> None:
    editor = window().start()
    editor.run("%mesh up --procs 2")
    number = editor.run("mesh")
    editor.frame.locator(".mk-tile").nth(1).wait_for()
    for _ in range(3):
        editor.run("mesh", number)
        editor.wait(lambda: editor.cell(number).locator(".mk-tile").count() == 2, "the new view")
    running = editor.send("%%mesh\nimport time\nwhile True: time.sleep(0.01)")
    editor.wait(lambda: re.search(r"running\s+2\b", editor.text(number)), "the view shows running ranks")
    assert editor.page.evaluate("editor.forwarded.filter(kind => kind === 'open').length") == 1
    editor.cell(number).get_by_role("button", name="Interrupt").click()
    editor.wait(lambda: not editor.is_running(running), "the cell ends")
    # Without a view on the page, the kernel sends nothing.
    last = "editor.forwarded.filter(kind => kind === 'open' || kind === 'close').at(-1)"
    editor.page.clock.install()
    editor.page.evaluate("number => editor.clear(editor.cells[number])", number)
    editor.wait(lambda: not editor.cell(number).locator(".mk-tile").count(), "the cleared cell")
    editor.page.clock.fast_forward(15_000)
    editor.wait(lambda: editor.page.evaluate(last) == "close", "the end of the messages")
    editor.run("mesh", number)
    editor.wait(lambda: re.search(r"idle\s+2\b", editor.text(number)), "the view that is shown again")
    assert editor.page.evaluate(last) == "open"
    assert not editor.problems()


def test_view_of_a_python_kernel_says_that_an_action_waits(window: Open) -> None:
    editor = window().start("python3")
    editor.run("%load_ext monarch_kernel\n%mesh up --procs 2")
    view = editor.cell(editor.run("mesh"))
    view.locator(".mk-tile").nth(1).wait_for()
    number = editor.send("%%mesh\nimport time\nwhile True: time.sleep(0.01)")
    editor.wait(lambda: re.search(r"running\s+2\b", view.inner_text()), "the view shows running ranks")
    view.get_by_role("button", name="Dump stacks").click()
    view.get_by_text("waiting for the running cell to end").wait_for()
    editor.page.evaluate("editor.kernel.interrupt()")
    editor.wait(lambda: not editor.is_running(number), "the cell ends")
    view.locator(".mk-note").wait_for()
    assert not view.get_by_text("waiting for").count()
    assert not editor.problems()


def test_keys_press_each_button_of_a_view_once(window: Open) -> None:
    editor = window().start()
    editor.run("%mesh up --procs 2")
    number = editor.run("mesh")
    stacks = editor.cell(number).get_by_role("button", name="Dump stacks")
    stacks.wait_for()
    editor.wait(lambda: stacks.get_attribute("tabindex") == "0", "the editor has looked at the buttons")
    for count, key in enumerate(("Enter", "Space"), 1):
        stacks.press(key)
        editor.cell(number).locator(".mk-note").wait_for()
        assert editor.page.evaluate("editor.forwarded.filter(kind => kind === 'act').length") == count
        editor.wait(lambda: not stacks.is_disabled(), "the button can be pressed again")
    assert not editor.problems()


def test_progress_of_ranks_stays_in_one_line(window: Open) -> None:
    editor = window("vscode-dark").start()
    editor.run("%mesh up --procs 2")
    code = "import time\nfor step in range(1000):\n    print(f'\\rstep {step} of 1000', end='')\n    time.sleep(0.02)"
    number = editor.send(f"%%mesh\n{code}")
    shown: set[str] = set()

    def moves() -> bool:
        shown.update(re.findall(r"\] step \d+ of", editor.text(number)))
        return len(shown) > 2

    editor.wait(moves, "the line changes")
    assert len(re.findall("of 1000", editor.text(number))) - len(re.findall("of 1000", code)) <= 2
    editor.shot("progress")
    editor.page.evaluate("editor.kernel.interrupt()")
    editor.wait(lambda: not editor.is_running(number), "the cell ends")
    assert not editor.problems()


def test_view_of_a_restarted_kernel_says_so_and_the_next_is_live(window: Open) -> None:
    editor = window().start()
    editor.run("%mesh up --procs 2")
    number = editor.run("mesh")
    editor.frame.locator(".mk-tile").nth(1).wait_for()
    file, state = editor.saved(), editor.widgets()
    editor.restart()
    # VS Code leaves the old view where it is.
    editor.cell(number).get_by_role("button", name="Dump stacks").click()
    editor.cell(number).get_by_text("The kernel is not responding.").wait_for()
    assert editor.frame.locator(".mk-title span").inner_text() == "2 ranks"
    assert editor.cell(number).get_by_role("button", name="Kill").count() == 0
    editor.shot("restarted")
    editor.run("%mesh up --procs 1")
    editor.run("mesh", number)
    editor.cell(number).get_by_text("1 rank · up for").wait_for()
    assert not editor.problems()
    # A file with the state of its widgets, without a kernel.
    offline = window().open(file, None, state)
    offline.cell(number).get_by_text("Waiting for the kernel").wait_for()
    assert offline.cell(number).locator(".monarch-static").is_visible()
    assert not offline.problems()
