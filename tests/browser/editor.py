"""A page that shows a notebook as VS Code does: with VS Code's own bundle of the widgets, and a kernel of a server."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from browser.lab import ARTEFACTS, GUARD, ROOT, Lab

HERE = Path(__file__).parent / "vscode"
MODULES = ROOT / "node_modules"
ANYWIDGET = Path(sys.prefix, "share", "jupyter", "nbextensions", "anywidget", "index.js")
"""VS Code takes the scripts of third-party widgets from such folders of the kernel's environment."""
FILES = {
    "workbench.html": HERE / "workbench.html",
    "webview.html": HERE / "webview.html",
    "require.js": MODULES / "requirejs" / "require.js",
    "ipywidgets.js": MODULES / "@vscode" / "jupyter-ipywidgets8" / "dist" / "ipywidgets.js",
    "anywidget.js": ANYWIDGET,
}


def publish_page(lab: Lab) -> str:
    """Have a server serve the page; return its folder's address."""
    folder = lab.pages / "vscode"
    if not folder.exists():
        folder.mkdir()
        for name, path in FILES.items():
            shutil.copyfile(path, folder / name)
        options = ("--bundle", "--format=iife", "--log-level=warning", "--define:process.env={}")
        command = [MODULES / ".bin" / "esbuild", HERE / "host.js", f"--outfile={folder / 'host.js'}", *options]
        subprocess.run(command, check=True, cwd=ROOT)
    return f"{lab.url}/static/vscode"


class Editor:
    """A notebook that is open in the page.

    Args:
        page: the browser's page.
        lab: the server of the kernel.
        theme: one of VS Code's kinds of themes.
    """

    def __init__(self, page: Any, lab: Lab, theme: str = "vscode-light") -> None:
        self.page = page
        self.lab = lab
        self.errors: list[str] = []
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        address = publish_page(lab)
        page.goto(f"{address}/workbench.html?token={lab.token}")
        options = {
            "baseUrl": f"{lab.url}/",
            "token": lab.token,
            "theme": theme,
            "scripts": {"anywidget": f"{address}/anywidget.js"},
        }
        page.evaluate("options => { window.editor = new Editor(options); }", options)
        self.frame: Any = None

    def open(self, saved: list[Any] | None = None, kernel: Any = None, widgets: Any = None) -> Editor:
        """Open a notebook with saved outputs, and with a kernel, by its model, or with the saved state of widgets."""
        self.page.evaluate("args => editor.open(...args)", [saved or [], kernel, widgets])
        self.frame = self.page.frames[1]
        return self

    def start(self, kernel: str = "monarch") -> Editor:
        """Open a new notebook with a new kernel."""
        return self.open(kernel=self._new_kernel(kernel))

    def saved(self) -> list[Any]:
        """Return what a file of the notebook would have now."""
        return self.page.evaluate("editor.saved()")

    def widgets(self) -> Any:
        """Return the state of widgets that JupyterLab would save in the file; VS Code saves none."""
        return self.page.evaluate("editor.widgets.manager.get_state({ drop_defaults: false })")

    def restart(self) -> None:
        """Restart the kernel."""
        self.page.evaluate("editor.restart()")

    def theme(self, name: str, white_widgets: bool = False) -> None:
        """Choose one of VS Code's kinds of themes; older versions have white widgets in all of them."""
        self.page.evaluate("name => editor.theme(name)", name)
        self.frame.evaluate("white => document.body.classList.toggle('white-widgets', white)", white_widgets)

    def _new_kernel(self, kernel: str) -> Any:
        session = {"path": "book.ipynb", "name": "book", "type": "notebook", "kernel": {"name": kernel}}
        headers = {"Authorization": f"token {self.lab.token}", "Content-Type": "application/json"}
        request = Request(f"{self.lab.url}/api/sessions", json.dumps(session).encode(), headers, method="POST")
        with urlopen(request, timeout=GUARD) as answer:
            return json.loads(answer.read())["kernel"]

    def send(self, code: str, number: int | None = None) -> int:
        """Run a cell, a new one or one that exists, without waiting; return its number."""
        return self.page.evaluate("([code, number]) => editor.run(code, number ?? undefined)", [code, number])

    def run(self, code: str, number: int | None = None) -> int:
        """Run a cell to its end."""
        sent = self.send(code, number)
        self.wait(lambda: not self.is_running(sent), f"the cell {code!r} ends")
        return sent

    def is_running(self, number: int) -> bool:
        """Return whether a cell runs."""
        return self.page.evaluate("number => editor.cells[number].running", number)

    def cell(self, number: int) -> Any:
        """Return a cell with its outputs on the page."""
        return self.frame.locator("#container > section").nth(number)

    def text(self, number: int) -> str:
        """Return the visible text of a cell."""
        return self.cell(number).inner_text()

    def wait(self, condition: Callable[[], object], what: str) -> None:
        """Wait until a condition is true."""
        for _ in range(int(GUARD * 20)):
            if condition():
                return
            self.page.wait_for_timeout(50)
        raise AssertionError(f"hangs: {what}; {self.problems()}")

    def problems(self) -> list[str]:
        """Return what has gone wrong on the page."""
        return [*self.errors, *self.page.evaluate("editor.widgets?.errors ?? []")]

    def shot(self, name: str) -> None:
        """Save a screenshot of the page."""
        ARTEFACTS.mkdir(exist_ok=True)
        self.page.screenshot(path=ARTEFACTS / f"vscode-{name}.png")
