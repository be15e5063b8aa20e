"""Ordinary distributed PyTorch runs in cells as it is written, whoever asks for the process group first."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from kernels import Notebook
from leaks import Kit

pytestmark = pytest.mark.slow

REDUCE = "t = torch.ones(1); dist.all_reduce(t); t.item()"
FIRST = {
    "import as": "import torch.distributed as dist\nt = torch.ones(1); dist.all_reduce(t); t.item()",
    "full name": "import torch\nt = torch.ones(1); torch.distributed.all_reduce(t); t.item()",
    "from": "from torch.distributed import all_reduce\nt = torch.ones(1); all_reduce(t); t.item()",
    "asked": "import torch.distributed as d\nfloat(d.get_world_size() if d.is_initialized() else 1)",
    "initialized": "import torch.distributed as d\nd.init_process_group('gloo'); float(d.get_world_size())",
    "in a thread": "import threading\nfound = []\n"
    "thread = threading.Thread(target=lambda: found.append(dist.get_world_size()))\n"
    "thread.start(); thread.join(); float(found[0])",
    "group.WORLD": "float(dist.group.WORLD.size())",
    "device mesh": "from torch.distributed.device_mesh import init_device_mesh\n"
    "float(init_device_mesh('cpu', (4,)).size())",
    "DDP": "from torch.nn.parallel import DistributedDataParallel\n"
    "model = torch.nn.Linear(2, 1, bias=False); torch.nn.init.ones_(model.weight)\n"
    "model = DistributedDataParallel(model)\nmodel(torch.full((1, 2), rank + 1.0)).sum().backward()\n"
    "model.module.weight.grad[0, 0].item() + 1.5",
    "fully_shard": "from torch.distributed.fsdp import fully_shard\n"
    "model = torch.nn.Linear(4, 1); fully_shard(model); float(model.weight.device_mesh.size())",
}


@pytest.fixture
def fresh(notebook: Notebook, leaks: Kit) -> Iterator[Notebook]:
    """A mesh whose ranks have no process group."""
    notebook.run("%mesh restart").ok()
    yield notebook
    leaks.rebase()


@pytest.mark.parametrize("how", FIRST)
def test_whoever_asks_first_has_the_group(fresh: Notebook, how: str) -> None:
    assert fresh.mesh(FIRST[how]).ok().shown == "[ranks 0-3] 4.0"
    assert fresh.mesh(REDUCE).ok().shown == "[ranks 0-3] 4.0"


def test_ranks_have_the_variables_of_torchrun(notebook: Notebook) -> None:
    names = "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"
    code = f"import os\n[os.environ[each] for each in {names}]"
    lines = notebook.mesh(code).ok().shown.splitlines()
    assert lines == [f"[rank {rank}] ['{rank}', '{rank}', '4', '4', '127.0.0.1']" for rank in range(4)]
    assert notebook.mesh("20000 <= int(os.environ['MASTER_PORT']) < 30000").ok().shown == "[ranks 0-3] True"


def test_variables_of_torchrun_that_a_library_deletes_come_back(notebook: Notebook) -> None:
    notebook.mesh("import os\ndel os.environ['WORLD_SIZE'], os.environ['RANK']\nos.environ['LOCAL_RANK'] = '7'").ok()
    shown = notebook.mesh("[os.environ[each] for each in ('WORLD_SIZE', 'RANK', 'LOCAL_RANK')]", "[2]").ok().shown
    assert shown == "[rank 2] ['4', '2', '7']"
    notebook.mesh("os.environ['LOCAL_RANK'] = os.environ['RANK']").ok()


def test_variables_of_the_user_stay_and_follow_a_resize(own: Callable[..., Notebook]) -> None:
    book = own()
    book.run("%mesh up --procs 2 --env MASTER_PORT=4321").ok()
    code = "import os\nos.environ['WORLD_SIZE'], os.environ['MASTER_PORT'], dist.get_world_size()"
    assert book.mesh(code).ok().shown == "[ranks 0-1] ('2', '4321', 2)"
    book.run("%mesh resize procs=3").ok()
    assert book.mesh(code).ok().shown == "[ranks 0-2] ('3', '4321', 3)"


def test_cells_may_be_run_again_and_the_name_be_deleted(notebook: Notebook) -> None:
    cell = "import torch.distributed as dist\ndist.init_process_group('gloo')\n" + REDUCE
    for _ in range(2):
        assert notebook.mesh(cell).ok().shown == "[ranks 0-3] 4.0"
    notebook.mesh("dist.destroy_process_group()\ndel dist").ok()
    assert notebook.mesh(REDUCE).ok().shown == "[ranks 0-3] 4.0"


def test_arguments_of_init_process_group_are_respected(notebook: Notebook, tmp_path: object) -> None:
    cell = notebook.mesh("dist.init_process_group('nccl')\n" + REDUCE).ok()
    assert cell.shown == "[ranks 0-3] 4.0" and "the group uses gloo" in cell.stream("stderr")
    timeout = "from datetime import timedelta\ndist.init_process_group(timeout=timedelta(seconds=77))\n"
    timeout += "dist.group.WORLD._get_backend(torch.device('cpu')).options._timeout.seconds"
    assert notebook.mesh(timeout).ok().shown == "[ranks 0-3] 77"
    # A group of two ranks is another one than the mesh's, so the program gets its own.
    pair = f"dist.init_process_group('gloo', init_method='file://{tmp_path}/pair', rank=rank, world_size=2)\n"
    pair += "x = torch.ones(1); dist.all_reduce(x); x.item(), dist.get_world_size()"
    assert notebook.mesh(pair, "[0:2]").ok().shown == "[ranks 0-1] (2.0, 2)"
    notebook.mesh("if rank < 2: dist.destroy_process_group()").ok()
    assert notebook.mesh(REDUCE).ok().shown == "[ranks 0-3] 4.0"


def test_group_is_made_again_after_a_stop_under_any_name(notebook: Notebook) -> None:
    notebook.mesh("import torch.distributed as other\nother.barrier()").ok()
    cell = notebook.send("%%mesh\nprint('runs')\nif rank: other.barrier()\nelse:\n    import time; time.sleep(600)")
    cell.until(lambda: "runs" in cell.stream())
    notebook.interrupt()
    assert cell.wait().status == "error"
    assert notebook.mesh("t = torch.ones(1); other.all_reduce(t); t.item()").ok().shown == "[ranks 0-3] 4.0"


def test_groups_work_again_after_a_rank_failed_to_form_them(notebook: Notebook) -> None:
    """The others, which wait for its part, learn of it."""
    notebook.mesh("dist.barrier()").ok()
    notebook.mesh(
        "from monarch._tensors.collectives import world\nlook, left = world.open_sockets, [1, 2]\n"
        "def failing():\n    if left:\n        left.pop()\n        raise OSError('no descriptors')\n"
        "    return look()\nworld.open_sockets = failing",
        "[2]",
    ).ok()
    cell = notebook.send("%%mesh\nprint('runs')\nif rank: dist.barrier()\nelse:\n    import time; time.sleep(600)")
    cell.until(lambda: cell.said().get("runs") == set(range(4)))
    notebook.interrupt()
    assert cell.wait().status == "error"
    cell = notebook.mesh(REDUCE)
    assert (
        cell.status == "error" and "rank 2: GroupError: the process group was not created: no descriptors" in cell.text
    )
    assert "waiting" not in cell.stream("stderr")
    assert notebook.mesh(REDUCE).ok().shown.endswith("[ranks 0-3] 4.0")


def test_failed_operation_does_not_replace_the_group_it_is_in(notebook: Notebook) -> None:
    """The error names its origin, also if torch logs it with the rank of the default group."""
    notebook.mesh("dist.barrier()").ok()
    cell = notebook.mesh("if rank == 1: raise ValueError('bad sample 17')\ndist.barrier()")
    assert cell.status == "error" and "bad sample 17" in cell.text and "not initialized" not in cell.text
    assert notebook.mesh(REDUCE).ok().shown == "[ranks 0-3] 4.0"


def test_names_of_the_mesh_come_back(notebook: Notebook) -> None:
    cell = notebook.mesh("dist = rank = None\nworld_size = 4").ok()
    assert cell.stream("stderr").count("has overwritten dist, rank of the mesh; 'del dist, rank' undoes it") == 1
    assert notebook.mesh("rank = 7").ok().stream("stderr") == ""
    notebook.mesh("del dist, rank").ok()
    cell = notebook.mesh("t = torch.ones(1); dist.all_reduce(t); rank + t.item()").ok()
    assert cell.shown.endswith("[rank 3] 7.0")
    assert notebook.mesh("import torch.distributed as dist").ok().stream("stderr") == ""


SPAWNED = """
import torch.multiprocessing as mp
class Batch:
    def __init__(self, x): self.x = x
def double(batch): return Batch(2 * batch.x)
def fail(index): raise ValueError(f"process {index}")
with mp.get_context("spawn").Pool(1) as pool:
    found = pool.map(double, [Batch(rank), Batch(5)])
assert all(type(each) is Batch for each in found)
print([each.x for each in found])
"""


def test_spawned_processes_know_what_cells_define(own: Callable[..., Notebook]) -> None:
    notebook = own()
    number = notebook.run("%mesh up 2").ok().reply["execution_count"] + 1
    cell = notebook.run(f"%%mesh [1]{SPAWNED}").ok()
    # Functions and classes go by value, and instances come back as those of the cell.
    assert cell.said("stdout") == {"[2, 10]": {1}}
    # torch's own way, with the line of the cell.
    text = notebook.run("%%mesh [1]\nmp.spawn(fail, nprocs=1)").text
    assert "ValueError: process 0" in text and f'File "cell [{number}]", line 6, in fail' in text
    # The tracker of semaphores ends with its rank.
    notebook.run("%mesh down").ok()
