"""Hosts reached by ssh: real servers on loopback, real agents and ranks, and their ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import sshd
from leaks import Kit, processes, session_folders, wait_until
from light import LIGHT
from monarch.exceptions import ArgumentError, SpawnError
from monarch.job import SSHJob, job_loads

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(sshd.why_none()), reason=sshd.why_none() or "none"),
    pytest.mark.usefixtures("light"),
]

USE = """
import os, sys, threading, time
from pathlib import Path
from monarch._node.current import current_node
from monarch.actor import Actor, current_rank, endpoint
from monarch.job import SSHJob

class Worker(Actor):
    @endpoint
    def home(self) -> str:
        return os.path.basename(os.environ["HOME"])

    @endpoint
    def ask(self, others) -> list:
        return sorted(others.home.call().get(30).values())

    @endpoint
    def wait(self) -> None:
        time.sleep(60)

def secret_is_seen(secret: bytes) -> bool:
    for entry in os.listdir("/proc"):
        for name in ("cmdline", "environ"):
            try:
                if entry.isdigit() and secret in Path("/proc", entry, name).read_bytes():
                    return True
            except OSError:
                pass
    return False

if __name__ == "__main__":
    how, config, *hosts = sys.argv[1:]
    job = SSHJob({"trainers": hosts}, config=config, reverse="reverse" in how).told_by(lambda line: None)
    procs = job.state().trainers.spawn_procs({"gpus": 2}, name="far")
    actors, others = procs.spawn("actors", Worker), procs.spawn("others", Worker)
    print(actors.home.call().get(60).values(), flush=True)
    if "lost" in how:
        call = actors.wait.call()
        print("ready", flush=True)
        try:
            call.get(50)
        except Exception as error:
            print(type(error).__name__, "host node" in str(error), flush=True)
        job.kill()
        sys.exit()
    print(actors.ask.call(others).get(60).values()[0])
    print(secret_is_seen(current_node().hosts.keys.secret))
    job.kill()
    print(job.active)
"""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[sshd.SSHHosts]:
    made = sshd.SSHHosts(tmp_path_factory.mktemp("ssh"))
    yield made
    made.close()


def quiet(job: SSHJob) -> SSHJob:
    job.told_by(lambda line: None)
    return job


@pytest.mark.parametrize("how", ["direct", "reverse"])
def test_ranks_of_ssh_hosts_answer_each_other(hosts: sshd.SSHHosts, program: Callable[..., Any], how: str) -> None:
    lines = program(LIGHT + USE, how, hosts.config, "node1", "node2").ok().splitlines()
    assert lines[0] == str(["home1"] * 2 + ["home2"] * 2)
    assert lines[1] == str(["home1"] * 2 + ["home2"] * 2)
    # The key of the program is in no command line and no environment; and nothing runs after kill().
    assert lines[2:] == ["False", "False"]


def test_hosts_behind_a_jump_host_are_reached(hosts: sshd.SSHHosts, program: Callable[..., Any]) -> None:
    hosts.name("behind", f"  Port {hosts.ports[1]}\n  ProxyCommand ssh -F {hosts.config} -W %h:%p node1\n")
    assert program(LIGHT + USE, "direct", hosts.config, "behind").ok().splitlines()[0] == str(["home2"] * 2)


def test_host_without_the_runtime_gets_it(hosts: sshd.SSHHosts, program: Callable[..., Any]) -> None:
    """A folder that this program's machine has is empty there, as on a machine without a shared file system."""
    root = Path(__file__).resolve().parents[2] / "runtime"
    hide = f'mount -t tmpfs none {root} && exec "$0" "$@"'
    prefix = ["unshare", "-m", "sh", "-c", hide]
    if subprocess.run([*prefix, "true"], capture_output=True).returncode:
        pytest.skip("a file system cannot be hidden here (unshare -m)")
    name = hosts.add(prefix)
    home = hosts.folder / f"home{len(hosts.servers)}"
    for _ in range(2):
        assert program(LIGHT + USE, "direct", hosts.config, name).ok().splitlines()[0] == str([home.name] * 2)
        (runtime,) = (home / ".cache" / "monarch-kernel").iterdir()
        assert (runtime / "monarch" / "actor.py").exists() and runtime.parent.stat().st_mode & 0o777 == 0o700


def sessions_of(server: int) -> list[int]:
    """The processes in which a server serves its connections."""
    return [int(child) for child in Path(f"/proc/{server}/task/{server}/children").read_text().split()]


@pytest.mark.parametrize("victim", ["client", "session", "program", "agent"])
@pytest.mark.parametrize("how", ["lost", "lost reverse"])
def test_nothing_is_left_after_a_kill(hosts: sshd.SSHHosts, tmp_path: Path, victim: str, how: str, warm: None) -> None:
    before, folders = processes(), session_folders()
    path = tmp_path / "program.py"
    path.write_text(LIGHT + USE)
    command = [sys.executable, str(path), how, hosts.config, "node1", "node2"]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert running.stdout is not None
    assert "home1" in running.stdout.readline() and running.stdout.readline() == "ready\n"
    names = {pid: name for pid, name in processes().items() if pid not in before}
    if victim == "program":
        os.kill(running.pid, signal.SIGKILL)
    elif victim == "session":
        os.kill(sessions_of(hosts.servers[0].pid)[0], signal.SIGKILL)
    else:
        pids = [pid for pid, name in names.items() if name == ("ssh" if victim == "client" else "monarch-agent")]
        os.kill(pids[0], signal.SIGKILL)
    out, err = running.communicate(timeout=60)
    if victim == "program":
        assert running.returncode == -9
    else:
        # The loss of a host is an error of the call, and the program goes on.
        assert out.splitlines() == ["SupervisionError True"], err
        assert running.returncode == 0
    assert wait_until(lambda: not processes().keys() - before.keys(), 15), processes().keys() - before.keys()
    assert wait_until(lambda: not session_folders() - folders, 5), session_folders() - folders


