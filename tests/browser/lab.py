"""A JupyterLab server and a browser for tests, which use notebooks like a person."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from leaks import wait_until

ROOT = Path(__file__).resolve().parents[2]
EXTENSION = Path("labextensions", "@monarch-kernel", "labextension")
ARTEFACTS = Path(__file__).parent / "artefacts"
"""Screenshots, for people."""
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update",
]  # fmt: skip
AXE = ROOT / "node_modules" / "axe-core" / "axe.min.js"
"""Checks accessibility; `make test-ts` installs it."""
GUARD = 30.0
"""Seconds after which an operation counts as hung."""


def violations(page: Any, selector: str = "html") -> list[str]:
    """Return what axe finds in a part of a page, as its rule and the first element."""
    if not page.evaluate("typeof axe !== 'undefined'"):
        page.add_script_tag(content=AXE.read_text())
    found = page.evaluate("part => axe.run(part, {resultTypes: ['violations']}).then(all => all.violations)", selector)
    return [f"{each['id']}: {each['nodes'][0]['html'][:200]}" for each in found]


def find_browser() -> str | None:
    """Return the path of Chromium or a browser based on it."""
    return next((path for name in BROWSERS if (path := shutil.which(name))), None)


def write_notebook(path: Path, cells: Sequence[str], kernel: str = "monarch") -> None:
    """Return a notebook file with code cells, for a kernel."""
    made = [
        {"cell_type": "code", "id": f"cell-{number}", "metadata": {}, "source": text, "outputs": [],
         "execution_count": None}
        for number, text in enumerate(cells)
    ]  # fmt: skip
    spec = {"name": kernel, "display_name": kernel.capitalize(), "language": "python"}
    book = {"nbformat": 4, "nbformat_minor": 5, "metadata": {"kernelspec": spec}, "cells": made}
    path.write_text(json.dumps(book))


class Lab:
    """A JupyterLab server with its own folders, which leaves those of the user alone.

    Only the home folder is the same: kernels of another one would not use the fork server of the tests.
    """

    def __init__(self, folder: Path) -> None:
        self.root = folder / "root"
        self.token = secrets.token_hex(16)
        self.pages = folder / "pages"
        """Files that the server has below ``/static``, for pages of tests."""
        self.pages.mkdir()
        names = ("config", "data", "runtime", "ipython", "settings", "workspaces")
        places = {name: folder / name for name in names}
        for place in (self.root, *places.values()):
            place.mkdir()
        # Turn off the prompt about news, which would cover the page.
        news = places["settings"] / "@jupyterlab" / "apputils-extension" / "notification.jupyterlab-settings"
        news.parent.mkdir(parents=True)
        news.write_text('{"fetchNews": "false", "checkForUpdates": false}')
        install = [sys.executable, "-m", "monarch_kernel", "install", "--prefix", str(folder)]
        subprocess.run(install, check=True, capture_output=True)
        # The extension of this source tree, not the one that was built when the environment was made.
        extension = folder / "share" / "jupyter" / EXTENSION
        extension.parent.mkdir(parents=True)
        extension.symlink_to(ROOT / "monarch_kernel" / "labextension")
        env = {
            **os.environ,
            "JUPYTER_PATH": str(folder / "share" / "jupyter"),
            "JUPYTER_CONFIG_DIR": str(places["config"]),
            "JUPYTER_DATA_DIR": str(places["data"]),
            "JUPYTER_RUNTIME_DIR": str(places["runtime"]),
            "JUPYTERLAB_SETTINGS_DIR": str(places["settings"]),
            "JUPYTERLAB_WORKSPACES_DIR": str(places["workspaces"]),
            "IPYTHONDIR": str(places["ipython"]),
        }
        options = [
            "--no-browser", "--allow-root", "--ServerApp.port=0", f"--IdentityProvider.token={self.token}",
            f"--ServerApp.root_dir={self.root}", "--LabApp.expose_app_in_browser=True",
            "--JupyterNotebookApp.expose_app_in_browser=True",
            f"--ServerApp.extra_static_paths={self.pages}",
        ]  # fmt: skip
        self.log = folder / "server.log"
        with self.log.open("wb") as log:
            command = [sys.executable, "-m", "jupyterlab", *options]
            self.process = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT, cwd=self.root)
        said = places["runtime"] / f"jpserver-{self.process.pid}.json"

        def is_written() -> bool:
            """Return whether the server has written its address, not only opened the file."""
            return said.exists() and said.stat().st_size > 0

        if not wait_until(lambda: is_written() or self.process.poll() is not None, GUARD) or not is_written():
            self.close()
            raise RuntimeError(f"the server does not start:\n{self.log.read_text()}")
        self.url = json.loads(said.read_text())["url"].rstrip("/")

    def ask(self, path: str, method: str = "GET") -> Any:
        """Return the answer of the server's REST API."""
        request = Request(f"{self.url}/api/{path}", method=method, headers={"Authorization": f"token {self.token}"})
        with urlopen(request, timeout=GUARD) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    def end_kernels(self) -> None:
        """Shut down each kernel, like the list of running kernels."""
        for session in self.ask("sessions"):
            try:
                self.ask(f"sessions/{session['id']}", "DELETE")
            except HTTPError as error:
                raise RuntimeError(f"{error}; the server says\n{self.log.read_text()[-3000:]}") from error

    def close(self) -> None:
        """End the server."""
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Book:
    """A notebook open in the browser.

    Args:
        page: the browser's page.
        lab: the server.
    """

    def __init__(self, page: Any, lab: Lab) -> None:
        self.page = page
        self.lab = lab
        self.used_up = False
        """Whether the page is no longer like a new one, in a way that ``clear`` does not see."""

    def open(self, name: str) -> Book:
        """Load the page with a notebook of the server's folder, and wait for its kernel."""
        # In a new workspace, so that no other notebook is open.
        space = secrets.token_hex(4)
        self.page.goto(f"{self.lab.url}/lab/workspaces/{space}/tree/{name}?token={self.lab.token}")
        self._ready()
        self.evaluate("window.loadedOnce = true")
        return self

    def open_classic(self, name: str) -> Book:
        """Load the page of Notebook 7 with a notebook, and wait for its kernel."""
        self.page.goto(f"{self.lab.url}/notebooks/{name}?token={self.lab.token}")
        self._ready()
        return self

    def show(self, name: str) -> Book:
        """Open a notebook of the server's folder in the loaded page, and wait for its kernel."""
        self.evaluate("app.commands.execute('docmanager:open', {path: args[0]}).then(() => null)", name)
        self._ready()
        return self

    def _ready(self) -> None:
        self.page.wait_for_selector(".jp-NotebookPanel .jp-Notebook .jp-Cell", timeout=GUARD * 1000)
        self.until("book?.sessionContext?.session?.kernel?.status === 'idle'")

    def clear(self) -> bool:
        """Close all notebooks; return whether the page is then like a new one, which the next test can use."""
        if self.used_up or self.page.is_closed() or not self.page.evaluate("window.loadedOnce === true"):
            return False
        self.page.evaluate(_CLEAR)
        return not self.page.locator(".jp-Dialog, .jp-Tooltip, .Toastify__toast, .lm-Menu").count()

    def evaluate(self, expression: str, *args: Any) -> Any:
        """Return the value of a JavaScript expression, where ``app`` is JupyterLab and ``book`` the notebook."""
        prelude = "const app = window.jupyterapp, book = app?.shell?.currentWidget;"
        return self.page.evaluate(f"async (args) => {{ {prelude} return ({expression}); }}", list(args))

    def until(self, expression: str, seconds: float = GUARD) -> None:
        """Wait until a JavaScript expression is true."""
        prelude = "const app = window.jupyterapp, book = app?.shell?.currentWidget;"
        self.page.wait_for_function(
            f"() => {{ {prelude} return Boolean({expression}); }}", timeout=seconds * 1000, polling=50
        )

    def cell(self, number: int) -> Any:
        """Return a cell by its position."""
        return self.page.locator(f".jp-NotebookPanel:not(.lm-mod-hidden) .jp-Notebook .jp-Cell >> nth={number}")

    def run(self, number: int) -> None:
        """Run a cell with Shift-Enter, without waiting for it."""
        self.cell(number).locator(".cm-content").click()
        self.page.keyboard.press("Shift+Enter")

    def idle(self, seconds: float = GUARD) -> None:
        """Wait until the kernel is idle."""
        self.until(f"book.sessionContext.session?.kernel?.status === 'idle' && {_NONE_RUNS}", seconds)

    def run_all(self, seconds: float = GUARD) -> None:
        """Run all cells, from the menu."""
        self.menu("Run", "Run All Cells")
        self.until("[...book.content.model.cells].some(cell => cell.executionCount || cell.executionState !== 'idle')")
        self.idle(seconds)

    def menu(self, *path: str) -> None:
        """Choose a menu item."""
        bar, item = path
        self.page.locator(f"#jp-MainMenu .lm-MenuBar-item:has-text('{bar}')").first.click()
        self.page.locator(".lm-Menu .lm-Menu-item").filter(has_text=item).first.click()

    def stop(self) -> None:
        """Return the interrupt button."""
        self.page.locator(".jp-NotebookPanel-toolbar [data-command='notebook:interrupt-kernel']").click()

    def output(self, number: int) -> Any:
        """Return the outputs of a cell on the page."""
        return self.cell(number).locator(".jp-Cell-outputArea")

    def text(self, number: int) -> str:
        """Return the visible text under a cell."""
        return self.output(number).inner_text()

    def said(self, number: int) -> str:
        """Return all text of a cell's outputs, whether on the page or scrolled out of it."""
        outputs = self.evaluate("book.content.model.cells.get(args[0]).outputs.toJSON()", number)
        parts: list[Any] = []
        for each in outputs:
            parts.append(each.get("text") or each.get("data", {}).get("text/plain") or each.get("traceback") or "")
        return "".join("".join(part) for part in parts)

    def shot(self, name: str) -> Path:
        """Save a screenshot of the page."""
        ARTEFACTS.mkdir(exist_ok=True)
        path = ARTEFACTS / f"{name}.png"
        self.page.screenshot(path=path)
        return path

    def wait(self, condition: Callable[[], object], what: str, seconds: float = GUARD) -> None:
        """Wait until a condition is true."""
        until = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < until, f"hangs: {what}"
            self.page.wait_for_timeout(50)


_CLEAR = """async () => {
    const app = window.jupyterapp;
    [...app.shell.widgets('main')].forEach(widget => widget.dispose());
    await app.commands.execute('monarch:show-meshes');
    app.shell.collapseRight();
}"""
"""Closes what tests open, and shows in the panel the ranks, not the logs."""
_NONE_RUNS = "[...book.content.model.cells].every(cell => (cell.executionState ?? 'idle') === 'idle')"
