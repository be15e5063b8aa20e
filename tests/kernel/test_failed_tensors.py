"""Ops on tensors that fail without a look at their results: the notebook tells it by itself."""

from __future__ import annotations

from typing import Any

from leaks import wait_until

MAKE = """
rows = torch.nn.functional.embedding(
    monarch.distribute(torch.tensor([0, 1, 2, 99]), mesh, ["procs"]), monarch.ones(4, 4, mesh=mesh)
)
twice = [rows * 2]
"""
TEXT = "monarch: aten::embedding failed on rank 1 of mesh: IndexError: index out of range in self\nIssued at cell ["


def test_failed_op_is_told_at_the_end_of_a_cell_or_at_idle(own: Any) -> None:
    book = own()
    book.run("import monarch, torch, time\nfrom pathlib import Path")
    book.run("%mesh up 2").ok()
    book.run("x = monarch.ones(4, mesh=mesh); x.sum().item()").ok()
    # While no cell runs: in the output of the last one.
    cell = book.send(MAKE)
    cell.until(lambda: TEXT in cell.text, "the failure")
    assert "Without a value: rows, twice; tensors that do not depend on it are unchanged." in cell.text
    # At the end of the cell that runs when it is known, once.
    code = "from monarch._engine.meshes.tensor_mesh import tensor_mesh_of\n"
    code += "failed = tensor_mesh_of(mesh).recovery.unreported\n"
    ended = book.run(code + MAKE + "while not failed: time.sleep(0.01)").ok()
    assert ended.text.count(TEXT) == 1 and "cell [5] line" in ended.text
    # A look raises it: nothing more is told.
    looked = book.run(MAKE + "while not failed: time.sleep(0.01)\nrows.sum().item()")
    assert looked.status == "error" and TEXT not in looked.text
    assert "4.0" in book.run("x.sum().item()").ok().shown


DIES = """
def end(x, rank):
    if int(os.environ["RANK"]):
        os._exit(9)
    return x.clone()
with mesh.activate():
    gone = monarch.remote(end, propagate=lambda x, rank: x.clone())(torch.ones(2), 0)
spread = part.replicate()
whole.add_(1);
"""
DEAD = """
from monarch._meshes.inside import node_of, state_of
from monarch._meshes.procs.queries import dead_ranks
dead_ranks(state_of(mesh.procs), node_of(mesh.procs))
"""


def test_heal_tells_what_was_lost_and_what_ops_have_not_changed(own: Any) -> None:
    book = own()
    book.run("import monarch, torch, time, os\nfrom monarch.distributed import Mesh")
    book.run("mesh = Mesh(shape=(2,), mesh_dim_names=('gpus',))").ok()
    book.run("part = monarch.distribute(torch.arange(4.0), mesh, ['gpus'])\nwhole = monarch.ones(4, mesh=mesh)").ok()
    book.run("part.sum().item(), whole.sum().item()").ok()
    # Rank 0 waits in the op after the death, and has not changed the tensor then.
    book.run(DIES).ok()
    assert wait_until(lambda: "[1]" in book.run(DEAD).ok().shown)
    told = book.run("monarch.heal_mesh(mesh);").ok().text
    assert "monarch: rank 1 of mesh died with tensor shards that no other rank had\nWithout a value: part" in told
    assert "redistribute was cancelled: rank 1 of mesh died before all ranks had run it" in told
    assert "Without a value: spread." in told
    assert "whole.add_(1)" in told and "Left unchanged: whole. Run the line again, or load a checkpoint." in told
    assert "4.0" in book.run("whole.sum().item()").ok().shown
