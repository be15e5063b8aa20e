"""``%%mesh`` cells on GPUs: devices, memory, Stop, lost GPUs, and ranks that share one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
import torch

from books import installed, own
from kernels import Notebook
from leaks import Kit, wait_until

__all__ = ["installed", "own"]

BUSY = "torch.cuda._sleep(int(2e9) * {}); torch.cuda.synchronize()"
"""Some seconds of work of the GPU, for which the program waits; longer if others use the GPU."""


@pytest.fixture(scope="module")
def shared(spec: str) -> Iterator[Notebook]:
    """A notebook with a mesh of two ranks, which share a GPU if there is one only."""
    book = Notebook()
    book.guard = 90.0
    try:
        book.run("%mesh up 2").ok()
        yield book
    finally:
        book.close()


@pytest.fixture
def notebook(shared: Notebook, leaks: Kit) -> Iterator[Notebook]:
    yield shared
    shared.run("%mesh heal").ok()
    leaks.rebase()


def test_cells_compute_on_the_gpu_and_the_table_shows_its_memory(notebook: Notebook) -> None:
    cell = notebook.mesh("x = torch.full((1000, 1000), rank + 1.0, device='cuda')\nx.sum()").ok()
    assert "[rank 0] Tensor float32[] on cuda:0 = 1e+06" in cell.shown
    table = notebook.run("%mesh").ok().shown
    assert re.search(r"cuda:0 .* [1-9]\d* MiB +idle", table), table


def test_values_are_compared_and_fetched(notebook: Notebook) -> None:
    notebook.mesh("y = torch.arange(4.0, device='cuda') + rank").ok()
    assert "first difference at [0]: 0 on rank 0, 1 on rank 1" in notebook.run("%mesh diff y").ok().text
    notebook.run("%mesh pull y").ok()
    assert "[3.0, 4.0]" in notebook.run("[each[-1].item() for each in y.values()]").ok().shown


def test_the_memory_and_load_of_gpus_reach_the_events(notebook: Notebook) -> None:
    made = "a = torch.randn(8192, 8192, device='cuda')"
    cell = notebook.send(f"%%mesh --nowait\n{made}\nwhile True:\n    b = a @ a\n    torch.cuda.synchronize()").wait()
    usage = "[each.event.usage for each in mesh.events() if hasattr(each.event, 'usage')]"
    asked = (
        f"seen = {usage}; (max(each.gpu_memory for each in seen) > 2**28, max(each.gpu_load for each in seen) > 0.3)"
    )
    assert wait_until(lambda: notebook.run(asked).shown == "(True, True)", 60)
    notebook.run("%mesh interrupt").ok()
    assert cell.status == "ok"


def test_a_stop_ends_a_loop_of_kernels(notebook: Notebook) -> None:
    notebook.mesh("c = torch.randn(4096, 4096, device='cuda')").ok()
    cell = notebook.send("%%mesh\nprint('begun')\nwhile True: d = c @ c")
    cell.until(lambda: "begun" in cell.text)
    notebook.interrupt()
    assert "interrupted" in cell.wait().text
    assert notebook.mesh("d.shape").ok().shown == "[ranks 0-1] torch.Size([4096, 4096])"


def test_a_rank_that_waits_for_its_gpu_is_told(notebook: Notebook) -> None:
    notebook.run("%%mesh [0] --nowait\n" + BUSY.format(6)).ok()
    assert wait_until(lambda: "waiting for its GPU" in notebook.run("%mesh why").ok().text, 30)
    notebook.run("%mesh kill 0").ok()


def test_out_of_memory_leaves_the_rank_usable(notebook: Notebook) -> None:
    assert "OutOfMemoryError" in notebook.mesh("torch.empty(1 << 42, device='cuda')").text
    assert notebook.mesh("1 + 1").ok().shown == "[ranks 0-1] 2"


def test_an_assert_on_the_gpu_names_the_way_to_replace_the_rank(notebook: Notebook) -> None:
    wrong = "i = torch.tensor([7], device='cuda')\ntorch.zeros(3, device='cuda')[i].sum().item()"
    cell = notebook.mesh(wrong, "[1]")
    assert "the process of rank 1 can no longer use the GPU; %mesh kill 1 replaces it" in cell.text
    assert notebook.run("%mesh kill 1").ok()
    assert notebook.mesh("torch.ones(2, device='cuda').sum().item()").ok().shown == "[ranks 0-1] 2.0"


def test_ranks_that_share_a_gpu_train_with_ddp_and_fsdp(notebook: Notebook) -> None:
    ddp = """import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
model = DistributedDataParallel(torch.nn.Linear(8, 8).cuda())
model(torch.full((2, 8), rank + 1.0, device='cuda')).sum().backward()
model.module.weight.grad.sum().item()"""
    assert notebook.mesh(ddp).ok().shown == "[ranks 0-1] 192.0"
    fsdp = """from torch.distributed.fsdp import fully_shard
model = fully_shard(torch.nn.Linear(8, 8).cuda())
model(torch.full((2, 8), rank + 1.0, device='cuda')).sum().backward()
model.weight.grad.full_tensor().sum().item()"""
    assert notebook.mesh(fsdp).ok().shown == "[ranks 0-1] 192.0"


def test_one_rank_a_gpu_trains_with_nccl(own: Callable[..., Notebook]) -> None:
    book = own()
    book.guard = 90.0
    count = torch.cuda.device_count()
    book.run(f"%mesh up {count}").ok()
    cell = """import torch.distributed as dist
dist.init_process_group('nccl')
from torch.distributed.fsdp import fully_shard
model = fully_shard(torch.nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
for step in range(3):
    optimizer.zero_grad()
    loss = model(torch.ones(8, 64, device='cuda')).square().mean()
    loss.backward()
    optimizer.step()
dist.get_backend_config()"""
    assert "cuda:nccl" in book.mesh(cell).ok().shown
    cell = book.send("%%mesh\na = torch.ones(4, device='cuda')\nprint('begun')\nwhile True: dist.all_reduce(a)")
    cell.until(lambda: "begun" in cell.text)
    book.interrupt()
    assert "interrupted" in cell.wait().text
    assert book.mesh("a.fill_(1); dist.all_reduce(a); a[0].item()").ok().shown.endswith(f"{float(count)}")
