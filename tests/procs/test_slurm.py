"""Hosts from Slurm: a real cluster on this machine, its queue, and the ends of allocations."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import slurm
from leaks import processes, session_folders, wait_until
from light import LIGHT
from monarch._procs.launch.registry import make_launcher
from monarch.exceptions import ArgumentError, SpawnError
from monarch.job import SlurmJob

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(slurm.why_none()), reason=slurm.why_none() or "none")]

USE = """
import os, sys, time
from monarch.actor import Actor, endpoint
from monarch.job import SlurmJob

class Worker(Actor):
    @endpoint
    def node(self) -> str:
        return os.environ["SLURMD_NODENAME"]

    @endpoint
    def wait(self) -> None:
        time.sleep(100)

if __name__ == "__main__":
    how, count = sys.argv[1], int(sys.argv[2])
    job = SlurmJob({"trainers": count, "data": 1}, time_limit="10", slurm_args=sys.argv[3:])
    job.told_by(lambda line: print(line, flush=True) if how == "queue" else None)
    state = job.state()
    procs = state.trainers.spawn_procs({"gpus": 2}, name="far")
    actors = procs.spawn("actors", Worker)
    print(actors.node.call().get(60).values(), state.data.sizes, 500 < job.seconds_left <= 600, flush=True)
    if how == "wait":
        call = actors.wait.call()
        print("ready", flush=True)
        try:
            call.get(60)
        except Exception as error:
            print(type(error).__name__, "host n" in str(error), flush=True)
    job.kill()
    print(job.seconds_left)
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[slurm.SlurmCluster]:
    made = slurm.SlurmCluster(tmp_path_factory.mktemp("slurm"))
    yield made
    made.close()


@pytest.fixture
def running(cluster: slurm.SlurmCluster, tmp_path: Path, warm: None) -> Iterator[Callable[..., Any]]:
    """Starts programs, and looks at what they leave on the cluster and here."""
    before, folders = processes(), session_folders()
    started: list[subprocess.Popen[str]] = []

    def start(*args: str, text: str = USE) -> subprocess.Popen[str]:
        path = tmp_path / "program.py"
        path.write_text(LIGHT + text)
        env = {**os.environ, **cluster.env}
        command = [sys.executable, str(path), *args]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()
    assert wait_until(lambda: not cluster.jobs(), 20), cluster.jobs()
    assert wait_until(lambda: not processes().keys() - before.keys(), 15), processes().keys() - before.keys()
    assert wait_until(lambda: not session_folders() - folders, 5)


def line_of(process: subprocess.Popen[str], start: str) -> str:
    """The next line that starts so."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(start):
            return line
    raise AssertionError(process.communicate()[1])


def test_hosts_of_an_allocation_answer(running: Callable[..., Any]) -> None:
    out, err = running("use", "2").communicate(timeout=90)
    assert out.splitlines() == [f"{['n1', 'n1', 'n2', 'n2']} {{'hosts': 1}} True", "None"], err


def test_queued_job_is_told_and_starts(cluster: slurm.SlurmCluster, running: Callable[..., Any]) -> None:
    holder = subprocess.Popen(["srun", "-N3", "-p", "high", "sleep", "100"], env={**os.environ, **cluster.env})
    assert wait_until(lambda: cluster.jobs() == ["RUNNING"], 20)
    process = running("queue", "1")
    assert "(Resources)" in line_of(process, "queued: job") or "(Priority)" in line_of(process, "queued: job")
    holder.terminate()
    holder.wait()
    assert line_of(process, "joined 2 of 2")
    assert line_of(process, "['n1', 'n1']")


LATE = """
import sys, time
from monarch.job import SlurmJob

