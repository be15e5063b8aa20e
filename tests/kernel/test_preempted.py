"""Hosts of notebook meshes that are taken back: by SIGTERM, by a command that notices, in time and too late."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

import sshd
from kernels import Cell, Notebook
from leaks import Kit, processes, wait_until
from light import IDLE

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(sshd.why_none()), reason=sshd.why_none() or "none")]

HOMES = "import os\nos.path.basename(os.environ['HOME'])"
SUM = "y = torch.ones(1)\ndist.all_reduce(y)\ny.item()"
Up = Callable[..., Cell]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory, notebook: Notebook) -> Iterator[sshd.SSHHosts]:
    notebook.run(IDLE).ok()
    made = sshd.SSHHosts(tmp_path_factory.mktemp("ssh"), 3)
    yield made
    made.close()


@pytest.fixture
def up(hosts: sshd.SSHHosts, notebook: Notebook, leaks: Kit) -> Iterator[Up]:
    """Starts a mesh ``far`` on hosts, and looks at what is left of it."""
    before = processes()

    def start(names: str, more: str = "") -> Cell:
        line = f"%mesh up far --on ssh:{names} --opt config={hosts.config} --gpus 2 --device cpu {more}"
        return notebook.run(line).ok()

    yield start
    notebook.run("%mesh down far")
    notebook.run("%mesh use mesh").ok()

    def left() -> list[str]:
        return [name for pid, name in processes().items() if pid not in before and name in ("ssh", "monarch-agent")]

    assert wait_until(lambda: not left(), 15), left()
    leaks.rebase()


def agent_of(home: str) -> int:
    """The pid of the agent of a host."""
    for pid, name in processes().items():
        if name == "monarch-agent":
            with suppress(OSError):
                if f"/{home}\0".encode() in Path(f"/proc/{pid}/environ").read_bytes():
                    return pid
    raise AssertionError(f"no agent in {home}")


def test_ranks_move_to_a_spare_host_with_their_variables(up: Up, notebook: Notebook) -> None:
    start = up("node[1-3]", "--spare-hosts 1")
    assert "hosts=2, gpus=2" in start.text
    last = notebook.mesh(
        "def double(value): return 2 * value\nx = torch.full((300_000,), rank * 10.0)\ntext = str(rank)"
    )
    agent = agent_of("home1")
    os.kill(agent, signal.SIGTERM)
    last.until(lambda: "moved to" in last.stream())
    assert "mesh 'far': host node1 is being taken back (SIGTERM); it may be gone in 30 s" in last.stream()
    assert "ranks 0-1 of mesh 'far' moved to node3 with their variables" in last.stream()
    assert notebook.mesh("double(x).mean().item(), text").ok().shown.splitlines() == [
        f"[rank {rank}] ({20.0 * rank}, '{rank}')" for rank in range(4)
    ]
    assert notebook.mesh(HOMES).ok().shown == "[ranks 0-1] 'home3'\n[ranks 2-3] 'home2'"
    assert notebook.mesh(SUM).ok().shown == "[ranks 0-3] 4.0"
    # The host is let go at once, long before the end of its time.
    assert wait_until(lambda: agent not in processes(), 10)


def test_mesh_without_a_spare_host_shrinks(up: Up, notebook: Notebook) -> None:
    up("node[1-2]")
    last = notebook.mesh("x = rank * 10").ok()
    os.kill(agent_of("home1"), signal.SIGTERM)
    last.until(lambda: "has shrunk" in last.stream())
    assert "mesh 'far' has shrunk to hosts=1, gpus=2: ranks 2-3 were removed" in last.stream()
    # Ranks keep their numbers and variables; they run on the host that the last ranks have left.
    assert notebook.mesh("x").ok().shown == "[rank 0] 0\n[rank 1] 10"
    assert notebook.mesh(HOMES).ok().shown == "[ranks 0-1] 'home2'"
    assert notebook.mesh(SUM).ok().shown == "[ranks 0-1] 2.0"


def test_checkpoint_is_written_before_all_hosts_go(up: Up, notebook: Notebook, tmp_path: Path) -> None:
    up("node1", f"--on-preempt checkpoint:{tmp_path}/kept")
    last = notebook.mesh("x = torch.full((3,), rank + 0.5)").ok()
    os.kill(agent_of("home1"), signal.SIGTERM)
    last.until(lambda: "wrote mesh 'far'" in last.stream())
    notebook.run("%mesh down far").ok()
    up("node2")
    notebook.run(f"%mesh restore {tmp_path}/kept").ok()
    again = notebook.mesh("x.sum().item()").ok()
    assert again.shown == "[rank 0] 1.5\n[rank 1] 4.5"
    os.kill(agent_of("home2"), signal.SIGTERM)
    again.until(
        lambda: (
            "all hosts of mesh 'far' are being taken back; %mesh checkpoint PATH saves its variables" in again.stream()
        )
    )
    assert re.search(r"idle, host will be preempted in \d+ s \(SIGTERM\)", notebook.run("%mesh").text)


def test_function_of_the_notebook_is_called(up: Up, notebook: Notebook, tmp_path: Path) -> None:
    """By a command on the host that succeeds when the cloud says so."""
    notebook.run("def leave(told):\n    global seen\n    seen = told\n    return 'shrink'").ok()
    go = tmp_path / "go"
    command = f"until test -e {go}-$(basename $HOME); do sleep 0.1; done"
    start = up("node[1-3]", f"--spare-hosts 1 --on-preempt leave --opt 'notice={command}' --opt grace=60")
    Path(f"{go}-home2").touch()
    start.until(lambda: "has shrunk" in start.stream())
    assert "host node2 is being taken back (notice); it may be gone in 60 s" in start.stream()
    assert notebook.run("seen.mesh, seen.hosts, seen.ranks").ok().shown == "('far', ('node2',), (2, 3))"
    assert notebook.mesh(HOMES).ok().shown == "[ranks 0-1] 'home1'"


def test_cell_that_outlasts_a_host_fails_and_the_mesh_shrinks(up: Up, notebook: Notebook) -> None:
    up("node[1-2]", "--opt grace=4")
    cell = notebook.send("%%mesh\nimport time\nprint('begun')\nfor _ in range(6000): time.sleep(0.01)")
    cell.until(lambda: "begun" in cell.text)
    os.kill(agent_of("home1"), signal.SIGTERM)
    cell.wait()
    assert cell.status == "error" and "node1" in cell.text
    cell.until(lambda: "has shrunk" in cell.stream())
    assert "are still running a cell, so their variables cannot move before node1 is gone" in cell.stream()
    assert notebook.mesh(HOMES).ok().shown == "[ranks 0-1] 'home2'"


PROGRAM = """
import sys, time
from monarch.job import SSHJob

if __name__ == "__main__":
    job = SSHJob({"all": "node1"}, config=sys.argv[1]).told_by(lambda line: print(line, flush=True))
    job.on_preempt(lambda notices: time.sleep(100))
    job.state().all.spawn_procs({"gpus": 1}).initialized.get(60)
    print("ready", flush=True)
    time.sleep(100)
"""


def test_host_that_is_taken_back_ends_with_a_killed_program(hosts: sshd.SSHHosts, tmp_path: Path, leaks: Kit) -> None:
    before = processes()
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, str(tmp_path / "program.py"), hosts.config]
    program = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert program.stdout is not None
    assert any(line == "ready\n" for line in program.stdout)
    os.kill(agent_of("home1"), signal.SIGTERM)
    assert "host node1 is being taken back" in program.stdout.readline()
    program.kill()
    program.communicate()
    # Long before its 30 s are over.
    assert wait_until(lambda: not processes().keys() - before.keys(), 15), processes().keys() - before.keys()
    leaks.rebase()
