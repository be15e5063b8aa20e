"""Views in Notebook 7, which has JupyterLab's cells in a page of their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from browser.lab import Book, Lab, write_notebook
from leaks import Kit

pytest.importorskip("notebook")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
SPIN = "%%mesh\nimport time\nwhile True: time.sleep(0.01)"


@pytest.fixture
def book(context: Any, lab: Lab, leaks: Kit) -> Iterator[Book]:
    """A notebook with a mesh, its view, and a cell that runs until it is stopped."""
    write_notebook(lab.root / "classic.ipynb", ["%mesh up --procs 8", "mesh", SPIN])
    leaks.rebase()
    page = context.new_page()
    yield Book(page, lab).open_classic("classic.ipynb")
    page.close()
    lab.end_kernels()
    leaks.rebase()


def test_view_is_live_and_its_buttons_act_while_a_cell_runs(book: Book) -> None:
    errors: list[str] = []
    book.page.on("pageerror", lambda error: errors.append(str(error)))
    book.run(0)
    book.idle()
    book.run(1)
    view = book.output(1)
    view.locator(".mk-tile").nth(7).wait_for()
    assert not view.locator(".monarch-static").is_visible()
    book.idle()
    book.run(2)
    book.wait(lambda: view.locator(".mk-tile.mk-running").count() == 8, "the running cell")
    book.shot("notebook-running")
    view.get_by_role("button", name="Dump stacks").click()
    view.locator(".mk-note", has_text="in <module>").wait_for()
    view.get_by_role("button", name="Interrupt").click()
    book.idle()
    assert "interrupted" in book.said(2)
    book.evaluate("app.commands.execute('monarch:show-meshes').then(() => null)")
    panel = book.page.locator("#monarch-meshes")
    panel.locator(".mk-tile").nth(7).wait_for()
    book.shot("notebook-panel")
    assert book.page.evaluate("document.querySelector('#monarch-meshes').getBoundingClientRect().right <= innerWidth")
    assert not errors
