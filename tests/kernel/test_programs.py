"""``%mesh run``, and process groups in cells."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from kernels import Notebook

SCRIPT = """
import atexit, os, sys, time
import torch, torch.distributed as dist
dist.init_process_group()
if "--steps" in sys.argv:
    atexit.register(lambda: print("end of", dist.get_rank()))
total = torch.ones(1)
dist.all_reduce(total)
print("rank", dist.get_rank(), "of", dist.get_world_size(), "sum", total.item(), sys.argv[1:])
if "--fail" in sys.argv:
    1 / (dist.get_rank() - 1)
if "--wait" in sys.argv:
    print("waiting", flush=True)
    while True:
        time.sleep(0.01)
"""

DDP = """
import sys
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

# No functions, so its variables are gone as soon as nothing refers to the module.
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
step = 0
try:
    while step < 5 or "--wait" in sys.argv:
        optimizer.zero_grad()
        model(torch.randn(16, 64)).pow(2).mean().backward()
        optimizer.step()
        step += 1
        if step == 5:
            print("stepped", flush=True)
finally:
    if "--destroy" in sys.argv:
        dist.destroy_process_group()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def test_mesh_run_runs_a_torchrun_script(notebook: Notebook, script: Path) -> None:
    cell = notebook.run(f"%mesh run {script} --steps 3").ok()
    lines = {f"rank {rank} of 4 sum 4.0 ['--steps', '3']": {rank} for rank in range(4)}
    assert lines | {f"end of {rank}": {rank} for rank in range(4)} == cell.said()
    # On some ranks only; the namespaces stay clean.
    cell = notebook.run(f"%mesh run --on mesh[1,3] {script}").ok()
    assert {"rank 0 of 2 sum 2.0 []": {1}, "rank 1 of 2 sum 2.0 []": {3}} == cell.said()
    assert notebook.mesh("'sys' in globals(), 'total' in globals()").ok().shown == "[ranks 0-3] (False, False)"
    # The groups of cells still work.
    assert notebook.mesh("x = torch.ones(1); dist.all_reduce(x); x.item()").ok().shown == "[ranks 0-3] 4.0"
    notebook.run(f"%mesh run {script}").ok()
    assert notebook.mesh("dist.all_reduce(x); x.item()").ok().shown == "[ranks 0-3] 16.0"


def test_mesh_run_shows_the_error_of_a_script(notebook: Notebook, script: Path) -> None:
    cell = notebook.run(f"%mesh run {script} --fail")
    assert cell.status == "error"
    assert "ZeroDivisionError" in cell.text and "rank 1" in cell.text and "train.py" in cell.text
    assert notebook.mesh("x = torch.ones(1); dist.all_reduce(x); x.item()").ok().shown == "[ranks 0-3] 4.0"


def test_mesh_run_names_an_exit_code_once(notebook: Notebook, tmp_path: Path) -> None:
    (tmp_path / "exits.py").write_text("import os, sys\nsys.exit(3 if os.environ['RANK'] == '1' else 0)")
    cell = notebook.run(f"%mesh run {tmp_path}/exits.py")
    assert cell.status == "error" and "failed on rank 1\n" in cell.text
    assert f"rank 1: RuntimeError: {tmp_path}/exits.py exited with code 3" in cell.text
    assert cell.text.count("code 3") == 1, cell.text


def test_mesh_run_is_stopped_by_an_interrupt(notebook: Notebook, script: Path) -> None:
    cell = notebook.send(f"%mesh run {script} --wait")
    cell.until(lambda: cell.said().get("waiting") == {0, 1, 2, 3})
    notebook.interrupt()
    cell.wait()
    assert cell.status == "error" and "interrupted" in cell.text
    assert notebook.mesh("x = torch.ones(1); dist.all_reduce(x); x.item()").ok().shown == "[ranks 0-3] 4.0"


@pytest.mark.slow
@pytest.mark.parametrize("option", ["", "--destroy"])
def test_ddp_script_ends_and_runs_again_after_a_stop(notebook: Notebook, tmp_path: Path, option: str) -> None:
    """The last owner of a group is DDP's reducer, which used to join gloo's threads with the GIL held."""
    path = tmp_path / "ddp.py"
    path.write_text(DDP)
    for _ in range(8):
        cell = notebook.send(f"%mesh run {path} --wait {option}")
        cell.until(lambda cell=cell: cell.said().get("stepped") == {0, 1, 2, 3})
        notebook.interrupt()
        cell.wait()
        assert "ranks 0-3: interrupted" in cell.text or "in a collective" in cell.text
        assert notebook.run(f"%mesh run {path} {option}").ok().said().get("stepped") == {0, 1, 2, 3}


