"""Kernels for the tests: one that a module shares, and those of a test's own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from kernels import Notebook
from leaks import Kit


@pytest.fixture(scope="session", autouse=True)
def spec(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The kernelspec as its command installs it, and folders of IPython's and Jupyter's own for these tests."""
    prefix = tmp_path_factory.mktemp("jupyter")
    subprocess.run(
        [sys.executable, "-m", "monarch_kernel", "install", "--prefix", str(prefix)], check=True, capture_output=True
    )
    mine = {
        "JUPYTER_PATH": str(prefix / "share" / "jupyter"),
        "JUPYTER_RUNTIME_DIR": str(prefix / "runtime"),
        "IPYTHONDIR": str(prefix / "ipython"),
    }
    before = {key: os.environ.get(key) for key in mine}
    os.environ.update(mine)
    yield str(prefix)
    for key, value in before.items():
        if value is None:
            del os.environ[key]
        else:
            os.environ[key] = value


@pytest.fixture(scope="module")
def notebook(spec: str) -> Iterator[Notebook]:
    """A notebook with a mesh of four ranks, which the tests of a module share."""
    book = Notebook()
    try:
        book.run("%mesh up --procs 4").ok()
        yield book
    finally:
        book.close()


@pytest.fixture
def own(leaks: Kit) -> Iterator[Callable[..., Notebook]]:
    """Starts notebooks of a test's own."""
    books: list[Notebook] = []

    def start(kernel: str = "monarch", **env: str) -> Notebook:
        books.append(Notebook(kernel, **env))
        return books[-1]

    yield start
    for book in books:
        book.close(now=True)
