"""``%mesh``: meshes start, are listed and end."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from socket import gethostname
from typing import NoReturn

import pytest

from kernels import Notebook
from leaks import Kit
from monarch_kernel.meshes.recipe import Recipe
from monarch_kernel.meshes.registry import NotebookMeshes
from workers import Workers

pytestmark = pytest.mark.slow


@pytest.fixture
def more(notebook: Notebook) -> Notebook:
    """The notebook, for tests that start and end more meshes."""
    return notebook


def test_mesh_up_progress_is_one_line(more: Notebook) -> None:
    cell = more.run("%mesh up second --procs 2").ok()
    assert (
        re.fullmatch(r"mesh 'second' is up: procs=2, in \d+\.\d\d s; cells now run on it", cell.shown)
        and not cell.stream()
    )
    updates = str(cell.contents("update_display_data"))
    assert re.search(r"starting ranks: \d of 2 \(", updates) and "initializing ranks: " in updates
    assert more.mesh("world_size").ok().shown == "[ranks 0-1] 2"
    assert "cells now run on mesh 'mesh'" in more.run("%mesh use mesh").ok().stream()
    assert "mesh 'second' is down" in more.run("%mesh down second").ok().stream()


def test_stop_while_hosts_start_names_the_mesh() -> None:
    class Stopped(Recipe):
        def find_hosts(self, names: object, step: object = None) -> NoReturn:
            raise KeyboardInterrupt

    recipe = Stopped("far", {}, on="slurm")
    with pytest.raises(KeyboardInterrupt, match="mesh 'far' was not started; its hosts were released"):
        NotebookMeshes({}).up(recipe, {}, lambda *_: None)


def test_mesh_restart_keeps_hosts_and_options(more: Notebook, leaks: Kit) -> None:
    line = "%mesh up far --hosts 2 --gpus 2 --device cpu --env ONE=1 --env TWO=a=b"
    assert "hosts=2, gpus=2" in more.run(line).ok().text
    body = "import os\n[os.environ[k] for k in ('ONE', 'TWO', 'CUDA_VISIBLE_DEVICES')], str(device), world_size"
    kept = "[ranks 0-3] (['1', 'a=b', ''], 'cpu', 4)"
    assert more.mesh(body).ok().shown == kept
    assert more.mesh("rank", "far[hosts=1]").ok().shown == "[rank 2] 2\n[rank 3] 3"
    # The hosts have the name of this machine, as that of a mesh without --hosts has.
    hosts = re.findall(rf"{re.escape(gethostname())} \(\d+\)", more.run("%mesh").ok().shown)
    assert len(hosts) == 4 and len({*hosts}) == 2, hosts
    more.mesh("here = 1").ok()
    assert "restarted (variables cleared)" in more.run("%mesh restart far").ok().text
    assert more.mesh(body).ok().shown == kept
    assert more.mesh("'here' in globals()").ok().shown == "[ranks 0-3] False"
    # A collective across the hosts.
    assert more.mesh("x = torch.ones(1)\ndist.all_reduce(x)\nx.item()").ok().shown == "[ranks 0-3] 4.0"
    halves = "half = dist.new_subgroups(2)[0]\ndist.all_reduce(x, group=half)\nx.item()"
    assert more.mesh(halves).ok().shown == "[ranks 0-3] 8.0"
    more.run("%mesh down far").ok()
    more.run("%mesh use mesh").ok()


def test_mesh_up_attaches_workers_by_address(more: Notebook, leaks: Kit, tmp_path: Path) -> None:
    workers = Workers(tmp_path)
    try:
        some = [workers.start() for _ in range(2)]
        for process, _ in some:
            assert "waits" in workers.wait(process)
        hosts = ",".join(address for _, address in some)
        line = f"%mesh up far --hosts {hosts} --key {workers.key} --gpus 2"
        assert "hosts=2, gpus=2" in more.run(line).ok().text
        assert more.mesh("x = torch.ones(1)\ndist.all_reduce(x)\nx.item()", "far").ok().shown == "[ranks 0-3] 4.0"
        # Another mesh on the same hosts, which outlive it.
        more.run(f"%mesh up more --hosts {hosts} --key {workers.key} --procs 1").ok()
        assert more.mesh("world_size", "more").ok().shown == "[ranks 0-1] 2"
        more.run("%mesh down more").ok()
        assert more.mesh("x.item()", "far").ok().shown == "[ranks 0-3] 4.0"
        assert "restarted (variables cleared)" in more.run("%mesh restart far").ok().text
        assert more.mesh("'x' in globals()", "far").ok().shown == "[ranks 0-3] False"
        more.run("%mesh down far").ok()
        # Free for the next controller: once after the restart, and once after the end.
        for process, address in some * 2:
            assert workers.wait(process) == f"monarch: worker at {address} waits for a controller\n"
        more.run(line).ok()
        some[1][0].kill()
        cell = more.mesh("import time\ntime.sleep(60)", "far")
        # By a lost connection, or by the news of its agent, which names both ranks at once.
        assert "ranks 2-3" in cell.text and re.search("lost with (its|their) host", cell.text)
        more.run("%mesh down far").ok()
        more.run("%mesh use mesh").ok()
    finally:
        workers.close()


def test_last_words_of_ranks_are_in_the_cell_that_ends_them(more: Notebook) -> None:
    more.run("%mesh up brief --procs 2").ok()
    more.run("%%mesh brief\nimport atexit\n_ = atexit.register(print, 'bye')").ok()
    cell = more.run("%mesh down brief").ok()
    assert cell.said() == {"bye": {0, 1}} and cell.stream().endswith(
        "mesh 'brief' is down; cells now run on mesh 'mesh'\n"
    )


def test_number_after_the_name_is_the_number_of_ranks(more: Notebook) -> None:
    assert "procs=2" in more.run("%mesh up pair 2").ok().text
    more.run("old = pair\n%mesh down pair").ok()
    failed = more.run("old.execute(len, [])")
    assert failed.status == "error" and "pair was stopped" in failed.text
    assert "start a new mesh with %mesh up" in failed.text


def test_failed_line_with_a_variable_is_shown_as_typed(notebook: Notebook) -> None:
    assert "line 1: value = %mesh crit\n" in notebook.run("value = %mesh crit").text + "\n"


def test_up_of_a_running_mesh_keeps_it(own: Callable[..., Notebook]) -> None:
    book = own()
    book.run("%mesh up 2").ok()
    book.mesh("mine = rank").ok()
    again = "mesh 'mesh' is already up: procs=2; its variables are kept (%mesh restart mesh clears them)"
    assert book.run("%mesh up 2").ok().stream().strip() == again
    assert "[rank 1] 1" in book.mesh("print(mine)").ok().text
    book.run("%mesh up other 1").ok()
    assert book.run("%mesh up mesh 2").ok().stream().strip() == f"{again}; cells now run on it"
    more = book.run("%mesh up 3")
    assert more.status == "error" and "with procs=2; change its size with %mesh resize mesh procs=3" in more.text
    both = book.run("%mesh up 3 --env A=1").text
    assert "with procs=2, and differs in size, --env; end it with %mesh down mesh" in both
    book.run("%mesh resize mesh 3").ok()
    assert "already up: procs=3" in book.run("%mesh up 3").ok().text
    book.mesh("import os; os._exit(3)", "[1]")
    failed = book.run("%mesh up 3")
    assert failed.status == "error" and "rank 1 has failed; replace it with %mesh heal mesh" in failed.text


def test_mesh_down_keeps_hosts_of_the_notebook(own: Callable[..., Notebook], leaks: Kit) -> None:
    book = own()
    book.run("from monarch.testing import local_hosts\nmanager = local_hosts(2); mine = manager.__enter__()").ok()
    assert "hosts=2, procs=1" in book.run("%mesh up m --hosts mine --procs 1").ok().text
    book.run("%mesh down m").ok()
    assert "hosts=2" in book.run("%mesh up m --hosts mine --procs 1").ok().text


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("up 99", "mesh 'mesh' is already running, with procs="),
        ("up x --procs 2 --gpus 2", "give either --procs or --gpus"),
        ("up x --procs 0", "--procs: expected at least 1, got 0"),
        ("up x --procs many", "argument --procs: expected a whole number, got 'many'"),
        ("up 3x", "invalid mesh name '3x': must be a Python identifier; for 3 ranks write %mesh up 3"),
        (
            "up four",
            "for 4 ranks write %mesh up 4, for a mesh of that name %mesh up four 4",
        ),
        ("up for", "invalid mesh name 'for': must not be a Python keyword or builtin"),
        ("up print", "invalid mesh name 'print': must not be a Python keyword or builtin"),
        ("up --device tpu", "invalid choice: 'tpu' (choose from 'cpu', 'cuda')"),
        ("up x --env A", "--env: expected K=V, got 'A'"),
        ("up x --device tpu", "invalid choice: 'tpu'"),
        ("up x --hosts 0", "--hosts: expected at least 1, got 0"),
        ("up x --hosts nix", "got 'nix'"),
        ("up x --hosts tcp://127.0.0.1:1", "needs --key FILE"),
        ("up x --hosts tcp://127.0.0.1:1 --key /nowhere", "/nowhere"),
        ("up x y", "argument N: expected a whole number, got 'y'"),
        ("up x 2 y", "unexpected argument 'y'"),
        ("up x 2 --gpus 2", "2 after the name is the same as --procs; give only one of them"),
        ("up x 2 --roles a=2", "2 after the name is the same as --procs; give only one of them"),
        ('up "x', "No closing quotation"),
        ("use", "%mesh use: the following arguments are required: NAME; see %mesh help use"),
        ("use nix", "no mesh named 'nix'; running: mesh"),
        ("down nix", "no mesh named 'nix'"),
        ("down a b", "no mesh named 'a'; running: mesh"),
        ("nix on", "%mesh nix on: neither a command of %mesh nor valid Python; %mesh help lists the commands"),
        ("x +", "%mesh x +: neither a command of %mesh nor valid Python"),
        ("[0] rank", "%mesh [0] rank: ranks belong in the first line of a cell, as in %%mesh [0]"),
        ("status", "%mesh alone shows the meshes and their ranks"),
        ("help nix", "unknown command 'nix'"),
    ],
)
def test_mesh_line_error_names_the_problem(more: Notebook, line: str, words: str) -> None:
    cell = more.run(f"%mesh {line}")
    assert cell.status == "error" and words in cell.text
    # The line as typed, without frames of this package.
    assert f"line 1: %mesh {line}" in cell.text and "monarch_kernel" not in cell.text


@pytest.mark.skipif(os.path.exists("/proc/driver/nvidia"), reason="this machine has GPUs")
def test_mesh_up_with_cuda_fails_without_gpus(more: Notebook) -> None:
    assert "this host has no GPU for --device cuda" in more.run("%mesh up x --device cuda").text
    cell = more.run("%mesh up x --gpus 2 --device cuda")
    assert "rank 0 sees no GPU" in cell.text
    # Nothing is left behind.
    assert "'x'" not in more.run("%mesh").ok().text


@pytest.mark.slow
def test_mesh_is_a_notebook_variable(notebook: Notebook) -> None:
    notebook.run("taken = 5\n%mesh up other --procs 2").ok()
    assert notebook.run("other, len(other)").ok().shown.startswith("(<ProcMesh 'other' (procs=2)>, 2)")
    notebook.run("%mesh resize other procs=3").ok()
    assert notebook.run("len(other)").ok().shown == "3"
    notebook.run("%mesh restart other").ok()
    assert notebook.run("other.sizes").ok().shown == "{'procs': 3}"
    notebook.run("%mesh up taken --procs 1").ok()
    # Variables of the user stay.
    assert notebook.run("taken").ok().shown == "5"
    notebook.run("%mesh down taken\n%mesh down other").ok()
    assert notebook.run("taken, 'other' in globals()").ok().shown == "(5, False)"
    notebook.run("%mesh use mesh").ok()


def test_meshes_that_share_gpus_are_named(own: Callable[..., Notebook]) -> None:
    # No driver is needed to hand out GPUs.
    book = own(CUDA_VISIBLE_DEVICES="0,1,2")
    assert "GPUs as" not in book.run("%mesh up first --gpus 2").ok().text
    assert (
        "note: mesh 'second' uses the same GPUs as mesh 'first': 0; no others are free"
        in book.run("%mesh up second --gpus 2").ok().text
    )
    assert book.mesh(
        "import os; os.environ['CUDA_VISIBLE_DEVICES'], os.environ['LOCAL_RANK']", "second[0]"
    ).ok().shown == ("[rank 0] ('0,2,1', '0')")
    book.run("%mesh up third --gpus 2 --isolate-gpus").ok()
    alone = book.mesh("import os; os.environ['CUDA_VISIBLE_DEVICES']", "third").ok().shown
    assert len(set(alone.splitlines())) == 2 and "," not in alone.replace("ranks 0-1", "")
