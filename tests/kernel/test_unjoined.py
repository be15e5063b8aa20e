"""A cell reports ranks that wait in a collective for ranks that have finished the cell."""

from __future__ import annotations

from collections.abc import Callable

from kernels import Notebook


def test_cell_names_ranks_missing_from_a_collective(notebook: Notebook) -> None:
    notebook.mesh("dist.barrier()").ok()
    cell = notebook.send("%%mesh\nif rank == 0: dist.barrier()")
    cell.until(lambda: "has waited" in cell.stream("stderr"))
    text = cell.stream("stderr")
    assert (
        text.startswith("rank 0 has waited ") and "that ranks 1-3 have not joined: they have finished this cell" in text
    )
    assert "stop the cell, or call it on all ranks of the group" in text
    notebook.interrupt()
    assert cell.wait().status == "error"
    assert notebook.mesh("dist.barrier()").ok().stream("stderr") == ""


def test_cell_names_ranks_it_does_not_run_on(notebook: Notebook) -> None:
    notebook.mesh("dist.barrier()").ok()
    cell = notebook.send("%%mesh [0,3]\ndist.barrier()")
    cell.until(lambda: "has waited" in cell.stream("stderr") or "have waited" in cell.stream("stderr"))
    assert "that ranks 1-2 have not joined: this cell does not run on them; stop the cell" in cell.stream("stderr")
    notebook.interrupt()
    assert cell.wait().status == "error"


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
    cell.until(lambda: "has waited" in cell.stream("stderr"))
    assert "that ranks 1-3 have not joined: they have finished meeting.meet()" in cell.stream("stderr")
    notebook.interrupt()
    assert cell.wait().status == "error"


def test_checked_mesh_names_different_shapes(own: Callable[..., Notebook]) -> None:
    book = own()
    book.run("%mesh up --procs 3 --check-collectives").ok()
    book.mesh("import torch\ndist.all_reduce(torch.ones(4))").ok()
    cell = book.mesh("dist.all_reduce(torch.ones(5 if rank == 1 else 4))")
    assert cell.status == "error"
    assert cell.text.count("CollectiveMismatchError: ranks of a process group") >= 2, cell.text
    assert "rank 0 called allreduce of shape (4) and dtype float32" in cell.text
    assert "rank 1 called allreduce of shape (5) and dtype float32" in cell.text
    book.mesh("dist.all_reduce(torch.ones(4))").ok()
