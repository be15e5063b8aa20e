"""A cell says which ranks have not joined a collective, and says it once."""

from __future__ import annotations

import pytest

from kernels import Cell, Notebook
from monarch_kernel.output.waiting import MARK

pytestmark = pytest.mark.slow


def explained(cell: Cell) -> list[str]:
    """Return what the line of a running cell has said."""
    displays = cell.contents("display_data", "update_display_data")
    return [each["data"].get("text/plain", "") for each in displays if MARK in each["metadata"]]


def until_said(cell: Cell, *parts: str) -> None:
    cell.until(lambda: any(all(part in text for part in parts) for text in explained(cell)), f"{parts}")


def test_cell_names_ranks_missing_from_a_collective(notebook: Notebook) -> None:
    notebook.mesh("dist.barrier()").ok()
    cell = notebook.send("%%mesh\nif rank == 0: dist.barrier()")
    until_said(
        cell, "stuck: rank 0 waits for ranks 1-3, which finished without calling barrier()", "call it on all ranks"
    )
    notebook.interrupt()
    assert cell.wait().status == "error"
    assert "has waited" not in cell.stream("stderr")
    assert notebook.mesh("dist.barrier()").ok().stream("stderr") == ""


def test_cell_names_ranks_it_does_not_run_on(notebook: Notebook) -> None:
    notebook.mesh("dist.barrier()").ok()
    cell = notebook.send("%%mesh [0,3]\ndist.barrier()")
    until_said(
        cell,
        "stuck: ranks 0,3 wait for ranks 1-2, which are idle: this cell does not run there",
        "run it on ranks 1-2 too, or use a process group of its ranks only",
    )
    notebook.interrupt()
    assert cell.wait().status == "error"
    assert "have waited" not in cell.stream("stderr")


def test_cell_names_missing_ranks_of_an_endpoint(notebook: Notebook) -> None:
    notebook.run(
        "from monarch.actor import Actor, endpoint, current_rank\n"
        "from monarch.distributed import group\n"
        "class Meeting(Actor):\n"
        "    @endpoint\n"
        "    def meet(self):\n"
        "        import torch.distributed as dist\n"
        "        if current_rank().rank == 0: dist.barrier(group())\n"
        "meeting = mesh.spawn('meeting', Meeting)\n"
        "meeting.initialized.get(20)"
    ).ok()
    cell = notebook.send("meeting.meet.call().get()")
    until_said(cell, "rank 0 waits for ranks 1-3", "running meeting.meet()")
    notebook.interrupt()
    assert cell.wait().status == "error"
    assert "has waited" not in cell.stream("stderr")


def test_call_that_no_cell_waits_for_is_told_by_a_line(notebook: Notebook) -> None:
    notebook.mesh("dist.barrier()").ok()
    cell = notebook.run("%%mesh --nowait --out gone\nif rank == 0: dist.barrier()").ok()
    notebook.take(lambda: "has waited" in cell.stream("stderr"), "the line about ranks that have not joined")
    assert "that ranks 1-3 have not joined: they have finished" in cell.stream("stderr")
    notebook.run("gone.cancel()").ok()


def test_nothing_is_said_of_a_cell_that_is_being_stopped(notebook: Notebook) -> None:
    notebook.mesh("dist.barrier()").ok()
    # One rank takes the interrupt seconds later; the other one waits for it meanwhile.
    cell = notebook.send(
        "%%mesh --timeout 1\n"
        "import time\n"
        "try:\n"
        "    if rank == 0: time.sleep(600)\n"
        "    dist.barrier()\n"
        "except KeyboardInterrupt:\n"
        "    time.sleep(6)\n"
        "    raise\n"
    )
    cell.wait()
    assert cell.status == "error"
    assert not any("wait for" in text or "waits for" in text for text in explained(cell)), explained(cell)
