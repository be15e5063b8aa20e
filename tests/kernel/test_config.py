"""``%mesh config``: defaults of a notebook for cells and for ``%mesh up``."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from kernels import Cell, Notebook
from monarch_kernel.grammar.header import OPTIONS, Defaults, parse
from monarch_kernel.grammar.mesh_commands import CELL_SETTINGS, UP_SETTINGS
from monarch_kernel.grammar.parsers import PARSERS


@pytest.fixture
def book(notebook: Notebook) -> Iterator[Notebook]:
    yield notebook
    notebook.run("%mesh config --reset").ok()


def value_of(cell: Cell, key: str) -> str:
    """Return the value that a table shows for a key."""
    (row,) = [line.split() for line in cell.ok().shown.splitlines()[2:] if line.split()[0] == key]
    return row[1] if row[1] not in ("cells", "%mesh") else ""


def test_table_has_all_keys_with_their_values(book: Notebook) -> None:
    cell = book.run("%mesh config timeout=60 device=cpu")
    assert value_of(cell, "timeout") == "60" and value_of(cell, "device") == "cpu"
    (table,) = book.run("%mesh config").ok().bundles
    lines = table["text/plain"].splitlines()[2:]
    assert [line.split()[0] for line in lines] == [*CELL_SETTINGS, *UP_SETTINGS] and ">60<" in table["text/html"]
    assert value_of(book.run("%mesh config mesh"), "mesh") == "mesh"


def test_cells_take_the_defaults_unless_they_say_otherwise(book: Notebook) -> None:
    book.run("%mesh config ranks=1:3 out=res timeout=0.5").ok()
    assert [rank for rank in range(4) if f"[rank {rank}] {rank}" in book.mesh("rank").ok().shown] == [1, 2]
    assert book.run("list(res.values())").ok().shown == "[1, 2]"
    assert "[rank 3] 3" in book.run("%%mesh mesh\nrank").ok().shown
    assert "timed out after 0.5 s" in book.run("%mesh __import__('time').sleep(30)").text
    book.mesh("import time; time.sleep(0.7)", "--timeout none").ok()
    book.mesh("rank", "--nowait").ok()
    book.run("%mesh config --reset ranks").ok()
    assert "[rank 0] 0" in book.mesh("rank").ok().shown
    book.run("%mesh config timeout=none").ok()
    assert value_of(book.run("%mesh config timeout"), "timeout") == ""


def test_up_takes_the_defaults_unless_it_says_otherwise(own: Callable[..., Notebook]) -> None:
    book = own()
    book.run("%mesh config procs=3 device=cpu").ok()
    assert "procs=3" in book.run("%mesh up a").ok().shown
    assert "gpus=1" in book.run("%mesh up b --gpus 1").ok().shown
    book.run("%mesh down --all").ok()
    assert "procs=2" in book.run("%mesh up 2").ok().shown
    book.run("%reload_ext monarch_kernel").ok()
    assert value_of(book.run("%mesh config procs"), "procs") == "3"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("timeout=abc", "%mesh config timeout: expected seconds from 0 to 1e+09, or none; got 'abc'"),
        ("tmeout=3", "unknown key 'tmeout'; did you mean 'timeout'?"),
        ("collect=maybe", "%mesh config collect: expected on or off, got 'maybe'"),
        ("ranks=0:x", "expected a number or a range such as 0:4 or ::2, got '0:x'"),
        ("procs=0", "--procs: expected at least 1, got 0"),
        ("device=tpu", "invalid choice: 'tpu'"),
        ("mesh=other", "no mesh named 'other'; running: mesh"),
    ],
)
def test_wrong_default_is_refused_and_sets_nothing(book: Notebook, words: str, text: str) -> None:
    cell = book.run(f"%mesh config out=kept {words}")
    assert cell.status == "error" and text in cell.text
    assert value_of(book.run("%mesh config out"), "out") == ""


@pytest.mark.parametrize(
    ("line", "timeout", "stream"), [("", 5.0, False), ("--stream", 5.0, True), ("--nowait", None, True)]
)
def test_options_replace_defaults_that_they_contradict(line: str, timeout: float | None, stream: bool) -> None:
    header = parse(line, Defaults("0:2", {"--timeout": "5", "--collect": None}))
    assert (header.timeout, header.stream, header.ranks) == (timeout, stream, [slice(0, 2)])


def test_every_key_is_an_option() -> None:
    assert all(f"--{key}" in OPTIONS for key in CELL_SETTINGS[2:])
    assert all(PARSERS["up"].option(f"--{key}") is not None for key in UP_SETTINGS)


def test_up_of_a_running_mesh_says_nothing_but_that(book: Notebook) -> None:
    cell = book.run("%mesh up 99")
    assert cell.status == "error" and "mesh 'mesh' is already running" in cell.text and not cell.bundles
