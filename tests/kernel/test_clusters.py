"""``%mesh up --on``: hosts of a launcher in a notebook."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import kube
import sshd
from kernels import Notebook
from leaks import Kit, processes, wait_until
from light import IDLE

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(sshd.why_none()), reason=sshd.why_none() or "none")]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory, notebook: Notebook) -> Iterator[sshd.SSHHosts]:
    notebook.run(IDLE).ok()
    made = sshd.SSHHosts(tmp_path_factory.mktemp("ssh"))
    yield made
    made.close()


@pytest.mark.parametrize("more", ["", " --reverse"])
def test_mesh_on_ssh_hosts_runs_cells(hosts: sshd.SSHHosts, notebook: Notebook, leaks: Kit, more: str) -> None:
    before = processes()
    up = notebook.run(f"%mesh up far --on ssh:node[1-2] --opt config={hosts.config} --gpus 2 --device cpu{more}").ok()
    assert re.search(r"mesh 'far' is up: hosts=2, gpus=2, in \d", up.text)
    updates = str(up.contents("update_display_data"))
    assert "environment of node" in updates and "joined 2 of 2" in updates
    home = "import os\nos.path.basename(os.environ['HOME'])"
    assert notebook.mesh(home).ok().shown == "[ranks 0-1] 'home1'\n[ranks 2-3] 'home2'"
    assert notebook.mesh("x = torch.ones(1)\ndist.all_reduce(x)\nx.item()").ok().shown == "[ranks 0-3] 4.0"
    assert re.search(r"\n +3 +1 +1 +node2 +\d+", notebook.run("%mesh").ok().text)
    assert "mesh 'far' is down" in notebook.run("%mesh down far").ok().stream()
    notebook.run("%mesh use mesh").ok()

    def nothing_new() -> bool:
        return not [name for pid, name in processes().items() if pid not in before and name in ("ssh", "sshd")]

    assert wait_until(nothing_new, 15)
    leaks.rebase()


def test_mesh_on_hosts_that_fail_names_them(hosts: sshd.SSHHosts, notebook: Notebook) -> None:
    hosts.name("closed", f"  HostName 127.0.0.1\n  Port {sshd.free_port()}\n")
    failed = notebook.run(f"%mesh up far --on ssh:closed,node1 --opt config={hosts.config} --gpus 1")
    why = failed.reply["evalue"]
    assert "host closed: ssh exited with code 255" in why and "Connection refused" in why
    up = notebook.run(f"%mesh up far --on ssh:closed,node1 --at-least 1 --opt config={hosts.config} --gpus 1").ok()
    assert "hosts=1, gpus=1" in up.text and "failed: host closed" in up.stream("stderr")
    notebook.run("%mesh down far").ok()
    notebook.run("%mesh use mesh").ok()


def test_stop_cancels_the_wait_for_hosts(hosts: sshd.SSHHosts, notebook: Notebook) -> None:
    before = processes()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hosts.name("silent", f"  HostName 127.0.0.1\n  Port {silent.getsockname()[1]}\n")
        cell = notebook.send(f"%mesh up far --on ssh:silent,node1 --opt config={hosts.config} --gpus 1")
        assert wait_until(lambda: "ssh" in [name for pid, name in processes().items() if pid not in before], 20)
        notebook.interrupt()
        assert "KeyboardInterrupt" in cell.wait().reply["ename"]
    assert wait_until(lambda: "ssh" not in [name for pid, name in processes().items() if pid not in before], 10)


def test_mesh_grows_when_a_missing_host_comes(hosts: sshd.SSHHosts, notebook: Notebook, tmp_path: Path) -> None:
    port, go = sshd.free_port(), tmp_path / "go"
    hosts.name("late", f"  HostName 127.0.0.1\n  Port {port}\n")
    notebook.run("from monarch._procs.launch import ssh\nusual, ssh._AGAIN_S = ssh._AGAIN_S, 1.0").ok()
    options = f"--at-least 1 --opt config={hosts.config} --gpus 2 --device cpu"
    up = notebook.run(f"%mesh up far --on ssh:node1,late {options}").ok()
    try:
        assert "hosts=1, gpus=2" in up.text and "failed: host late" in up.stream()
        notebook.mesh("word = 'kept'\ndef double(x): return 2 * x").ok()
        busy = f"import os, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.01)\ndouble(rank)"
        notebook.mesh(busy, "--nowait --out handle").ok()
        hosts.add(Port=str(port))
        up.until(lambda: "joined 2 of 2: late; mesh 'far' grows onto it before its next cell" in up.stream())
        # The cell that runs is not disturbed; the next one runs on all ranks, with the definitions of earlier cells.
        cell = notebook.send("%%mesh\ndouble(rank), 'word' in dir()")
        go.touch()
        cell.wait().ok()
        assert "mesh 'far' has grown onto 1 more host: hosts=2, gpus=2; new: ranks 2-3" in cell.stream()
        assert "[rank 2] (4, False)\n[rank 3] (6, False)" in cell.shown
        assert notebook.run("[*handle.get().values()]").ok().shown == "[0, 2]"
        assert notebook.mesh("x = torch.ones(1)\ndist.all_reduce(x)\nx.item()").ok().shown == "[ranks 0-3] 4.0"
    finally:
        go.touch()
        notebook.run("ssh._AGAIN_S = usual")
        notebook.run("%mesh down far")
        notebook.run("%mesh use mesh").ok()


def test_options_of_launchers_are_checked(notebook: Notebook, tmp_path: Path) -> None:
    for line, what in {
        "--on ssh:node1": "--gpus N or --procs N",
        "--on abacus --gpus 1": "unknown launcher 'abacus'",
        "--on ssh:node1 --gpus 1 --opt colour=red": "launcher 'ssh' has no option 'colour'",
        "--on slurm --gpus 1 --opt partitions=low": "no option 'partitions'; did you mean 'partition'?",
        "--on process:2 --gpus 1 --reverse": "launcher 'process' has no option 'reverse'",
        "--on ssh:node1 --gpus 1 --opt colour": "expected NAME=VALUE",
        "--on ssh:node1 --hosts here --gpus 1": "expected the number of hosts",
        "--on ssh:node1 --key keys --gpus 1": "omit --key, which is for the workers of --hosts",
        "--on process:2 --on-preempt haeal --gpus 1": "has no function with that name; did you mean 'heal'?",
        "--opt partition=gpu": "add --on WHERE",
        "--on process:2 --hosts 3 --gpus 1": "'process:2' asks for 2 hosts, but 3 are requested",
        "--on process:2 --at-least 5 --gpus 1": "at least 5 hosts are needed to start, but only 2 requested",
        "--on process:2 --spare-hosts 2 --gpus 1": "2 spare hosts of 2 would leave none for ranks",
        "--on process:2 --hosts 3 --gpus 1 --keep 1h": "'process:2' asks for 2 hosts, but 3 are requested",
        "--on process:2 --spare-hosts 2 --gpus 1 --keep 1h": "2 spare hosts of 2 would leave none for ranks",
        "--on process --gpus 1": "expected a number of hosts, at least 1, got 0; for example --hosts 2",
    }.items():
        assert what in notebook.run(f"%mesh up far {line}").reply["evalue"], line


def test_python_files_reach_hosts_before_each_cell(hosts: sshd.SSHHosts, notebook: Notebook, tmp_path: Path) -> None:
    """The folder of the notebook is hidden on the hosts, as on machines without a shared file system."""
    folder = tmp_path / "project"
    (folder / "pack").mkdir(parents=True)
    (folder / "pack" / "__init__.py").write_text("")
    (folder / "pack" / "inner.py").write_text("word = 'inner'\n")
    (folder / "helper.py").write_text("import pack.inner\nword = pack.inner.word + ' one'\n")
    (folder / ".venv").mkdir()
    (folder / ".venv" / "not_ours.py").write_text("")
    hide = f'mount -t tmpfs none {folder} && exec "$0" "$@"'
    prefix = ["unshare", "-m", "sh", "-c", hide]
    if subprocess.run([*prefix, "true"], capture_output=True).returncode:
        pytest.skip("a file system cannot be hidden here (unshare -m)")
    names = ",".join(hosts.add(prefix) for _ in range(2))
    notebook.run(f"import os\nbefore = os.getcwd()\nos.chdir({str(folder)!r})").ok()
    try:
        notebook.run(f"%mesh up far --on ssh:{names} --opt config={hosts.config} --gpus 2 --device cpu").ok()
        assert notebook.mesh(f"import os\nos.listdir({str(folder)!r})").ok().shown == "[ranks 0-3] []"
        assert notebook.mesh("import helper\nhelper.word").ok().shown == "[ranks 0-3] 'inner one'"
        assert "all hosts already have the 3 Python files" in notebook.run("%mesh sync").ok().stream()
        (folder / "helper.py").write_text("word = 'two'\n")
        (folder / "second.py").write_text("word = 'second'\n")
        # A new file reaches the next cell.
        assert notebook.mesh("import second\nsecond.word").ok().shown == "[ranks 0-3] 'second'"
        assert notebook.mesh("helper.word").ok().shown == "[ranks 0-3] 'inner one'"
        notebook.run("%mesh reload helper").ok()
        assert notebook.mesh("helper.word").ok().shown == "[ranks 0-3] 'two'"
        (folder / "helper.py").write_text("word = 'three'\n")
        told = notebook.run("%mesh sync").ok().stream()
        assert "copied to 2 hosts: helper.py" in told
        assert (
            "helper was already imported, so the old version is in use; %mesh reload helper loads the new one" in told
        )
        # New processes have the files too.
        notebook.run("%mesh kill 1").ok()
        assert notebook.mesh("import helper\nhelper.word").ok().shown == "[ranks 0,2-3] 'two'\n[rank 1] 'three'"
        (folder / "second.py").unlink()
        assert "all hosts already have the 3 Python files" in notebook.run("%mesh sync").ok().stream()
        assert notebook.mesh("os.path.exists(second.__file__)").ok().shown == "[ranks 0-3] False"
    finally:
        notebook.run("%mesh down far")
        notebook.run("os.chdir(before)").ok()
        notebook.run("%mesh use mesh").ok()


def test_files_go_to_each_host_and_come_back(hosts: sshd.SSHHosts, notebook: Notebook, tmp_path: Path) -> None:
    data = tmp_path / "data"
    (data / "deep").mkdir(parents=True)
    large = os.urandom((8 << 20) + 5)
    (data / "large.bin").write_bytes(large)
    (data / "deep" / "empty").write_bytes(b"")
    up = f"%mesh up far --on ssh:node[1-2] --opt config={hosts.config} --gpus 2 --device cpu"
    notebook.run(up).ok()
    try:
        notebook.mesh("import os\nos.chdir(os.path.expanduser('~'))").ok()
        told = notebook.run(f"%mesh put {data} inbox").ok().stream()
        assert "copied to 2 hosts: 2 files, 8.4 MB" in told and "inbox/data/deep/empty" in told
        for home in ("home1", "home2"):
            assert (hosts.folder / home / "inbox" / "data" / "large.bin").read_bytes() == large
            assert (hosts.folder / home / "inbox" / "data" / "deep" / "empty").read_bytes() == b""
        notebook.mesh("open(f'out-{rank}.txt', 'w').write(f'of {rank}')").ok()
        told = notebook.run("%mesh get out-{rank}.txt " + str(tmp_path / "all")).ok().stream()
        assert "copied here: 4 files" in told
        assert [(tmp_path / "all" / f"rank-{rank}" / f"out-{rank}.txt").read_text() for rank in range(4)] == [
            f"of {rank}" for rank in range(4)
        ]
        # A folder that ranks share comes once from each host.
        notebook.run(f"%mesh get ~/inbox {tmp_path / 'back'}").ok()
        assert sorted(each.name for each in (tmp_path / "back").iterdir()) == ["rank-0", "rank-2"]
        assert (tmp_path / "back" / "rank-2" / "inbox" / "data" / "large.bin").read_bytes() == large
        assert "no file on any rank matches 'nothing'" in notebook.run("%mesh get nothing").reply["evalue"]
        assert "found no files at 'nothing' on this machine" in notebook.run("%mesh put nothing").reply["evalue"]
        assert not list(tmp_path.rglob("*.part")) and not list(hosts.folder.rglob("*.part"))
        # Files of the same name in different folders stay apart.
        notebook.mesh("for name in 'ab': os.makedirs(f'runs/{rank}/{name}')").ok()
        notebook.mesh("for name in 'ab': open(f'runs/{rank}/{name}/model.pt', 'w').write(f'{name}{rank}')").ok()
        notebook.run("%mesh get runs/{rank}/*/model.pt " + str(tmp_path / "runs")).ok()
        models = {str(each.relative_to(tmp_path / "runs")): each.read_text() for each in tmp_path.glob("runs/*/*/*")}
        assert models == {f"rank-{rank}/{name}/model.pt": f"{name}{rank}" for rank in range(4) for name in "ab"}
        # By one rank of each host, whichever comes first. What both print is one line only if it comes together.
        told = re.findall(r"\[ranks? ([\d,-]+)\] pip \d", notebook.run("%mesh pip --version").ok().text)
        assert sorted(int(rank) // 2 for text in told for rank in re.findall(r"\d+", text)) == [0, 1], told
        assert "needs a command" in notebook.run("%mesh pip").reply["evalue"]
    finally:
        notebook.run("%mesh down far")
        notebook.run("%mesh use mesh").ok()


@pytest.mark.skipif(bool(kube.why_none()), reason=kube.why_none() or "none")
def test_time_of_hosts_is_shown(notebook: Notebook, tmp_path: Path) -> None:
    """On pods of a simulated API server, with a time limit."""
    cluster = kube.SimulatedCluster(tmp_path)
    try:
        where = f"--on kubernetes:image:1 --opt kubectl={cluster.kubectl} --opt python={sys.executable}"
        options = "--opt forward=false --opt time_limit=3600 --hosts 2 --gpus 1 --device cpu"
        up = notebook.run(f"%mesh up far {where} {options}").ok()
        assert "hosts=2, gpus=1" in up.text and re.search(r"the host allocation ends in (59|60) min", up.text)
        assert notebook.mesh("x = torch.ones(1)\ndist.all_reduce(x)\nx.item()").ok().shown == "[ranks 0-1] 2.0"
        assert re.search(r"mesh 'far': the host allocation ends in (59m|1h)", notebook.run("%mesh").ok().text)
        notebook.run("%mesh down far").ok()
        assert not cluster.objects
        assert wait_until(lambda: all(pod.poll() is not None for pod in cluster.pods.values()), 20)
    finally:
        notebook.run("%mesh use mesh").ok()
        cluster.close()
