"""Automatic mode: plain cells now run on ranks; --here runs a cell in the notebook too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kernels import Notebook

pytestmark = pytest.mark.slow


@pytest.fixture
def auto(notebook: Notebook) -> Iterator[Notebook]:
    notebook.run("%mesh auto on").ok()
    yield notebook
    notebook.run("%mesh auto off").ok()


def test_plain_cells_run_on_ranks_and_say_so(auto: Notebook) -> None:
    cell = auto.run("here = rank + 1\nhere").ok()
    assert cell.shown.splitlines()[0] == "auto: all 4 ranks of mesh" and "[rank 3] 4" in cell.shown
    cell = auto.run("here * 2").ok()
    assert "[rank 3] 8" in cell.shown
    assert auto.run("%mesh auto off").ok().stream() == "plain cells run in the notebook\n"
    assert auto.run("'here' in globals()").ok().shown == "False"


@pytest.mark.parametrize("code", ["%mesh", "# nothing"])
def test_other_cells_stay_in_the_notebook(auto: Notebook, code: str) -> None:
    cell = auto.run(code).ok()
    assert "auto:" not in cell.shown and "[rank" not in cell.stream()


@pytest.mark.parametrize(
    "code",
    [
        "%%here\n{0} = 1",
        "%%here {0} = 1",
        "# comment\n\n  %%here\n{0} = 1",
        "%%here\n%%here\n{0} = 1",
        "%%here\n%time {0} = 1",
        "%%here\nget_ipython().run_cell('{0} = 1')",
        "%%here\nimport asyncio\nawait asyncio.sleep(0)\nget_ipython().run_cell('{0} = 1')",
        "%%capture kept\n{0} = 1",
        "%%time\n{0} = 1",
        "%%timeit -n1 -r1\nglobals()['{0}'] = 1",
        "%%prun\n{0} = 1",
    ],
)
def test_local_cells_run_in_the_notebook(auto: Notebook, code: str) -> None:
    # Where the name is says where the code ran, also if a magic hides its output.
    auto.run("%%here\nmade = None").ok()
    assert "auto:" not in auto.run(code.format("made")).ok().shown
    assert auto.run("%%here\nmade").ok().shown == "1"
    assert "[ranks 0-3] False" in auto.run("'made' in globals()").ok().shown


def test_mode_survives_a_reload_of_the_extension(auto: Notebook) -> None:
    for _ in range(2):
        auto.run("%reload_ext monarch_kernel").ok()
        assert "[rank 3] 3" in auto.run("rank").ok().shown
        assert auto.run("%%here\n5").ok().shown == "5"
    auto.run("%mesh auto off").ok()
    assert auto.run("%%here\n5").ok().shown == "5" and auto.run("6").ok().shown == "6"


def test_mode_without_its_ranks_says_how_to_end_it(own: Callable[..., Notebook]) -> None:
    book = own()
    book.run("%mesh up --procs 2 other").ok()
    book.run("%mesh auto on other[1]").ok()
    book.run("%mesh resize 1").ok()
    hint = "; automatic mode is on; %mesh auto off turns it of"
    assert f"no rank 1: this mesh has rank 0 only{hint}" in book.run("rank").text
    assert "automatic mode is on, but plain cells fail: no rank 1" in book.run("%mesh auto").ok().stream()
    book.run("%mesh down").ok()
    assert "automatic mode is on, but plain cells fail: no mesh" in book.run("%mesh auto").ok().stream()
    assert hint in book.run("rank").text
    assert book.run("%mesh auto off\n").ok().stream() == "plain cells run in the notebook\n"


def test_mode_may_name_ranks_and_meshes(notebook: Notebook) -> None:
    assert "ranks 1-2 of mesh" in notebook.run("%mesh auto on mesh[1:3]").ok().stream()
    assert notebook.run("rank").ok().shown.splitlines()[1:] == ["[rank 1] 1", "[rank 2] 2"]
    assert "ranks 1-2 of mesh; %mesh auto off" in notebook.run("%mesh auto").ok().stream()
    notebook.run("%mesh auto off").ok()


@pytest.mark.parametrize("options", [{"silent": True}, {"cell_id": ""}])
def test_code_of_the_front_end_stays_in_the_notebook(auto: Notebook, options: dict[str, Any]) -> None:
    assert "auto:" not in auto.run("from_front_end = 5", store_history=False, **options).shown
    assert auto.run("%%here\nfrom_front_end").ok().shown == "5"


def test_errors_are_those_of_the_cell(auto: Notebook) -> None:
    cell = auto.run("x = 1\nif rank == 2:\n    x / 0")
    assert cell.status == "error" and "line 3" in cell.text and "ZeroDivisionError" in cell.text


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("%mesh auto maybe", "expected on or off, got 'maybe'"),
        ("%mesh auto on nosuch", "no mesh named 'nosuch'"),
        ("%mesh auto on [7]", "no rank 7"),
        ("%mesh auto off mesh", "name a mesh only after on"),
    ],
)
def test_wrong_lines_are_refused(notebook: Notebook, line: str, text: str) -> None:
    assert text in notebook.run(line).text
    assert notebook.run("%mesh auto").ok().stream().startswith("plain cells run in the notebook")


def test_here_runs_in_the_notebook_too(notebook: Notebook) -> None:
    cell = notebook.mesh("def double(x): return 2 * x\nprint('defined')", "--here").ok()
    assert "[ranks 0-3] defined" in cell.stream().splitlines()
    assert notebook.run("double(21)").ok().shown == "42"
    assert notebook.mesh("double(rank)").ok().shown.splitlines()[1] == "[rank 1] 2"


def test_here_runs_a_top_level_await_in_both_places(notebook: Notebook) -> None:
    cell = notebook.mesh("import asyncio\nawait asyncio.sleep(0)\nslept = await asyncio.sleep(0, 7)", "--here").ok()
    assert "Error" not in cell.text
    assert notebook.run("slept").ok().shown == "7" and notebook.mesh("slept").ok().shown == "[ranks 0-3] 7"
    # The kernel's own loop goes on.
    assert notebook.run("await asyncio.sleep(0, 8)").ok().shown == "8"
    cell = notebook.send("%%mesh --here\nprint('here')\nawait asyncio.sleep(1000)")
    cell.until(lambda: "here" in cell.text)
    notebook.interrupt()
    assert "so the ranks did not run it" in cell.wait().text
    assert notebook.run("await asyncio.sleep(0, 9)").ok().shown == "9"


def test_cell_that_fails_here_does_not_run_on_ranks(notebook: Notebook) -> None:
    cell = notebook.mesh("was_run = True\nraise ValueError('local')", "--here")
    assert cell.status == "error" and "ValueError" in cell.text and "so the ranks did not run it" in cell.text
    assert notebook.mesh("'was_run' in globals()").ok().shown == "[ranks 0-3] False"


def test_here_works_in_automatic_mode(auto: Notebook) -> None:
    auto.run("%%mesh --here\nboth = 7").ok()
    assert auto.run("%%here\nboth").ok().shown == "7"
    assert "[ranks 0-3] 7" in auto.run("both").ok().shown


def test_cell_is_transformed_once_by_current_transformers(notebook: Notebook) -> None:
    notebook.run(
        "seen = []\n"
        "def note(lines): seen.append(''.join(lines)); return lines\n"
        "get_ipython().input_transformers_cleanup.append(note)"
    ).ok()
    try:
        notebook.run("%%mesh\n1 + 1").ok()
        notebook.run("2 + 2").ok()
        assert notebook.run("seen[:2]").ok().shown == "['%%mesh\\n1 + 1\\n', '2 + 2\\n']"
        # The same text again, by another transformer.
        notebook.run(
            "def three(lines): return ['3 + 3\\n'] if lines[0] == '2 + 2\\n' else lines\n"
            "get_ipython().input_transformers_post.append(three)"
        ).ok()
        assert notebook.run("2 + 2").ok().shown == "6"
        assert notebook.run("get_ipython().input_transformers_post.remove(three)\n2 + 2").ok().shown == "4"
        assert notebook.run("2 + 2").ok().shown == "4"
    finally:
        notebook.run(
            "get_ipython().input_transformers_cleanup.remove(note)\n"
            "post = get_ipython().input_transformers_post\n"
            "post[:] = [each for each in post if each.__name__ != 'three']"
        ).ok()