@pytest.mark.slow
def test_death_in_a_script_shows_the_command(own: Callable[..., Notebook], tmp_path: Path) -> None:
    (tmp_path / "dies.py").write_text("import os\nif os.environ['RANK'] == '1': os.kill(os.getpid(), 9)")
    book = own()
    book.run("%mesh up --procs 2").ok()
    text = book.run(f"%mesh run {tmp_path}/dies.py --lr 1").text
    assert re.search(rf"cell \[\d+\] line 1: %mesh run {tmp_path}/dies.py --lr 1\n", text), text


@pytest.mark.slow
def test_mesh_run_waits_for_a_stopped_cell_and_can_be_stopped(own: Callable[..., Notebook], script: Path) -> None:
    book = own()
    book.run("%mesh up --procs 2").ok()
    cell = book.send("%%mesh\na = torch.randn(2000, 2000)\nprint('runs')\n"
                     "if rank == 1: b = torch.linalg.matrix_power(a, 2**30 - 1)")  # fmt: skip
    cell.until(lambda: cell.said().get("runs") == {0, 1})
    book.interrupt()
    cell.wait()
    run = book.send(f"%mesh run {script}")
    run.until(lambda: "waiting for rank 1" in run.stream("stderr"))
    book.interrupt()
    run.wait()
    assert run.reply["ename"] == "KeyboardInterrupt" and "replaced" not in run.text
    assert "killed rank 1" in book.run("%mesh kill").ok().stream()
    assert "rank 1 of 2 sum 2.0 []" in book.run(f"%mesh run {script}").ok().said()


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("%mesh run", "%mesh run needs a script; write %mesh run [--on MESH[SLICE]] script.py ARGS, or -m module ARGS"),
        ("%mesh run missing.py", "cannot read script 'missing.py'"),
        ("%mesh run --at mesh x.py", "%mesh run needs a script"),
        ("%mesh run --on", "unknown option '--on'"),
        ("%mesh run -m", "expected a script and its arguments"),
    ],
)
def test_mesh_run_error_names_the_problem(notebook: Notebook, line: str, text: str) -> None:
    cell = notebook.run(line)
    assert cell.status == "error" and text in cell.text


@pytest.mark.parametrize("words", ["--help", "-h", "--on mesh[0:2] --help", "--on=mesh -h"])
def test_mesh_run_shows_its_help(notebook: Notebook, words: str) -> None:
    assert notebook.run(f"%mesh run {words}").ok().shown == notebook.run("%mesh help run").ok().shown


def test_help_option_after_the_script_is_its_own(notebook: Notebook, script: Path) -> None:
    for words in (str(script), f"--on mesh[0:2] {script}"):
        assert "['--help']" in notebook.run(f"%mesh run {words} --help").ok().stream()


def test_mesh_group_works_in_cells(notebook: Notebook) -> None:
    body = "x = torch.ones(1) * rank\ndist.all_reduce(x, group=mesh.group())\nx.item(), mesh.name, dict(mesh.sizes)"
    assert notebook.mesh(body).ok().shown == "[ranks 0-3] (6.0, 'mesh', {'procs': 4})"
    assert "DeviceMesh((procs=4), 'cpu'" in notebook.mesh("mesh.device_mesh()").ok().shown
    # Some ranks make a group without the others.
    body = "y = torch.ones(1)\ndist.all_reduce(y, group=mesh.slice(procs=slice(0, 2)).group())\ny.item()"
    assert notebook.mesh(body, "[0,1]").ok().shown == "[ranks 0-1] 2.0"
    # One rank alone can make the group of all; the others run nothing.
    assert notebook.mesh("dist.get_world_size()", "[2]").ok().shown == "[rank 2] 4"


def test_ddp_model_survives_a_stop_between_collectives(notebook: Notebook) -> None:
    notebook.mesh(
        "from torch.nn.parallel import DistributedDataParallel\n"
        "torch.manual_seed(0)\n"
        "model = DistributedDataParallel(torch.nn.Linear(2, 1), process_group=mesh.group())\n"
        "model(torch.ones(1, 2)).sum().backward()"
    ).ok()
    cell = notebook.send("%%mesh\nimport time\nprint('busy', flush=True)\nwhile True: time.sleep(0.01)")
    cell.until(lambda: cell.said().get("busy") == {0, 1, 2, 3})
    notebook.interrupt()
    cell.wait()
    # All ranks are in step, so the groups of the model stay valid.
    step = "model.zero_grad()\nmodel(torch.ones(1, 2) * rank).sum().backward()\nmodel.module.weight.grad.tolist()"
    assert notebook.mesh(step).ok().shown == "[ranks 0-3] [[1.5, 1.5]]"


def test_cell_with_a_future_import_after_a_docstring_runs(notebook: Notebook) -> None:
    assert notebook.mesh('"""What it does."""\nfrom __future__ import annotations\n7').ok().shown == "[ranks 0-3] 7"
