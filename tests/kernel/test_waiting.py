"""The line of a running cell that says which ranks still run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kernels import Cell, Notebook
from monarch._kernel_api import CollectiveWait, Whereabouts
from monarch._notebook.namespace import Namespace
from monarch_kernel.calls.record import CallRecord
from monarch_kernel.output.positions import describe
from monarch_kernel.output.waiting import MARK, WaitingLine

pytestmark = pytest.mark.slow


def lines(cell: Cell) -> list[str]:
    """Return the states of the line, in order; empty once it is gone."""
    displays = cell.contents("display_data", "update_display_data")
    return [each["data"].get("text/plain", "") for each in displays if MARK in each["metadata"]]


def waiting(notebook: Notebook, code: str, go: Path) -> Cell:
    return notebook.send(code.replace("GO", f"while not os.path.exists({str(go)!r}): time.sleep(0.01)"))


def test_line_names_ranks_that_still_run_and_disappears(notebook: Notebook, tmp_path: Path) -> None:
    go = tmp_path / "go"
    cell = waiting(notebook, "%%mesh\nimport os, time\nif rank == 2:\n    GO\nrank", go)
    text = r"rank 2 running for \d+s \(since [\d:]+\), ranks 0-1,3 finished"
    cell.until(lambda: sum(bool(re.fullmatch(text, line)) for line in lines(cell)) > 1)
    go.touch()
    cell.wait().ok()
    assert lines(cell)[-1] == ""
    assert len({each["transient"]["display_id"] for each in cell.contents("update_display_data")}) == 1
    # It is gone before the result of the cell is complete for a reader.
    assert "[rank 3] 3" in cell.shown


def test_start_of_a_mesh_has_no_second_line() -> None:
    def made(cls: type) -> Any:
        view = SimpleNamespace(_state=SimpleNamespace(cls=cls))
        return SimpleNamespace(
            actor="a", method="__init__", view=view, port=1, mesh="mesh", label="", targets=[], waits_for=lambda: []
        )

    calls = CallRecord(SimpleNamespace(ports=SimpleNamespace(gathers={})))  # pyright: ignore[reportArgumentType]
    calls.seconds = lambda call: 5.0
    line = WaitingLine(calls, lambda *_: "", lambda *_: "", lambda *_: None)
    # The command shows how many ranks are ready; constructors of users' actors are waited for as any call.
    assert not line.lines([made(Namespace)]) and len(line.lines([made(int)])) == 1


@pytest.mark.parametrize("body", ["", "if rank == 3: print('here')\n", "1 / 0"])
def test_line_leaves_no_output_in_a_cell_without_any(notebook: Notebook, tmp_path: Path, body: str) -> None:
    go = tmp_path / "go"
    cell = waiting(notebook, f"%%mesh\nimport os, time\nGO\n{body}", go)
    cell.until(lambda: lines(cell))
    go.touch()
    cell.wait()
    # The front end removes all that the cell has shown.
    assert cell.contents("clear_output") == ([] if body else [{"wait": False}])


def test_line_is_of_calls_in_plain_cells_too(notebook: Notebook, tmp_path: Path) -> None:
    notebook.run(
        "%%mesh spawn waiters\nfrom monarch.actor import Actor, endpoint\nimport os, time\nclass W(Actor):\n"
        "    @endpoint\n    def wait(self, path):\n        while not os.path.exists(path): time.sleep(0.01)"
    ).ok()
    cell = notebook.send(f"waiters.slice(procs=slice(0, 2)).wait.call({str(tmp_path / 'go')!r}).get()")
    cell.until(lambda: lines(cell))
    assert lines(cell)[0].startswith("ranks 0-1 running for ")
    (tmp_path / "go").touch()
    assert lines(cell.wait().ok())[-1] == ""
    notebook.run("waiters.stop().get()").ok()


def test_cell_behind_another_waits(notebook: Notebook, tmp_path: Path) -> None:
    go = tmp_path / "go"
    waiting(notebook, "%%mesh --nowait\nimport os, time\nGO", go).wait().ok()
    cell = notebook.send("%%mesh\nrank")
    cell.until(lambda: lines(cell))
    assert lines(cell)[0].startswith("ranks 0-3 waiting for ")
    go.touch()
    assert lines(cell.wait().ok())[-1] == ""


def test_stopped_cell_has_no_line(notebook: Notebook) -> None:
    cell = notebook.send("%%mesh\nimport time\nwhile True: time.sleep(0.01)")
    cell.until(lambda: lines(cell))
    notebook.interrupt()
    cell.wait()
    assert lines(cell)[-1] == ""


def test_quick_calls_and_executed_notebooks_have_no_line(notebook: Notebook) -> None:
    cell = notebook.run("%%mesh\nimport time\nfor _ in range(15): time.sleep(0.1)", cell_id="").ok()
    assert not lines(cell)
    cell = notebook.run(
        "import time\nuntil = time.monotonic() + 2.5\nwhile time.monotonic() < until:\n    %mesh rank"
    ).ok()
    assert not lines(cell)


def places(cell: Cell) -> str:
    """Return where the ranks of a cell are, as its line says."""
    return "".join(line.partition("; ")[2] for line in lines(cell)[-1:])


def ended(notebook: Notebook, cell: Cell) -> None:
    notebook.interrupt()
    cell.wait()


@pytest.fixture
def unexplained(notebook: Notebook) -> Iterator[Notebook]:
    """The notebook, whose cells do not say why their ranks wait."""
    notebook.run("import os; os.environ['MONARCH_STUCK_WAIT_S'] = '600'").ok()
    yield notebook
    notebook.run("del os.environ['MONARCH_STUCK_WAIT_S']").ok()


def test_line_names_a_collective_and_the_rank_that_is_late(unexplained: Notebook) -> None:
    notebook = unexplained
    cell = notebook.send("%%mesh\nimport time\nif rank == 3:\n    time.sleep(600)\ndist.barrier()")
    cell.until(lambda: places(cell) == "ranks 0-2 in barrier at line 5, rank 3 in time.sleep at line 4")
    ended(notebook, cell)


def test_line_names_collectives_that_differ(unexplained: Notebook) -> None:
    notebook = unexplained
    cell = notebook.send("%%mesh\nx = torch.ones(2)\nif rank == 1: dist.barrier()\nelse: dist.all_reduce(x)")
    cell.until(lambda: places(cell))
    text = "ranks 0,2-3 in all_reduce of float32[2] at line 4, rank 1 in barrier at line 3; these collectives differ"
    assert places(cell).startswith(text)
    ended(notebook, cell)


def test_line_names_the_cell_of_an_endpoint(unexplained: Notebook) -> None:
    notebook = unexplained
    number = notebook.run(
        "%%mesh spawn meeting\nimport torch.distributed as dist\nclass Meeting(Actor):\n    @endpoint\n"
        "    def meet(self):\n        import time\n        dist.barrier() if dist.get_rank() < 3 else time.sleep(600)"
    ).reply["execution_count"]
    cell = notebook.send("meeting.meet.call().get()")
    where = f"at cell [{number}] line 7"
    cell.until(lambda: places(cell) == f"ranks 0-2 in barrier {where}, rank 3 running {where}")
    ended(notebook, cell)


def at(operation: str, number: int, tensors: str = "") -> Whereabouts:
    waits = CollectiveWait(0, operation, "0", (0, 1), True, number)
    return Whereabouts("cell [1] line 2", "dist.x", waits, tensors)


@pytest.mark.parametrize(
    ("found", "text"),
    [
        ({0: at("all_reduce", 3, "float32[2]"), 1: at("all_reduce", 3, "float32[3]")}, "these collectives differ"),
        ({0: at("all_reduce", 3, "float32[2]"), 1: at("all_reduce", 3, "float32[2]")}, ""),
        ({0: at("all_reduce", 3), 1: at("barrier", 4)}, "rank 1 finished the all_reduce that rank 0 still waits in"),
        ({0: at("broadcast", 3), 1: at("barrier", 4)}, ""),
        ({0: at("all_reduce", 3, "float32[2]"), 1: at("", 3)}, ""),
    ],
)
def test_collectives_of_ranks_are_compared(found: dict[int, Whereabouts], text: str) -> None:
    described = describe(found, {0})
    assert described.partition("; ")[2].startswith(text) and bool(text) == ("; " in described)


def screen(cell: Cell) -> list[str]:
    """Return the lines of a terminal after the output of a cell."""
    shown: list[str] = []
    for line in cell.stream().split("\n"):
        seen = ""
        for part in line.split("\r"):
            seen = part + seen[len(part) :]
        shown.append(seen.rstrip())
    return shown


def test_terminal_has_the_line_until_something_else_is_shown(notebook: Notebook, tmp_path: Path) -> None:
    code = "import os, time\nprint('begun')\nif rank == 2:\n    GO\nprint('ended')\n1 // (rank - 2)"
    go = tmp_path / "go"
    code = code.replace("GO", f"while not os.path.exists({str(go)!r}): time.sleep(0.01)")
    cell = notebook.send(f"%%mesh\n{code}", cell_id="", allow_stdin=True)
    cell.until(lambda: screen(cell)[-1].startswith("rank 2 running for 2s") or "rank 2 running for 3s" in cell.stream())
    assert not lines(cell)
    go.touch()
    cell.wait()
    # Its lines were overwritten by what came later.
    assert "running for" in cell.stream() and not any("running for" in line for line in screen(cell))
    assert "[rank 2] ended" in screen(cell) and "ZeroDivisionError" in cell.text


def test_terminal_has_no_line_before_the_text_of_a_stop(notebook: Notebook) -> None:
    cell = notebook.send("%%mesh\nimport time\nwhile True: time.sleep(0.01)", cell_id="", allow_stdin=True)
    # A busy machine may skip a second.
    cell.until(lambda: re.search(r"ranks 0-3 running for [2-9]s", cell.stream()))
    notebook.interrupt()
    cell.wait()
    assert "stopped: ranks 0-3: interrupted" in screen(cell)
    assert not any("running for" in line for line in screen(cell))