def test_hosts_that_fail_are_named_with_what_to_do(hosts: sshd.SSHHosts, host: Any, leaks: Kit) -> None:
    known = f"  HostName 127.0.0.1\n  Port {hosts.ports[0]}\n"
    hosts.name("stranger", f"{known}  IdentityFile {hosts.folder}/other_id\n")
    hosts.name("unknown", f"{known}  UserKnownHostsFile /dev/null\n  StrictHostKeyChecking yes\n")
    hosts.name("closed", f"  HostName 127.0.0.1\n  Port {sshd.free_port()}\n")
    begun = time.monotonic()
    with pytest.raises(SpawnError) as raised:
        names = ["stranger", "unknown", "closed", "not-there.invalid", "node1"]
        hosts.name("not-there.invalid", "  HostName not-there.invalid\n")
        quiet(SSHJob({"all": names}, config=hosts.config)).state()
    assert time.monotonic() - begun < 20
    lines = {line.split(":")[0]: line for line in str(raised.value).splitlines()}
    assert lines.keys() == {"host stranger", "host unknown", "host closed", "host not-there.invalid"}
    assert "Permission denied" in lines["host stranger"] and "ssh-add" in lines["host stranger"]
    assert "accept its key: ssh unknown" in lines["host unknown"]
    assert "Connection refused" in lines["host closed"] and "sshd runs" in lines["host closed"]
    assert "Could not resolve hostname" in lines["host not-there.invalid"]


def test_silent_host_is_named_in_time(hosts: sshd.SSHHosts, host: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hosts.name("silent", f"  HostName 127.0.0.1\n  Port {silent.getsockname()[1]}\n")
        begun = time.monotonic()
        with pytest.raises(SpawnError, match=r"host silent: .*timed out|host silent: no connection within 3 s"):
            quiet(SSHJob({"one": ["silent"]}, config=hosts.config, connect_timeout=3)).state()
        assert time.monotonic() - begun < 10


def test_host_whose_python_lacks_torch_is_named(hosts: sshd.SSHHosts, host: Any, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare")], check=True)
    bare = str(tmp_path / "bare" / "bin" / "python")
    with pytest.raises(SpawnError, match=rf"host node1: its Python \({bare}\) has no torch.*pip install torch"):
        quiet(SSHJob({"one": ["node1"]}, config=hosts.config, python=bare)).state()
    with pytest.raises(SpawnError, match=r"host node1: .*found no /no/python"):
        quiet(SSHJob({"one": ["node1"]}, config=hosts.config, python={"node1": "/no/python"})).state()


def test_job_goes_on_with_the_hosts_that_are_there(hosts: sshd.SSHHosts, leaks: Kit, host: Any) -> None:
    hosts.name("closed2", f"  HostName 127.0.0.1\n  Port {sshd.free_port()}\n")
    lines: list[str] = []
    job = SSHJob({"some": "node1,closed2,node2"}, config=hosts.config, at_least=2)
    job.told_by(lines.append)
    with job:
        assert job.state().some.sizes == {"hosts": 2} and job.seconds_left is None
    assert [line for line in lines if line.startswith("failed: host closed2")]
    assert lines[-1].startswith("joined 2 of 3") or lines[-2].startswith("joined 2 of 3")
    # This program listens for hosts from now on.
    leaks.rebase()


def test_one_job_has_several_meshes(hosts: sshd.SSHHosts, leaks: Kit, host: Any, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text(f"# ours\nnode1 slots=8\nnode2 python={sys.executable}\n")
    job = quiet(SSHJob({"train": 1, "load": 1}, hostfile=str(tmp_path / "hosts"), config=hosts.config))
    again = job_loads(job.dumps())
    assert isinstance(again, SSHJob) and again.meshes == {"train": 1, "load": 1} and not again.active
    with job:
        state = job.state()
        assert state.train.spawn_procs({"gpus": 1}).initialized.get(60)
        state.train.shutdown().get(30)
        # The other mesh goes on.
        assert state.load.spawn_procs({"gpus": 1}).initialized.get(60)
    leaks.rebase()


def test_arguments_of_ssh_jobs_are_checked() -> None:
    for wrong in ({"a": ["-oProxyCommand=x"]}, {"a": "node1,node1"}, {"a": 2}, {}, {"a": "node[1"}):
        with pytest.raises(ArgumentError):
            SSHJob(wrong)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="python"):
        SSHJob({"a": "node1"}, python="python; rm -rf /")
    with pytest.raises(ArgumentError, match="cannot read"):
        SSHJob({"a": 1}, hostfile="/no/such/file")
