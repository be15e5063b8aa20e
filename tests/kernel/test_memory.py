"""A kernel that runs many cells keeps neither their requests nor their machinery, nor descriptors."""

from __future__ import annotations

import pytest

from kernels import Notebook

pytestmark = pytest.mark.slow

CELLS = 12
COUNT = """
import collections, gc, os
def held():
    gc.collect()
    kinds = collections.Counter(type(each).__name__ for each in gc.get_objects())
    requests = sum(type(each) is dict and "user_expressions" in each and "code" in each for each in gc.get_objects())
    return {"requests": requests, "descriptors": len(os.listdir("/proc/self/fd")),
            **{kind: kinds[kind] for kind in ("Run", "Displays", "Page", "Gather")}}
"""


def held(notebook: Notebook) -> dict[str, int]:
    return eval(notebook.run("print(held())").ok().stream())


def test_many_cells_leave_no_requests_behind(notebook: Notebook) -> None:
    notebook.run(COUNT).ok()
    notebook.mesh("print(1)\ndisplay(2)").ok()
    before = held(notebook)
    for _ in range(CELLS):
        notebook.mesh("print(1)\ndisplay(2)").ok()
    after = held(notebook)
    assert {kind: after[kind] - before[kind] for kind in after if after[kind] > before[kind] + 8} == {}


def test_handles_of_ended_cells_hold_only_results(notebook: Notebook) -> None:
    notebook.run(COUNT).ok()
    notebook.mesh("1", "--nowait").ok()
    before = held(notebook)
    handles = [notebook.mesh(f"print({n})\ndisplay(2)\n{n}", "--nowait").ok() for n in range(CELLS)]
    for cell in handles:
        cell.until(lambda cell=cell: "finished" in str(cell.contents("update_display_data")))
    after = held(notebook)
    assert {kind: after[kind] - before[kind] for kind in after if after[kind] > before[kind] + 8} == {}
    assert notebook.run("_mesh.result().item(procs=2)").ok().shown == str(CELLS - 1)
    assert "nothing was running" in notebook.run("_mesh.cancel()").ok().shown
    failed = notebook.mesh("1 / 0", "--nowait --out h").ok()
    failed.until(lambda: ": failed" in str(failed.contents("update_display_data")))
    for _ in range(2):
        again = notebook.run("h.result()")
        assert again.reply["ename"] == "MeshCellError" and "ZeroDivisionError" in again.text
