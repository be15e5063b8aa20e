"""Notebook meshes whose ranks change: state from a peer, resizes, roles."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from socket import gethostname

import pytest

from kernels import Notebook
from leaks import Kit, wait_until

pytestmark = pytest.mark.slow

KILL = "import os, signal\nif rank in {ranks}: os.kill(os.getpid(), signal.SIGKILL)"
TRAINING = """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(300, 300)
    def forward(self, x):
        return self.inner(x).sum()
torch.manual_seed(0)
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
losses = []
def step():
    optimizer.zero_grad()
    loss = net(torch.ones(300)) ** 2
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
step()
"""


@pytest.fixture
def mortal(notebook: Notebook, leaks: Kit) -> Iterator[Notebook]:
    """The notebook, for tests that replace ranks."""
    yield notebook
    for name in ("m", "roles", "again"):
        notebook.run(f"%mesh down {name}")
    notebook.run("%mesh use mesh")
    leaks.rebase()


def test_heal_copies_the_variables_of_a_peer(mortal: Notebook) -> None:
    mortal.mesh(TRAINING).ok()
    mortal.mesh("step(); where = (i for i in [1]); mine = rank").ok()
    mortal.mesh(KILL.format(ranks=[0, 2]))
    # The cell ends with the first death; on a busy machine the other rank dies a little later.
    assert wait_until(lambda: mortal.run("%mesh").ok().text.count("SIGKILL") >= 2)
    text = mortal.run("%mesh heal --copy-from 1").ok().stream()
    assert "ranks 0,2 of mesh 'mesh': new processes, with the definitions of 2 cells\n" in text
    assert "copied from rank 1 to ranks 0,2: losses, mine, net, optimizer" in text
    assert "not copied: where (" in text
    # One class on each rank, and the optimizer belongs to the model.
    shown = mortal.mesh("isinstance(net, Net), optimizer.param_groups[0]['params'][0] is net.inner.weight").ok().shown
    assert shown == "[ranks 0-3] (True, True)"
    mortal.mesh("step()").ok()
    assert mortal.mesh("len(losses), losses[-1]").ok().shown.startswith("[ranks 0-3] (3, ")
    # Only the named variables, from any rank.
    mortal.mesh(KILL.format(ranks=[3]))
    text = mortal.run("%mesh heal mesh --copy-from peer mine losses").ok().stream()
    assert "copied from rank 1 to rank 3: losses, mine" in text
    assert mortal.mesh("'net' in globals(), mine", "[3]").ok().shown == "[rank 3] (False, 1)"


def test_heal_error_names_the_problem(mortal: Notebook) -> None:
    for line, said in (
        ("--copy-from 9", "--copy-from: expected a rank from 0 to 3, or peer, got '9'"),
        ("mesh x", "expected the name of one mesh, got 'mesh x'"),
        ("nowhere", "no mesh named 'nowhere'"),
        ("--copy-from", "expected one argument"),
    ):
        cell = mortal.run(f"%mesh heal {line}")
        assert cell.status == "error" and said in cell.text, cell.text
    mortal.mesh(KILL.format(ranks=[3]))
    cell = mortal.run("%mesh heal --copy-from 3")
    assert cell.status == "error" and "expected a live rank, or peer, got 3, which is dead" in cell.text
    cell = mortal.run("%mesh heal --copy-from 0 nothing")
    assert cell.status == "error" and "no rank has a variable 'nothing'" in cell.text


def test_resize_grows_and_shrinks_a_mesh(mortal: Notebook) -> None:
    mortal.run("%mesh up m --gpus 2").ok()
    mortal.mesh("def f():\n    return rank, world_size, point.extent['gpus']\nkept = 1").ok()
    assert mortal.mesh("dist.get_world_size()").ok().shown == "[ranks 0-1] 2"
    text = mortal.run("%mesh resize gpus=3").ok().stream()
    assert "mesh 'm' now has gpus=3; new: rank 2, with the definitions of 1 cell\n" in text
    assert "rank 2 lacks kept: %mesh heal m --copy-from 0 copies it from rank 0\n" in text
    assert mortal.mesh("f(), 'kept' in globals()").ok().shown.splitlines() == [
        "[rank 0] ((0, 3, 3), True)",
        "[rank 1] ((1, 3, 3), True)",
        "[rank 2] ((2, 3, 3), False)",
    ]
    assert mortal.mesh("x = torch.ones(1)\ndist.all_reduce(x)\nx.item()").ok().shown == "[ranks 0-2] 3.0"
    text = mortal.run("%mesh resize m gpus=1").ok().stream()
    assert "mesh 'm' now has gpus=1\n" in text and "lack" not in text
    assert mortal.mesh("f(), kept").ok().shown == "[rank 0] ((0, 1, 1), 1)"
    for line, said in (
        ("", "needs the new size, as in %mesh resize gpus=6"),
        ("gpus=x", "cannot parse 'gpus=x'; write %mesh resize gpus=6, or %mesh resize NAME gpus=6"),
        ("hosts=2", "no axis 'hosts'"),
        ("gpus=0", "gpus: expected at least 1, got 0"),
    ):
        cell = mortal.run(f"%mesh resize {line}")
        assert cell.status == "error" and said in cell.text, cell.text


def test_interrupted_resize_is_completed_by_the_next(mortal: Notebook, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    mortal.run("%mesh up m --gpus 1").ok()
    body = f"import os, time\nopen(f'{gate}.{{rank}}', 'w').close()\nmine = rank"
    wait = f"while rank and not os.path.exists({str(gate)!r}):\n    time.sleep(0.005)"
    mortal.run(f"%%mesh --define\n{body}\n{wait}\nready = True").ok()
    cell = mortal.send("%mesh resize gpus=2")
    assert wait_until(Path(f"{gate}.1").exists)
    mortal.interrupt()
    assert "KeyboardInterrupt" in cell.wait().text
    gate.touch()
    text = mortal.run("%mesh resize gpus=2").ok().stream()
    assert "mesh 'm' now has gpus=2" in text
    assert mortal.mesh("mine, ready, world_size").ok().shown.splitlines() == [
        "[rank 0] (0, True, 2)",
        "[rank 1] (1, True, 2)",
    ]


def test_roles_give_different_ranks(mortal: Notebook) -> None:
    mortal.run("%mesh up roles --roles train=2,load=1:cpu").ok()
    assert mortal.mesh("rank", "[load]").ok().shown == "[rank 2] 2"
    assert mortal.mesh("rank", "roles[train]").ok().shown.splitlines() == ["[rank 0] 0", "[rank 1] 1"]
    cell = mortal.mesh("rank", "[eval]")
    assert cell.status == "error" and "or a role; this mesh has the roles train, load" in cell.text
    for line, said in (
        ("--roles train=0", "got 'train=0'"),
        ("--roles a=1,a=2", "names 'a' twice"),
        ("--roles a=1 --procs 2", "omit --procs and --gpus"),
    ):
        cell = mortal.run(f"%mesh up again {line}")
        assert cell.status == "error" and said in cell.text, cell.text


def test_restart_option_replaces_dead_ranks(mortal: Notebook) -> None:
    for wrong in ("-1", "often"):
        cell = mortal.run(f"%mesh up again --restart={wrong}")
        assert cell.status == "error" and "--restart: expected restarts per minute, or on-failure" in cell.text
    mortal.run("%mesh up again --procs 2 --restart --spares 1").ok()
    cell = mortal.mesh(KILL.format(ranks=[1]))
    assert cell.status == "error" and "SIGKILL" in cell.text
    # The next cell waits for the new rank.
    assert mortal.mesh("rank").ok().shown.splitlines() == ["[rank 0] 0", "[rank 1] 1"]


def test_unsupervised_death_stops_the_whole_mesh(mortal: Notebook) -> None:
    """An unsupervised death stops its whole mesh, and no other."""
    mortal.run("%mesh up m --procs 3").ok()
    mortal.run("%mesh use mesh").ok()
    mortal.run("%%mesh m[1:3] --nowait --out beside\nimport time\nwhile True: time.sleep(0.01)").ok()
    mortal.run("%%mesh mesh --nowait --out other\nimport time\nwhile 'go' not in globals(): time.sleep(0.01)\n7").ok()
    mortal.mesh("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", "m[0]")
    cell = mortal.run("beside.result(20)")
    assert cell.status == "error" and "m has no supervisor" in cell.text
    # The ranks were stopped and are usable; those of another mesh go on.
    assert mortal.mesh("rank", "m[1:3] --timeout 20").ok().shown.splitlines() == ["[rank 1] 1", "[rank 2] 2"]
    assert mortal.run("other.done").ok().shown == "False"
    mortal.run("other.interrupt()").ok()


def test_supervisor_in_a_cell_heals(mortal: Notebook) -> None:
    mortal.run("%mesh up m --procs 2").ok()
    mortal.run(
        "import os, signal, monarch\nfrom monarch.actor import Actor, endpoint, heal_mesh, supervise\n"
        "class A(Actor):\n    @endpoint\n    def pid(self): return os.getpid()\n"
        "    @endpoint\n    def end(self): os.kill(os.getpid(), 9)"
    ).ok()
    # The mesh is a variable.
    mortal.run("a = m.spawn('a', A)").ok()
    cell = mortal.run(
        "with supervise(m, lambda failure: heal_mesh(failure.mesh)) as watch:\n"
        "    try: a.slice(procs=1).end.call().get(20)\n"
        "    except monarch.DeviceMeshError as error: print('caught')\n"
        "    print(len(a.pid.call().get(20)))\n"
        "print(watch.failures[0].ranks, watch.failures[0].running)"
    ).ok()
    assert cell.stream() == "caught\n2\n(1,) ('a[procs=1].end()',)\n"


def test_unresponsive_rank_is_shown(mortal: Notebook) -> None:
    mortal.run("%mesh up m --procs 2").ok()
    mortal.run("%%mesh m --out pids\nimport os\nos.getpid()").ok()
    mortal.run("import os, signal\nos.kill(list(pids.values())[1], signal.SIGSTOP)").ok()
    table = mortal.run("%mesh").ok().text
    assert "has not answered for" in table and "stopped by a signal (SIGSTOP" in table
    mortal.run("os.kill(list(pids.values())[1], signal.SIGCONT)").ok()
    assert "has not answered" not in mortal.run("%mesh").ok().text


def test_freed_ranks_name_the_dead_rank(mortal: Notebook) -> None:
    mortal.run("%mesh up m --procs 3").ok()
    cell = mortal.mesh(
        "import os, signal\nx = torch.ones(1)\ndist.all_reduce(x)\n"
        "if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\nwhile True: dist.all_reduce(x)"
    )
    (error,) = cell.contents("error")
    lines = error["traceback"]
    assert lines[0].endswith("failed on rank 1; ranks 0,2 waited for it in a collective"), lines[0]
    # A dead rank has no traceback, and those of the others add nothing.
    assert all("".join(bundle.values()) for bundle in cell.bundles), cell.bundles
    assert lines[1].strip() == "rank 1: SupervisionError: the process was killed by signal 9 (SIGKILL)", lines
    # Each of the others was in a collective, or began the next one when it knew of the death.
    freed = re.findall(
        r"^ *ranks? ([0-9,]+): GroupError: "
        r"(?:a collective was aborted because rank 1 died|the process group of m is broken because rank 1 died).*\n"
        r" +cell \[",
        "\n".join(lines),
        re.M,
    )
    assert {*",".join(freed).split(",")} == {"0", "2"}
    assert "gloo" not in "\n".join(lines)


def test_resize_adds_and_removes_hosts(mortal: Notebook) -> None:
    mortal.run("%mesh up m --hosts 1 --procs 2").ok()
    mortal.mesh("def f():\n    return rank, world_size, point['hosts']\nkept = 1").ok()
    # Hosts on this machine are started on demand.
    text = mortal.run("%mesh resize hosts=3").ok().stream()
    assert "mesh 'm' now has hosts=3, procs=2; new: ranks 2-5, with the definitions of 1 cell" in text
    assert mortal.mesh("f()", "[1,5]").ok().shown.splitlines() == ["[rank 1] (1, 6, 0)", "[rank 5] (5, 6, 2)"]
    assert mortal.mesh("x = torch.ones(1)\ndist.all_reduce(x)\nx.item()").ok().shown == "[ranks 0-5] 6.0"
    # A lost host is replaced.
    cell = mortal.mesh("import os, signal, time\nos.kill(os.getppid(), signal.SIGKILL)\ntime.sleep(60)", "[2]")
    assert cell.status == "error", cell.text
    text = mortal.run("%mesh heal").ok().stream()
    assert "ranks 2-3 of mesh 'm': new processes, with the definitions of 1 cell" in text
    assert mortal.mesh("f(), 'kept' in globals()", "m[hosts=0:2, procs=0]").ok().shown.splitlines() == [
        "[rank 0] ((0, 6, 0), True)",
        "[rank 2] ((2, 6, 1), False)",
    ]
    assert "mesh 'm' now has hosts=2, procs=2\n" in mortal.run("%mesh resize hosts=2").ok().stream()
    assert "restarted (variables cleared): hosts=2, procs=2" in mortal.run("%mesh restart m").ok().text
    # Hosts that the notebook started.
    mortal.run("from monarch.testing import local_hosts\nmanager = local_hosts(1); spare = manager.__enter__()").ok()
    assert "hosts=3" in mortal.run("%mesh resize hosts=3 --hosts spare").ok().stream()
    assert mortal.mesh("f() if 'f' in globals() else world_size").ok().shown == "[ranks 0-5] 6"
    cell = mortal.run("%mesh resize hosts=4 --hosts nix")
    assert cell.status == "error" and "got 'nix'" in cell.text
    cell = mortal.run("%mesh resize mesh procs=5 --hosts spare")
    assert cell.status == "error" and "mesh 'mesh' has no hosts axis" in cell.text
    mortal.run("%mesh down m").ok()
    mortal.run("manager.__exit__(None, None, None)").ok()


STATEFUL = """
from monarch.actor import Actor, endpoint
class Counter(Actor):
    def __init__(self): self.count = torch.zeros(100_000)
    def __getstate__(self): return self.count
    def __setstate__(self, count): self.count = count
    @endpoint
    def add(self, much):
        self.count += much
        return self.count.mean().item()
