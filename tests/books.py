"""Fixtures with kernels: one shared by a module, and new ones for single tests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq
from jupyter_core.utils import run_sync

from kernels import Notebook
from leaks import Kit


@pytest.fixture(scope="session", autouse=True)
def installed(spec: str) -> None:
    """Install the kernel, and open what the first client keeps open in this process."""
    zmq.Context.instance().socket(zmq.DEALER).close()
    run_sync(asyncio.sleep)(0)


@pytest.fixture(scope="module")
def notebook(spec: str) -> Iterator[Notebook]:
    """A notebook with a mesh of four ranks, shared by the tests of a module."""
    book = Notebook()
    try:
        book.run("%mesh up --procs 4").ok()
        yield book
    finally:
        book.close()


@pytest.fixture
def own(leaks: Kit) -> Iterator[Callable[..., Notebook]]:
    """A function that starts new notebooks for one test."""
    books: list[Notebook] = []

    def start(kernel: str = "monarch", **options: Any) -> Notebook:
        books.append(Notebook(kernel, **options))
        return books[-1]

    yield start
    for book in books:
        book.close(now=True)
