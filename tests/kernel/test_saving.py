"""``%mesh checkpoint`` and ``%mesh restore``: variables of cells to disk, and back on the same or other ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kernels import Notebook
from leaks import Kit

MODEL = """
torch.manual_seed(rank)
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
"""
STEP = """
model(torch.ones(1, 3)).sum().backward()
optimizer.step()
optimizer.zero_grad()
"""
SHARDED = """
from torch.distributed.fsdp import fully_shard
torch.manual_seed(rank_of_seed)
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))
fully_shard(model, mesh=mesh.device_mesh())
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
"""
SUM = "round(sum(p.full_tensor().sum().item() for p in model.parameters()), 4)"
LOSS = """
loss = model(torch.ones(2, 6)).square().mean()
loss.backward()
optimizer.step()
optimizer.zero_grad()
"""


@pytest.fixture
def book(notebook: Notebook, leaks: Kit) -> Iterator[Notebook]:
    """The notebook with a new mesh for the test."""
    notebook.run("%mesh restart mesh").ok()
    leaks.rebase()
    yield notebook
    notebook.run("%mesh use mesh").ok()
    leaks.rebase()


@pytest.mark.slow
def test_restore_brings_variables_back(book: Notebook, tmp_path: Path) -> None:
    book.mesh(MODEL + STEP).ok()
    book.mesh(
        "x = torch.full((3,), 1.5)\nown = rank * 10\nepoch = 4\nhistory = [{'loss': 0.5}, (1, None)]\n"
        "import math\ndef f(): pass\nclass C: pass\nother = C()\nrest = iter([])"
    ).ok()
    book.mesh("extra = 'only here'", "[2]").ok()
    said = book.run(f"%mesh checkpoint {tmp_path}/run --wait").ok().stream()
    assert f"wrote mesh 'mesh' to {tmp_path}/run/v000001: " in said
    assert "epoch, history, model, optimizer, own, x, extra (rank 2) (" in said
    before = book.mesh("model.weight.sum().item(), optimizer.state[model.weight]['exp_avg'].tolist()").ok().shown
    book.mesh(STEP + "x += 1\nkept = x\nown = epoch = 0\nhistory.clear()\ndel other").ok()
    said = book.run(f"%mesh restore {tmp_path}/run").ok().stream()
    assert said.splitlines() == [
        f"restored mesh 'mesh' from {tmp_path}/run/v000001",
        "  by load_state_dict: model, optimizer",
        "  tensors: x",
        "  values: epoch, history, own, extra (rank 2)",
    ]
    after = book.mesh("model.weight.sum().item(), optimizer.state[model.weight]['exp_avg'].tolist()").ok().shown
    assert after == before and "[rank 3]" in before
    shown = book.mesh("x.tolist(), kept is x, own == rank * 10, epoch, history").ok().shown
    assert shown == "[ranks 0-3] ([1.5, 1.5, 1.5], True, True, 4, [{'loss': 0.5}, (1, None)])"
    # In new processes, where the objects must be made first.
    book.run("%mesh restart").ok()
    said = book.run(f"%mesh restore {tmp_path}/run").ok().stream()
    assert "  tensors: x" in said and "not restored (unchanged):\n  model: no variable of that name" in said
    book.mesh("torch.manual_seed(9)\n" + MODEL).ok()
    said = book.run(f"%mesh restore {tmp_path}/run model optimizer nothing").ok().stream()
    assert "  by load_state_dict: model, optimizer\n" in said
    assert (
        "  nothing (ranks 0-1,3): it is not in the checkpoint, which has epoch, history, model, optimizer, own, x"
        in said
    )
    assert (
        book.mesh("model.weight.sum().item(), optimizer.state[model.weight]['exp_avg'].tolist()").ok().shown == before
    )
    assert book.mesh("optimizer.param_groups[0]['lr'], model.weight.grad").ok().shown == "[ranks 0-3] (0.1, None)"


@pytest.mark.slow
def test_restore_waits_for_a_checkpoint_that_is_being_written(book: Notebook, tmp_path: Path) -> None:
    go, folder = tmp_path / "go", tmp_path / "run"
    book.mesh("kept = rank").ok()
    book.run(f"%mesh checkpoint {folder} kept --wait").ok()
    book.mesh(f"import os, time\nkept = rank + 10\nwhile not os.path.exists('{go}'): time.sleep(0.01)", "--nowait").ok()
    book.run(f"%mesh checkpoint {folder} kept").ok()
    restore = book.send(f"%mesh restore {folder}")
    restore.until(lambda: f"waiting for the checkpoint to {folder}, which is still being written" in restore.stream())
    go.touch()
    assert f"from {folder}/v000002" in restore.wait().ok().stream()


def test_restore_works_on_another_number_of_ranks(book: Notebook, tmp_path: Path) -> None:
    book.run("%mesh up two --procs 2").ok()
    book.mesh("rank_of_seed = 7\n" + SHARDED + LOSS + "own = rank\nsame = 'all'").ok()
    before = book.mesh(SUM).ok().shown
    book.run(f"%mesh checkpoint {tmp_path} --wait").ok()
    book.mesh(LOSS).ok()
    expected = book.mesh(SUM).ok().shown
    assert before != expected
    book.run("%mesh use mesh").ok()
    book.mesh("rank_of_seed = 8\n" + SHARDED).ok()
    said = book.run(f"%mesh restore {tmp_path} model optimizer own same").ok().stream()
    assert "  by load_state_dict: model, optimizer\n  values: own (ranks 0-1), same\n" in said
    assert "  own (ranks 2-3): it differed between ranks, and this rank is not in the checkpoint" in said
    assert said.endswith("ranks 2-3 lack own: run the cells that create it there\n"), said
    assert book.mesh(SUM).ok().shown == before.replace("0-1", "0-3")
    # The optimizer state came along, so the next step is the same.
    book.mesh(LOSS).ok()
    assert book.mesh(SUM).ok().shown == expected.replace("0-1", "0-3")
    book.run("%mesh down two").ok()


@pytest.mark.slow
def test_damaged_checkpoint_says_what_it_has_changed(book: Notebook, tmp_path: Path) -> None:
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    book.mesh("net = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)])\none = torch.ones(3)").ok()
    book.mesh("for each in net.parameters(): each.data.fill_(1.0)\ndel each").ok()
    book.run(f"%mesh checkpoint {tmp_path} net one --wait").ok()
    book.mesh("for each in net.parameters(): each.data.fill_(2.0)\ndel each").ok()
    version = tmp_path / "v000001"
    files = {path: path.read_bytes() for path in version.glob("*.distcp")}
    values = "sorted({each.mean().item() for each in net.parameters()})"
    for path, content in files.items():
        path.write_bytes(content[:-1])
    said = book.run(f"%mesh restore {tmp_path}").ok().stream()
    assert f"not restored (unchanged):\n  net: the checkpoint {version} is damaged: __" in said, said
    assert book.mesh(values).ok().shown == "[ranks 0-3] [2.0]"
    for path, content in files.items():
        path.write_bytes(content)
    places = FileSystemReader(version).read_metadata().storage_data
    (place,) = (each for index, each in places.items() if index.fqn.startswith("net.3.weight"))
    with open(version / place.relative_path, "r+b") as file:
        file.seek(place.offset)
        file.write(bytes(place.length))
    said = book.run(f"%mesh restore {tmp_path}").ok().stream()
    assert (
        "  tensors: one\npartly restored (only some tensors have the values of the checkpoint):\n  net: the checkpoint"
        in said
    ), said
    assert book.mesh(values).ok().shown == "[ranks 0-3] [1.0, 2.0]"
    for path in files:
        path.write_bytes(b"")
    said = book.run(f"%mesh restore {tmp_path} one").ok().stream()
    assert (
        said.startswith("no variables of mesh 'mesh' were restored from ") and "  one (rank 3): the checkpoint" in said
    ), said


@pytest.mark.slow
def test_checkpoint_is_written_while_cells_run(book: Notebook, tmp_path: Path) -> None:
    book.mesh("x = torch.ones(1000)").ok()
    cell = book.run(f"%mesh checkpoint {tmp_path}/run x").ok()
    assert f"writing mesh 'mesh' to {tmp_path}/run; the result is printed here" in cell.stream()
    cell.until(lambda: "v000001: x (" in cell.stream())
    cell = book.run(f"%mesh checkpoint {tmp_path}/run nothing").ok()
    cell.until(lambda: "failed: " in cell.stream("stderr"))
    assert "name 'nothing' is not defined on rank 0, which has x (all 4 ranks failed)" in cell.stream("stderr")
    failed = book.run(f"%mesh checkpoint {tmp_path}/run nothing --wait")
    assert failed.status == "error" and "no rank has a variable 'nothing'; ranks have x" in failed.text


@pytest.mark.slow
def test_checkpoint_error_names_the_problem(book: Notebook, tmp_path: Path) -> None:
    for line, text in (
        ("checkpoint", "%mesh checkpoint: the following arguments are required: PATH"),
        (f"checkpoint {tmp_path} --now", "unknown option '--now': expected one of --wait"),
        (f"restore {tmp_path} a.b", "expected variable names, got 'a.b'"),
        (f"restore {tmp_path}/nowhere", "nowhere is not a folder on this host"),
        (f"restore {tmp_path}", "has no complete version"),
    ):
        cell = book.run(f"%mesh {line}")
        assert cell.status == "error" and text in cell.text, cell.text
    book.mesh("import threading\nlock = threading.Lock()\nmodel = torch.nn.Linear(2, 2)").ok()
    cell = book.run(f"%mesh checkpoint {tmp_path} lock --wait")
    assert cell.status == "error" and "'lock', of type tuple, cannot be saved" in cell.text
    book.run(f"%mesh checkpoint {tmp_path} --wait").ok()
    book.mesh("model = torch.nn.Linear(2, 3)").ok()
    said = book.run(f"%mesh restore {tmp_path}").ok().stream()
    assert "  model: ArgumentError: 'model.weight' has size (2, 2) in the checkpoint" in said


@pytest.mark.slow
def test_restore_works_after_the_death_of_the_notebook(own: Callable[..., Notebook], tmp_path: Path) -> None:
    first = own()
    first.run("%mesh up --procs 2").ok()
    first.mesh(MODEL + STEP + "step = 17").ok()
    before = first.mesh("model.weight.sum().item()").ok().shown
    first.run(f"%mesh checkpoint {tmp_path} --wait").ok()
    first.close(now=True)
    second = own()
    second.run("%mesh up --procs 2").ok()
    second.mesh(MODEL + "model.weight.data.zero_()").ok()
    assert "values: step" in second.run(f"%mesh restore {tmp_path}").ok().stream()
    assert second.mesh("model.weight.sum().item()").ok().shown == before
    assert second.mesh("step").ok().shown == "[ranks 0-1] 17"