if __name__ == "__main__":
    job = SlurmJob({"trainers": 3}, time_limit="10", at_least=1).told_by(lambda line: print(line, flush=True))
    procs = job.state().trainers.spawn_procs({"gpus": 1}, name="far")
    print("has", procs.sizes["hosts"], flush=True)
    if sys.argv[1] == "wait":
        time.sleep(100)
    while procs.sizes["hosts"] < 3:
        late = job.late_hosts()
        if late is not None:
            procs.resize(late, hosts=procs.sizes["hosts"] + late.sizes["hosts"])
        time.sleep(0.1)
    print("has", procs.sizes["hosts"], flush=True)
    job.kill()
"""


PREEMPTED = """
import os, sys, threading, time
from monarch.actor import Actor, endpoint
from monarch.job import SlurmJob, drain

class Counter(Actor):
    def __init__(self):
        self.count = 0

    def __getstate__(self):
        return {"count": self.count}

    def __setstate__(self, state):
        self.count = state["count"]

    @endpoint
    def add(self, more: int) -> int:
        self.count += more
        return self.count

    @endpoint
    def node(self) -> str:
        return os.environ["SLURMD_NODENAME"]

if __name__ == "__main__":
    job = SlurmJob({"trainers": 3}, time_limit="10", at_least=2).told_by(lambda line: print(line, flush=True))
    done = threading.Event()

    def move(notices):
        print("notices", sorted(each.name for each in notices), flush=True)
        drain(procs, job.hosts_of(notices))
        done.set()

    hosts = job.on_preempt(move).state().trainers
    procs = hosts.spawn_procs({"gpus": 1}, name="far")
    actors = procs.spawn("actors", Counter)
    while procs.sizes["hosts"] < 3:
        late = job.late_hosts()
        if late is not None:
            procs.resize(late, hosts=procs.sizes["hosts"] + late.sizes["hosts"])
        time.sleep(0.05)
    print("nodes", *actors.node.call().get(60).values(), flush=True)
    actors.add.call(5).get(60)
    assert done.wait(60)
    print("has", procs.sizes["hosts"], actors.add.call(1).get(60).values(), flush=True)
    print("on", *actors.node.call().get(60).values(), flush=True)
    job.kill()
