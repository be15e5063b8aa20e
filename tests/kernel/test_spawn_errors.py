"""The error of a constructor is shown in the cell of its spawn."""

from __future__ import annotations

import pytest

from kernels import Notebook

BAD = """
from monarch.actor import Actor, endpoint

class Bad(Actor):
    def __init__(self):
        raise ValueError("no weights")
"""

WAITS = """
import time
from monarch.actor import Actor, current_rank
from monarch.distributed import group

class Waits(Actor):
    def __init__(self):
        import torch
        if current_rank().rank == 1:
            print("constructs", flush=True)
            PAUSE
        torch.distributed.all_reduce(torch.full((1,), 100.0), group=group())
"""


def test_spawn_in_a_plain_cell_shows_its_error(notebook: Notebook) -> None:
    notebook.run(BAD).ok()
    spawns = notebook.run("bad = mesh.spawn('bad', Bad)").ok()
    later = notebook.run("1 + 1").ok()
    spawns.until(
        lambda: "unhandled failure of ranks 0-3 of bad: __init__() raised ValueError" in spawns.stream("stderr")
    )
    assert 'raise ValueError("no weights")' in spawns.stream("stderr") and later.stream("stderr") == ""
    cell = notebook.run("bad.initialized.get()")
    assert cell.status == "error" and "no weights" in cell.text
    notebook.run("bad.stop().get(10)").ok()


def test_failed_constructor_is_shown_in_the_running_cell(notebook: Notebook) -> None:
    notebook.run(BAD).ok()
    cell = notebook.send("import threading\nbad = mesh.spawn('bad', Bad)\ngate = threading.Event()\ngate.wait(30)")
    cell.until(lambda: "no weights" in cell.stream("stderr"))
    assert not cell.idle
    notebook.manager.interrupt_kernel()
    cell.wait()
    notebook.run("bad.stop().get(10)").ok()


def test_failed_spawn_leaves_no_actors(notebook: Notebook) -> None:
    cell = notebook.run(f"%%mesh spawn bad\n{BAD}")
    assert cell.status == "error" and "no weights" in cell.text and cell.stream("stderr") == ""
    assert "] line 1: %%mesh spawn bad\n" in f"{cell.text}\n"
    notebook.run(
        "import time\nfrom monarch._node.current import current_node\nfrom monarch._meshes.registry import meshes_of\n"
        "def left(): return list(meshes_of(current_node()).actor_meshes.values())\n"
        "while any(each._name == 'bad' for each in left()): time.sleep(0.01)"
    ).ok()


@pytest.mark.parametrize(
    ("pause", "left"),
    [("time.sleep(60)", False), ("__import__('monarch._actors.interruptible')._actors.interruptible._sleep(60)", True)],
)
def test_stop_of_a_spawn_ends_its_constructors(notebook: Notebook, pause: str, left: bool) -> None:
    notebook.mesh("import torch\ndist.barrier()").ok()
    cell = notebook.send(f"%%mesh spawn waits\n{WAITS.replace('PAUSE', pause)}")
    cell.until(lambda: "constructs" in cell.stream())
    notebook.interrupt()
    assert cell.wait().status == "error" and "no actors were created" in cell.stream("stderr")
    assert ("constructors are still running" in cell.stream("stderr")) == left and "unhandled" not in cell.text
    total = notebook.mesh("here = torch.ones(1) * (rank + 1)\ndist.all_reduce(here)\nint(here)", "--timeout 30").ok()
    assert "10" in total.shown


def test_fault_hook_of_the_user_stays(notebook: Notebook) -> None:
    notebook.run(BAD).ok()
    notebook.run("import monarch.actor\nbefore, told = monarch.actor.unhandled_fault_hook, []").ok()
    notebook.run("monarch.actor.unhandled_fault_hook = told.append\n%reload_ext monarch_kernel").ok()
    notebook.run("import time\nbad = mesh.spawn('bad', Bad)\nwhile not told: time.sleep(0.01)").ok()
    assert "no weights" in notebook.run("told[0].reason").ok().shown
    notebook.run("monarch.actor.unhandled_fault_hook = before\nbad.stop().get(10)").ok()
