"""Stop and the user's own handling of it: cleanup is not aborted, and swallowed interrupts cost no variables."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kernels import ALL, Cell, Notebook
from leaks import Kit

pytestmark = pytest.mark.slow

CLEANUP = """
import time
saved = 0
try:
    print("runs")
    while True: time.sleep(0.01)
{}
"""
SAVES = """
    begun = time.monotonic()
    while time.monotonic() < begun + 3: time.sleep(0.01)
    saved = rank + 1
"""
CLAUSES = {
    "except": f"except KeyboardInterrupt:{SAVES}",
    "finally": f"finally:{SAVES}",
    "after": f"except KeyboardInterrupt:\n    pass\nif True:{SAVES}",
    "collective": f"except KeyboardInterrupt:\n    if rank == 0: time.sleep(2)\n    dist.barrier(){SAVES}",
}


@pytest.fixture(autouse=True)
def same_ranks(notebook: Notebook, leaks: Kit) -> Iterator[None]:
    """Do not count replaced ranks as leaks."""
    yield
    notebook.run("1").ok()
    leaks.rebase()


def stopped(notebook: Notebook, body: str) -> tuple[Cell, float]:
    """Stop a cell once it runs on all ranks; return it and the seconds that the stop took."""
    cell = notebook.send(f"%%mesh\n{body}")
    cell.until(lambda: cell.said().get("runs") == ALL)
    begun = time.perf_counter()
    notebook.interrupt()
    cell.wait()
    assert cell.reply["ename"] == "KeyboardInterrupt"
    return cell, time.perf_counter() - begun


@pytest.mark.parametrize("clause", CLAUSES)
def test_one_stop_does_not_break_off_cleanup(notebook: Notebook, clause: str) -> None:
    cell, seconds = stopped(notebook, CLEANUP.format(CLAUSES[clause]))
    # The notebook is back in time, and says what goes on.
    assert seconds < 2.0
    words = "past its except code" if clause == "after" else "in its except or finally code"
    assert words in cell.stream("stderr") and "Stop again to abort it" in cell.stream("stderr")
    assert "at cell [" in cell.stream("stderr") and "replace" not in cell.stream("stderr")
    after = notebook.mesh("saved")
    assert after.ok().shown.splitlines() == [f"[rank {rank}] {rank + 1}" for rank in range(4)]
    assert "still in except or finally code; Stop aborts it" in after.stream("stderr")
    assert notebook.mesh("x = torch.ones(1); dist.all_reduce(x); x.item()").ok().shown == "[ranks 0-3] 4.0"


ENDLESS = CLEANUP.format("except KeyboardInterrupt:\n    while True: time.sleep(0.01)")


def test_second_stop_breaks_off_cleanup_of_a_cell_in_the_way(notebook: Notebook) -> None:
    stopped(notebook, f"kept = rank\n{ENDLESS}")
    cell = notebook.send("%%mesh\nkept")
    cell.until(lambda: "Stop aborts it" in cell.stream("stderr"))
    notebook.interrupt()
    cell.wait()
    assert "ranks 0-3: interrupted" in cell.stream("stderr")
    assert notebook.mesh("kept == rank").ok().shown == "[ranks 0-3] True"


def test_second_stop_breaks_off_cleanup_while_no_cell_runs(notebook: Notebook) -> None:
    cell, _ = stopped(notebook, f"kept = rank\n{ENDLESS}")
    notebook.interrupt()
    notebook.take(lambda: "ranks 0-3: interrupted" in cell.stream(), "the end of the cleanup")
    after = notebook.mesh("kept == rank").ok()
    assert after.shown == "[ranks 0-3] True" and "waiting" not in after.stream()


SWALLOWS = {
    "pass": "while True:\n    try:\n        step()\n    except:\n        pass",
    "one line": "while True:\n    try: step()\n    except: pass",
    "says": "while True:\n    try:\n        step()\n    except BaseException as error:\n        print(error)",
    "function": (
        "def attempt():\n    try:\n        with nothing():\n            step()\n    except:\n        return None\n"
        "while True:\n    attempt()"
    ),
    "nested": (
        "while True:\n    try:\n        while True:\n            try:\n                step()\n"
        "            except:\n                count += 1\n    except:\n        count += 1"
    ),
    "saves": (
        "try:\n    while True:\n        try:\n            step()\n        except:\n            pass\n"
        "except KeyboardInterrupt:\n    time.sleep(3)\n    saved = True"
    ),
}


@pytest.mark.parametrize("kind", SWALLOWS)
def test_swallowed_interrupt_costs_no_variables(notebook: Notebook, kind: str) -> None:
    notebook.mesh(
        "import os, time\nfrom contextlib import nullcontext as nothing\n"
        "kept, pid, count, saved = rank, os.getpid(), 0, False"
    ).ok()
    notebook.mesh("def step():\n    sum(range(1000))\n    torch.ones(10).sum()").ok()
    cell, seconds = stopped(notebook, f"print('runs')\n{SWALLOWS[kind]}")
    assert seconds < 2.0 and "replace" not in cell.text, cell.text
    assert ("Stop again" if kind == "saves" else "ranks 0-3: interrupted") in cell.stream("stderr")
    after = notebook.mesh("kept == rank, pid == os.getpid(), saved").ok()
    assert after.shown == f"[ranks 0-3] (True, True, {kind == 'saves'})"


LOADER = """
import time
from torch.utils.data import DataLoader, Dataset
class Slow(Dataset):
    def __len__(self): return 100
    def __getitem__(self, item):
        if item: time.sleep(1000)
        return torch.ones(1)
"""


@pytest.mark.parametrize("body", ["pass", "time.sleep(1000)"])
def test_loader_of_a_stopped_cell_delays_no_other(notebook: Notebook, body: str) -> None:
    """Torch waits 5 s for each worker in the middle of an item."""
    notebook.mesh(LOADER).ok()
    cell = notebook.send(f"%%mesh [0]\nfor batch in DataLoader(Slow(), num_workers=2):\n    print('runs')\n    {body}")
    cell.until(lambda: cell.said().get("runs") == {0})
    notebook.interrupt()
    assert cell.wait().status == "error"
    assert "Exception ignored" not in cell.text, "by a second interrupt, since the first one did not end it"
    begun = time.perf_counter()
    assert notebook.mesh("rank", "[0]").ok().shown == "[rank 0] 0"
    assert time.perf_counter() - begun < 4


def test_import_that_a_stop_cuts_off_is_named(notebook: Notebook, tmp_path: Path) -> None:
    (tmp_path / "slow_to_import.py").write_text("import time\nprint('begun', flush=True)\ntime.sleep(600)\n")
    cell = notebook.send(f"%%mesh\nimport sys\nsys.path.insert(0, {str(tmp_path)!r})\nimport slow_to_import")
    cell.until(lambda: cell.said().get("begun") == ALL)
    notebook.interrupt()
    cell.wait()
    assert "the import of slow_to_import was interrupted" in cell.text and "%mesh restart" in cell.text, cell.text
    notebook.mesh("sys.path.pop(0); 1 / 1").ok()