class Plain(Actor):
    @endpoint
    def one(self): return 1
counters, plains = m.spawn("counters", Counter), m.spawn("plains", Plain)
[counters.slice(hosts=host).add.call(host + 1).get() for host in range(3)]
plains.one.call().get().values()
"""


def test_smaller_mesh_leaves_lost_host_and_keeps_variables(mortal: Notebook) -> None:
    mortal.run("%mesh up m --on process:3 --procs 2").ok()
    mortal.mesh("import os\nx = torch.full((1_000_000,), float(rank))\ndef double(): return 2 * x.mean().item()").ok()
    mortal.run(f"import torch\n{STATEFUL}").ok()
    agents = {int(line.split()[-1]): line for line in mortal.mesh("print(os.getppid())").ok().stream().splitlines()}
    first = next(pid for pid, line in agents.items() if line.startswith("[ranks 0-1]"))
    os.kill(first, signal.SIGKILL)
    assert wait_until(lambda: "were lost with" in mortal.mesh("pass").text)
    advice = "no host is free for ranks 0-1: %mesh resize hosts=2 continues on the remaining hosts"
    assert advice in mortal.mesh("x").text
    assert "no free host for their ranks; %mesh resize m hosts=2 continues" in mortal.run("%mesh heal").text
    # The mesh is as before after a wrong size.
    assert "and cannot resize to 3; %mesh resize m hosts=2" in mortal.run("%mesh resize hosts=3").text
    assert "only the first axis" in mortal.run("%mesh resize hosts=2 procs=3").text
    text = mortal.run("%mesh resize hosts=2").ok().stream()
    host = re.escape(gethostname())
    assert re.search(rf"ranks 0-1 of mesh 'm' moved to {host} \(\d+\) with the variables of ranks 4-5", text), text
    assert "actors plains: recreated on ranks 0-1; their state is lost" in text
    shown = mortal.mesh("double(), rank, world_size").ok().shown.splitlines()
    assert shown == [f"[rank {rank}] ({2.0 * was}, {rank}, 4)" for rank, was in enumerate([4, 5, 2, 3])]
    assert mortal.mesh("y = torch.ones(1)\ndist.all_reduce(y)\ny.item()").ok().shown == "[ranks 0-3] 4.0"
    assert mortal.run("[*counters.add.call(0).get().values()]").ok().shown == "[3.0, 3.0, 2.0, 2.0]"
    assert "all ranks of mesh 'm' are alive" in mortal.run("%mesh heal").ok().text


def test_stop_and_failing_definitions_keep_variables_that_move(mortal: Notebook, tmp_path: Path) -> None:
    gate, begun = tmp_path / "gate", tmp_path / "begun"
    mortal.run("%mesh up m --on process:2 --procs 1").ok()
    mortal.mesh("import os, time\nx = torch.full((1_000_000,), float(rank) + 1)").ok()
    # A definition that waits on a new rank, and fails there.
    mortal.mesh(
        f"class Slow:\n    if os.path.exists('{gate}'):\n        open('{begun}', 'w').close()\n"
        f"        while os.path.exists('{gate}'): time.sleep(0.01)\n        raise ValueError('too late')"
    ).ok()
    gate.touch()
    agents = mortal.mesh("print(os.getppid())").ok().stream().splitlines()
    os.kill(next(int(line.split()[-1]) for line in agents if "[rank 0]" in line), signal.SIGKILL)
    assert wait_until(lambda: "was lost with" in mortal.mesh("pass").text)
    cell = mortal.send("%mesh resize hosts=1")
    cell.until(begun.exists)
    mortal.interrupt()
    cell.wait()
    assert "the resize of mesh 'm' was stopped; the next cell waits for ranks that are already moving" in cell.text
    gate.unlink()
    after = mortal.mesh("x.mean().item()").ok()
    assert after.shown == "[rank 0] 2.0"
    # The stop has reached the definition, too.
    assert "rank 0 of mesh 'm' moved to" in after.stream() and "with the variables of rank 1" in after.stream()
    assert "rank 0 was replaced, but a stop cut off the definitions of cell" in after.stream()
    assert "now has hosts=1" in mortal.run("%mesh resize hosts=1").ok().stream()
    assert mortal.mesh("Slow.__name__").ok().shown == "[rank 0] 'Slow'"


def test_notice_during_a_resize_waits_for_it(mortal: Notebook, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    mortal.run("%mesh up m --on process:3 --procs 1").ok()
    mortal.mesh("import os, time\nx = torch.full((1_000_000,), float(rank))").ok()
    lines = mortal.mesh("print(os.getppid())").ok().stream().splitlines()
    agents = [int(line.split()[-1]) for line in sorted(lines)]
    os.kill(agents[0], signal.SIGKILL)
    assert wait_until(lambda: "was lost with" in mortal.mesh("pass", "[0:2]").text)
    mortal.mesh(f"while not os.path.exists('{gate}'): time.sleep(0.01)", "[2] --nowait").ok()
    # It waits for the cell on rank 2, whose variables move.
    resize = mortal.send("%mesh resize hosts=2")
    resize.until(lambda: "waiting for cell" in resize.text)
    os.kill(agents[1], signal.SIGTERM)
    resize.until(lambda: "is being taken back (SIGTERM)" in resize.text)
    gate.touch()
    resize.until(lambda: "has shrunk to hosts=1, procs=1: rank 1 was removed" in resize.text)
    assert "with the variables of rank 2" in resize.text and "now has hosts=2, procs=1" in resize.text
    assert mortal.mesh("x.mean().item()").ok().shown == "[rank 0] 2.0"
