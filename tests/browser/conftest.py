"""One server and one browser for these tests; without a browser they are skipped."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from browser.lab import FLAGS, ROOT, Book, Lab, find_browser, write_notebook
from leaks import Kit

playwright = pytest.importorskip("playwright.sync_api")


@pytest.fixture(scope="package")
def chromium() -> Iterator[Any]:
    """The browser."""
    path = find_browser()
    if path is None:
        pytest.skip("there is no chromium; .ci/install-chromium installs it")
    with playwright.sync_playwright() as driver, tempfile.TemporaryDirectory() as own:
        flags = [flag for flag in FLAGS if flag != "--headless"]
        env = {**os.environ, "XDG_RUNTIME_DIR": own}
        browser = driver.chromium.launch(executable_path=path, headless=True, args=flags, env=env)
        yield browser
        browser.close()


@pytest.fixture(scope="package")
def context(chromium: Any) -> Any:
    """A context whose pages share a cache: JupyterLab is megabytes of JavaScript to fetch and to compile."""
    return chromium.new_context(viewport={"width": 1280, "height": 900})


@pytest.fixture(scope="package")
def built() -> None:
    """Build the front end if its sources are newer."""
    spec = importlib.util.spec_from_file_location("builder", ROOT / "labextension" / "builder.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.build("wheel", "editable")


@pytest.fixture(scope="package")
def lab(context: Any, spec: str, built: None) -> Iterator[Lab]:
    """The server."""
    # A short path: the socket paths of kernels are limited.
    with tempfile.TemporaryDirectory(prefix="lab") as folder:
        server = Lab(Path(folder))
        yield server
        server.close()


@pytest.fixture(scope="package")
def kept() -> list[Book]:
    """The page of an earlier test, which is as a new one: to load JupyterLab again takes 4 s of CPU."""
    return []


@pytest.fixture
def opened(context: Any, lab: Lab, kept: list[Book], leaks: Kit) -> Iterator[Callable[..., Book]]:
    """A function that opens a notebook in a page of its own; its kernel ends with the test."""
    books: list[Book] = []

    def open_one(*cells: str, kernel: str = "monarch", name: str = "") -> Book:
        if not name:
            name = f"book{len(list(lab.root.iterdir()))}.ipynb"
            write_notebook(lab.root / name, cells, kernel)
        if kept:
            books.append(kept.pop())
            return books[-1].show(name)
        books.append(Book(context.new_page(), lab))
        return books[-1].open(name)

    # The server and the browser start before the test.
    leaks.rebase()
    yield open_one
    for book in books:
        if not kept and book.clear():
            kept.append(book)
        else:
            book.page.close()
    lab.end_kernels()
    leaks.rebase()
