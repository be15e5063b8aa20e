"""Distributed tensors in a notebook: the picture, the memory by name, Stop, and out of memory."""

from __future__ import annotations

import re
from typing import Any

from leaks import wait_until

START = """
import torch, monarch
from monarch.distributed import Mesh
mesh = Mesh(shape=(2,), mesh_dim_names=("dp",))
x = monarch.ones(1024, 256, mesh=mesh, spec=["dp", None])
x.sum().item()
"""


def test_tensors_in_a_notebook_are_shown_stopped_and_freed(own: Any) -> None:
    book = own()
    assert "262144.0" in book.run(START).ok().shown
    picture = book.run("x").ok().bundles[-1]
    assert "<svg" in picture["text/html"] and "rank 1: [512:1024, 0:256]" in picture["text/html"]
    assert 'spec=["dp", None], mean=1' in picture["text/plain"]
    table = book.run("%mesh").ok().shown
    assert "distributed tensors" in table and "1.0 MiB" in table, table
    # Out of memory on the ranks: the results fail, and the rest goes on.
    failed = book.run("big = monarch.zeros(1 << 50, mesh=mesh); big[0].item()")
    assert failed.status == "error" and "allocate" in failed.text and "big = monarch.zeros(1 << 50" in failed.text
    assert "262144.0" in book.run("x.sum().item()").ok().shown
    # A mistake is shown at its line, without the frames of the inference of shapes.
    wrong = book.run("x @ torch.ones(3, 3)")
    text = re.sub(r"\x1b\[[0-9;]*m", "", wrong.text)
    assert "must have same reduction dim" in text and "x @ torch.ones(3, 3)" in text
    assert "fake_tensor" not in text and text.count("\n") < 30
    # Stop in the middle of a long stream.
    code = "y = monarch.zeros(4, mesh=mesh)\nprint('begun')\nwhile True:\n    y += 1\n    x = x * 1"
    cell = book.send(code)
    cell.until(lambda: "begun" in cell.text, "the stream")
    book.interrupt()
    assert "KeyboardInterrupt" in cell.wait().text
    values = book.run("v = y.tolist(); print(len(set(v)), v[0] > 0, x.sum().item())").ok().text
    assert "1 True 262144.0" in values


KILLED = """
part = monarch.distribute(torch.arange(8.0), mesh, ["procs"])
whole = monarch.ones(4, mesh=mesh)
part.sum().item(), whole.sum().item()
"""


def test_tensors_go_on_after_a_rank_was_replaced(own: Any) -> None:
    book = own()
    book.run("import monarch, torch")
    book.run("%mesh up 4").ok()
    for first in (
        "whole.sum().item()",
        "late = monarch.distribute(torch.ones(8), mesh, ['procs']); late.sum().item()",
        "late = monarch.ones(8, mesh=mesh.slice(procs=slice(1, 3))); late.sum().item()",
    ):
        assert "(28.0, 4.0)" in book.run(KILLED).ok().shown
        book.run("%mesh kill 2").ok()
        book.run(first).ok()
        assert "4.0" in book.run("whole.sum().item()").ok().shown
        lost = book.run("part.sum().item()")
        assert lost.status == "error" and "only on rank 2 of mesh, which died" in lost.text
    # A restart rule replaces it without being asked.
    book.run("%mesh down").ok()
    book.run("%mesh up 4 --restart on-failure").ok()
    assert "(28.0, 4.0)" in book.run(KILLED).ok().shown
    assert book.run("%%mesh [2]\nimport os; os.kill(os.getpid(), 9)").status == "error"
    assert wait_until(lambda: "(28.0, 4.0)" in book.run(KILLED).shown)


FUNCTIONS = """
import time
def spins(x, rank):
    print('runs', flush=True)
    while True: pass
def spins_on_one(x, rank):
    print('runs', flush=True)
    while rank > 0: pass
    return x
def waits(x, rank):
    import torch.distributed as dist
    print('runs', flush=True)
    time.sleep(600) if rank else dist.barrier()
"""


def test_rank_local_tensors_in_a_notebook(own: Any) -> None:
    book = own()
    book.run("import torch, monarch\nfrom monarch.distributed import Mesh")
    book.run(
        'mesh = Mesh(shape=(2,), mesh_dim_names=("gpus",))\nwith mesh.activate():\n    x = torch.ones(1024, 256)'
    ).ok()
    assert "RankTensor(shape=(1024, 256), dtype=float32, mesh=Mesh(gpus=2))" in book.run("x").ok().shown
    assert "262144.0" in book.run("monarch.inspect(x, gpus=1).sum().item()").ok().shown
    assert "1.0 MiB" in book.run("%mesh").ok().shown
    # A function of a cell fails on one rank, and nothing looks at its results.
    code = "def check(x, rank):\n    assert rank < 1, 'wrong rank'\n    return x\n"
    code += "failed = monarch.remote(check, propagate=lambda x, rank: x)(x, mesh.rank_tensor('gpus'))"
    book.run(code).ok()
    lost = book.run("monarch.inspect(failed)")
    assert lost.status == "error" and "AssertionError: wrong rank" in lost.text and "Issued at" in lost.text
    # Stop while functions run on the ranks: they are interrupted, also in a collective that others do not enter.
    book.run(FUNCTIONS).ok()
    for name in ("spins", "spins_on_one", "waits"):
        call = f"monarch.remote({name}, propagate=lambda x, rank: x)(x, mesh.rank_tensor('gpus'))"
        cell = book.send(f"y = {call}\nmonarch.inspect(y)")
        cell.until(lambda cell=cell: cell.said().get("runs") == {0, 1}, "the function")
        book.interrupt()
        assert "stopped: rank" in cell.wait().text
        lost = book.run("monarch.inspect(y)").text
        assert f"because the remote function {name} failed on rank" in lost and "it was interrupted" in lost
        # Places are those of the notebook, without frames of the engine.
        assert "Issued at cell [" in lost and f", in {name}\n" in lost and "executor.py" not in lost
        assert "262144.0" in book.run("monarch.inspect(x, gpus=1).sum().item()").ok().shown
    # Stop in the middle of a long stream, in the block.
    code = "with mesh.activate():\n    y = torch.zeros(4)\n    print('begun')\n"
    code += "    while True:\n        y += 1\n        x = x * 1"
    cell = book.send(code)
    cell.until(lambda: "begun" in cell.text, "the stream")
    book.interrupt()
    assert "KeyboardInterrupt" in cell.wait().text
    code = "v = [monarch.inspect(y, gpus=rank).tolist() for rank in range(2)]\n"
    code += "print(v[0] == v[1], v[0][0] > 0, type(torch.ones(1)).__name__)"
    assert "True True Tensor" in book.run(code).ok().text
