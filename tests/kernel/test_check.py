"""``%mesh check``: ranks that call different collectives are told so, before anything hangs or gives a wrong result."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kernels import Cell, Notebook
from monarch_kernel.output.waiting import MARK

pytestmark = pytest.mark.slow
STARTED = "import torch, torch.distributed as dist\nrank = dist.get_rank()"


def explained(cell: Cell) -> list[str]:
    """Return what the line of a running cell has said."""
    displays = cell.contents("display_data", "update_display_data")
    return [each["data"].get("text/plain", "") for each in displays if MARK in each["metadata"]]


def test_mismatch_is_an_error_with_lines(own: Callable[..., Notebook]) -> None:
    book = own()
    book.run("%mesh up --procs 3").ok()
    book.mesh(STARTED).ok()
    assert book.run("%mesh check").ok().text.strip() == "collectives are not checked on all 3 ranks of mesh 'mesh'"
    assert "mesh 'mesh' compares each collective before it begins" in book.run("%mesh check on").ok().text
    assert "(cells run on it, collectives checked)" in book.run("%mesh").ok().text
    cell = book.mesh("x = torch.ones(5 if rank == 1 else 4)\n\ndist.all_reduce(x)")
    assert cell.status == "error"
    assert (
        "CollectiveMismatchError: ranks of the default group called mismatching collectives: ranks 0,2 called "
        in cell.text
    )
    assert "ranks 0,2 called all_reduce (sum) of float32[4] at cell [" in cell.text and "] line 4, rank 1" in cell.text
    assert "rank 1 called all_reduce (sum) of float32[5] at cell [" in cell.text
    assert cell.text.count("CollectiveMismatchError: ") == 2, cell.text
    book.mesh("x = torch.ones(1)\ndist.all_reduce(x)\nassert x.item() == 3").ok()
    assert "no longer compares collectives" in book.run("%mesh check off mesh").ok().text
    book.mesh("dist.all_reduce(torch.ones(1))").ok()
    assert "(cells run on it)" in book.run("%mesh").ok().text
    assert "expected on or off" in book.run("%mesh check on off").text


def test_mesh_can_begin_checked(own: Callable[..., Notebook]) -> None:
    book = own()
    book.run("%mesh up --procs 2 --check-collectives").ok()
    assert "collectives are checked on all 2 ranks" in book.run("%mesh check").ok().text
    book.mesh(STARTED).ok()
    cell = book.mesh("dist.barrier() if rank else dist.all_reduce(torch.ones(1))")
    assert "rank 0 called all_reduce (sum) of float32[1] at" in cell.text and "rank 1 called barrier at" in cell.text
    book.mesh("dist.barrier()").ok()


def test_check_that_waits_is_explained_and_stopped(own: Callable[..., Notebook]) -> None:
    book = own(MONARCH_STUCK_WAIT_S="1")
    book.run("%mesh up --procs 3").ok()
    book.mesh(STARTED).ok()
    book.run("%mesh check on").ok()
    cell = book.send("%%mesh\nimport time\nif rank == 1: time.sleep(600)\ndist.barrier()")
    cell.until(lambda: any("ranks 0,2 wait for rank 1, which is asleep" in text for text in explained(cell)))
    book.interrupt()
    assert cell.wait().status == "error"
    book.mesh("x = torch.ones(1)\ndist.all_reduce(x)\nassert x.item() == 3").ok()
    cell = book.send("%%mesh\nif rank == 1: raise ValueError('bad sample')\ndist.barrier()")
    assert "bad sample" in cell.wait().text
    book.mesh("x = torch.ones(1)\ndist.all_reduce(x)\nassert x.item() == 3").ok()