"""


def test_preempted_job_lets_its_host_go(cluster: slurm.SlurmCluster, running: Callable[..., Any]) -> None:
    """By a job of a partition with a higher priority, which Slurm makes wait for the grace time of the other."""
    process = running(text=PREEMPTED)
    first, *rest = line_of(process, "nodes").split()[1:]
    begun = time.monotonic()
    # The job of its own that has the last host.
    winner = subprocess.Popen(["srun", "-N1", "-w", rest[-1], "-p", "high", "true"], env={**os.environ, **cluster.env})
    assert line_of(process, f"host {rest[-1]} is being taken back (SIGTERM)")
    assert line_of(process, "notices") == f"notices ['{rest[-1]}']\n"
    assert line_of(process, "has") == "has 2 [6, 6]\n"
    assert line_of(process, "on").split()[1:] == [first, rest[0]]
    # The host is given back long before its grace time of 20 s is over.
    assert winner.wait(60) == 0 and time.monotonic() - begun < 15
    assert process.wait(60) == 0


@pytest.mark.parametrize("how", ["grow", "wait"])
def test_job_begins_with_some_hosts(cluster: slurm.SlurmCluster, running: Callable[..., Any], how: str) -> None:
    holder = subprocess.Popen(["srun", "-N2", "-p", "high", "sleep", "100"], env={**os.environ, **cluster.env})
    assert wait_until(lambda: cluster.jobs() == ["RUNNING"], 20)
    process = running(how, text=LATE)
    assert line_of(process, "has") == "has 1\n"
    assert sorted(cluster.jobs()) == ["PENDING", "PENDING", "RUNNING", "RUNNING"]
    if how == "wait":
        # The jobs that wait end with the program too, which the fixture checks.
        process.kill()
        assert wait_until(lambda: cluster.jobs() == ["RUNNING"], 20), cluster.jobs()
    holder.terminate()
    holder.wait()
    if how == "grow":
        assert line_of(process, "joined 2 of 3").endswith("job.late_hosts() returns it\n")
        assert line_of(process, "has") == "has 3\n"
        assert process.wait(60) == 0


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_queued_job_ends_with_its_program(
    cluster: slurm.SlurmCluster, running: Callable[..., Any], how: signal.Signals
) -> None:
    holder = subprocess.Popen(["srun", "-N3", "-p", "high", "sleep", "100"], env={**os.environ, **cluster.env})
    assert wait_until(lambda: cluster.jobs() == ["RUNNING"], 20)
    process = running("queue", "1")
    line_of(process, "queued: job")
    process.send_signal(how)
    _, err = process.communicate(timeout=30)
    assert how == signal.SIGKILL or "KeyboardInterrupt" in err
    assert wait_until(lambda: cluster.jobs() == ["RUNNING"], 20), cluster.jobs()
    holder.terminate()
    holder.wait()
    # Nothing of that session was running yet that could remove its folder: the next session does.
    subprocess.run([sys.executable, "-c", "from monarch.actor import this_host; this_host()"], check=True)


def pids_of(name: str, node: str) -> list[int]:
    """The processes of a name that belong to a node."""
    known = [path for path in Path("/proc").iterdir() if path.name.isdigit()]
    found: list[int] = []
    for path in known:
        try:
            if (path / "comm").read_text().strip() == name and f"SLURMD_NODENAME={node}".encode() in (
                path / "environ"
            ).read_bytes():
                found.append(int(path.name))
        except OSError:
            continue
    return found


@pytest.mark.parametrize("event", ["program", "salloc", "node", "scancel", "time limit", "preemption"])
def test_end_of_an_allocation_is_an_error_of_calls(
    cluster: slurm.SlurmCluster, running: Callable[..., Any], event: str
) -> None:
    before = processes()
    process = running("wait", "2")
    line_of(process, "ready")
    names = {name: pid for pid, name in processes().items() if pid not in before}
    (job,) = cluster.tool("squeue", "-h", "-o", "%i").split()
    if event == "program":
        process.kill()
    elif event == "salloc":
        os.kill(names["salloc"], signal.SIGKILL)
    elif event == "node":
        for pid in pids_of("monarch-agent", "n2"):
            os.kill(pid, signal.SIGKILL)
    elif event == "scancel":
        cluster.tool("scancel", job)
    elif event == "time limit":
        cluster.tool("scontrol", "update", f"JobId={job}", f"EndTime={time.strftime('%Y-%m-%dT%H:%M:%S')}")
    else:
        cluster.tool("srun", "-N3", "-p", "high", "true")
    if event == "salloc":
        # The allocation still stands, and so do its hosts; the end of the program is the end of both.
        process.kill()
    out, err = process.communicate(timeout=90)
    if event not in ("program", "salloc"):
        assert out.splitlines()[0] == "SupervisionError True", err


def test_requests_that_slurm_refuses_say_why(
    cluster: slurm.SlurmCluster, host: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in cluster.env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SpawnError, match=r"salloc exited with code 1: .*invalid partition"):
        job = SlurmJob({"a": 1}, partition="gold")
        job.told_by(lambda line: None)
        job.state()
    with pytest.raises(ArgumentError, match="expected a number of hosts"):
        SlurmJob({"a": 0})
    with pytest.raises(ArgumentError, match="job_name"):
        make_launcher("slurm", 1, {"job_name": "a b"})
    assert wait_until(lambda: not cluster.jobs(), 10)


def test_hosts_of_the_own_allocation_are_used(cluster: slurm.SlurmCluster, tmp_path: Path, warm: None) -> None:
    path = tmp_path / "program.py"
    path.write_text(LIGHT + USE)
    env = {**os.environ, **cluster.env}
    command = ["salloc", "-N2", "--time=10", sys.executable, str(path), "use", "1"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=90)
    assert done.stdout.splitlines()[0] == "['n1', 'n1'] {'hosts': 1} True", done.stderr
    assert wait_until(lambda: not cluster.jobs(), 20)
