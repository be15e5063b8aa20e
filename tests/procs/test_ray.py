"""Hosts from Ray: a real cluster of two nodes on this machine, its queue, and the ends of hosts."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import rays
from leaks import processes, sweep_as_the_next_program, wait_until
from light import LIGHT
from monarch._procs.launch import ray as ray_launcher
from monarch.exceptions import ArgumentError, SpawnError
from monarch.job import RayJob, job_loads

needs_ray = pytest.mark.skipif(bool(rays.why_none()), reason=rays.why_none() or "none")

USE = """
import os, sys, time
from pathlib import Path
from monarch._node.current import current_node
from monarch.actor import Actor, current_rank, endpoint
from monarch.job import RayJob

class Worker(Actor):
    @endpoint
    def objects(self, data) -> tuple:
        import ray, ray.cloudpickle
        if not ray.is_initialized():
            ray.init(log_to_driver=False, logging_level="ERROR")
        own = ray.put(current_rank().rank)
        return sum(ray.get(ray.cloudpickle.loads(data))), ray.get(own), len(ray.nodes())

    @endpoint
    def agent(self) -> int:
        return os.getppid()

    @endpoint
    def wait(self) -> None:
        time.sleep(100)

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
    how, address, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
    tell = "queue" in how
    job = RayJob({"trainers": count}, address).told_by(lambda line: tell and print(line, flush=True))
    procs = job.state().trainers.spawn_procs({"gpus": 1}, name="far")
    actors = procs.spawn("actors", Worker)
    print(len({*actors.agent.call().get(60).values()}), secret_is_seen(current_node().hosts.keys.secret), flush=True)
    if how == "objects":
        import ray, ray.cloudpickle
        data = ray.cloudpickle.dumps(ray.put([1, 2, 3]))
        print(actors.objects.call(data).get(60).values())
    if how == "wait":
        call = actors.wait.call()
        print("ready", flush=True)
        try:
            call.get(60)
        except Exception as error:
            print(type(error).__name__, "lost with" in str(error), flush=True)
    job.kill()
    print(job.active)
"""
GROW = """
import os, time
from monarch.job import RayJob

if __name__ == "__main__":
    job = RayJob({"trainers": 3}, "auto", at_least=2).told_by(lambda line: print(line, flush=True))
    procs = job.state().trainers.spawn_procs({"gpus": 1}, name="far")
    print("has", procs.size(), flush=True)
    late = None
    while late is None:
        time.sleep(0.05)
        late = job.late_hosts()
    procs.resize(late, hosts=3)
    print("has", procs.size(), len({*procs.execute(os.getppid).values()}), flush=True)
    job.kill()
"""
GROUPS = """
import ray
ray.init(log_to_driver=False, logging_level="ERROR")
print({group["state"] for group in ray.util.placement_group_table().values()} - {"REMOVED"})
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[rays.RayCluster]:
    try:
        made = rays.start()
    except TimeoutError as error:
        pytest.skip(str(error))
    yield made
    made.close()


def begin(
    path: Path, *args: str, text: str = USE, cluster: rays.RayCluster | None = None, given: bool = False
) -> subprocess.Popen[str]:
    """Start a program; it finds its cluster by the environment unless that is given as an argument."""
    path = path / "program.py"
    path.write_text(LIGHT + text)
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    if cluster is not None:
        env |= cluster.auth if given else {"RAY_ADDRESS": cluster.address, **cluster.auth}
    return subprocess.Popen(
        [rays.python(), str(path), *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
    )


def finish(program: subprocess.Popen[str]) -> list[str]:
    out, err = program.communicate(timeout=150)
    assert program.returncode == 0, err
    return out.splitlines()


def nothing_left(cluster: rays.RayCluster, path: Path, before: dict[int, str]) -> None:
    assert wait_until(lambda: not cluster.agents(), 20), cluster.agents()
    assert wait_until(lambda: not processes().keys() - before.keys(), 15), processes().keys() - before.keys()
    # What is reserved is free again.
    assert finish(begin(path, text=GROUPS, cluster=cluster)) == ["set()"]


@needs_ray
@pytest.mark.slow
class TestCluster:
    @pytest.mark.timeout(400)
    def test_ranks_use_objects_of_the_cluster(self, cluster: rays.RayCluster, tmp_path: Path, warm: None) -> None:
        before = processes()
        lines = finish(begin(tmp_path, "objects", "auto", "2", cluster=cluster))
        # Two agents, on two nodes; the key of the program is in no command line and no environment.
        assert lines == ["2 False", "[(6, 0, 2), (6, 1, 2)]", "False"]
        nothing_left(cluster, tmp_path, before)

    @pytest.mark.timeout(400)
    def test_hosts_come_by_a_client_address(self, cluster: rays.RayCluster, tmp_path: Path, warm: None) -> None:
        before = processes()
        assert finish(begin(tmp_path, "client", cluster.client, "2", cluster=cluster, given=True)) == [
            "2 False",
            "False",
        ]
        nothing_left(cluster, tmp_path, before)

    @pytest.mark.timeout(400)
    @pytest.mark.parametrize("victim", ["program", "agent", "actor"])
    def test_nothing_is_left_after_a_kill(
        self, cluster: rays.RayCluster, tmp_path: Path, victim: str, warm: None
    ) -> None:
        before = processes()
        program = begin(tmp_path, "wait", "auto", "2", cluster=cluster)
        assert program.stdout is not None
        lines = [program.stdout.readline() for _ in range(2)]
        assert lines == ["2 False\n", "ready\n"], program.communicate()
        if victim == "program":
            program.kill()
        else:
            (agent, *_) = [
                pid for pid in cluster.agents() if Path(f"/proc/{pid}/comm").read_text() == "monarch-agent\n"
            ]
            parent = int(Path(f"/proc/{agent}/stat").read_text().rpartition(")")[2].split()[1])
            os.kill(agent if victim == "agent" else parent, signal.SIGKILL)
        out, err = program.communicate(timeout=60)
        if victim == "program":
            assert program.returncode == -9
        else:
            # Ray has its own line about it before.
            assert out.splitlines()[-2:] == ["SupervisionError True", "False"], err
        nothing_left(cluster, tmp_path, before)
        if victim == "program":
            sweep_as_the_next_program()

    @pytest.mark.timeout(400)
    def test_wait_for_nodes_is_told_and_cancelled(self, cluster: rays.RayCluster, tmp_path: Path, warm: None) -> None:
        before = processes()
        program = begin(tmp_path, "queue", "auto", "3", cluster=cluster)
        assert program.stdout is not None
        line = program.stdout.readline()
        assert "queued: Ray placement group (needs 3 nodes with CPU: 1 free; the cluster has 2 nodes)" in line
        program.send_signal(signal.SIGINT)
        _, err = program.communicate(timeout=60)
        assert "KeyboardInterrupt" in err
        nothing_left(cluster, tmp_path, before)

    @pytest.mark.timeout(400)
    def test_mesh_grows_onto_nodes_that_join_later(self, cluster: rays.RayCluster, tmp_path: Path, warm: None) -> None:
        """The last test of this cluster, which has three nodes then."""
        before = processes()
        program = begin(tmp_path, text=GROW, cluster=cluster)
        assert program.stdout is not None
        lines = iter(program.stdout.readline, "")
        assert next(line for line in lines if line.startswith("has")) == "has 2\n"
        cluster.add_node()
        assert any("joined 3 of 3" in line for line in lines)
        assert next(line for line in lines if line.startswith("has")) == "has 3 3\n"
        finish(program)
        nothing_left(cluster, tmp_path, before)


@needs_ray
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_local_cluster_is_started_where_there_is_none(tmp_path: Path, warm: None) -> None:
    before = processes()
    assert finish(begin(tmp_path, "local", "local", "1")) == ["1 False", "False"]
    program = begin(tmp_path, "local", "local", "2")
    _, err = program.communicate(timeout=120)
    assert "expected 1 host of a local Ray cluster, got 2" in err
    assert wait_until(lambda: not processes().keys() - before.keys(), 20), processes().keys() - before.keys()


@needs_ray
def test_address_without_a_cluster_is_named_in_time(tmp_path: Path) -> None:
    begun = time.monotonic()
    program = begin(tmp_path, "none", f"127.0.0.1:{rays.free_port()}", "2")
    _, err = program.communicate(timeout=60)
    assert "SpawnError: no Ray cluster answers at '127.0.0.1:" in err and "Connection refused" in err
    assert time.monotonic() - begun < 40


class SlowRay:
    """As much of Ray as a connection needs: a stand-in, since only the order of threads matters here."""

    class exceptions:
        RayError = OSError

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.go = threading.Event()

    def is_initialized(self) -> bool:
        return len(self.calls) % 2 == 1

    def init(self, **options: Any) -> None:
        assert self.go.wait(20)
        self.calls.append("init")

    def shutdown(self) -> None:
        assert ray_launcher._changed.acquire(timeout=10)
        ray_launcher._changed.release()
        self.calls.append("shutdown")


def test_launches_share_a_connection_opened_without_a_lock() -> None:
    ray, owns = SlowRay(), list[bool]()
    threads = [threading.Thread(target=lambda: owns.append(ray_launcher._connect(ray, "local", 1))) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert wait_until(lambda: ray_launcher._busy)
    # Nobody holds the lock while Ray connects.
    assert ray_launcher._changed.acquire(timeout=10)
    ray_launcher._changed.release()
    ray.go.set()
    for thread in threads:
        thread.join(20)
    assert owns == [True, True] and ray.calls == ["init"]
    ray_launcher._disconnect(ray, True)
    assert ray.calls == ["init"]
    ray_launcher._disconnect(ray, True)
    assert ray.calls == ["init", "shutdown"] and not ray_launcher._users and not ray_launcher._busy


@pytest.mark.skipif(find_spec("ray") is not None, reason="Ray is installed here")
def test_missing_ray_is_an_error_that_says_so(host: Any) -> None:
    with pytest.raises(SpawnError, match=r"Ray is not installed here; .*pip install ray"):
        RayJob({"trainers": 1}).state()


def test_arguments_of_ray_jobs_are_checked() -> None:
    job = RayJob({"a": 1, "b": 2}, "ray://head:10001", gpus_per_host=8, resources={"rack": 1})
    again = job_loads(job.dumps())
    assert isinstance(again, RayJob) and again.meshes == {"a": 1, "b": 2} and again.options == job.options
    for wrong in ({"cpus_per_host": -1}, {"gpus_per_host": -1}, {"resources": {"rack": -1}}):
        with pytest.raises(ArgumentError, match="expected at least 0"):
            RayJob({"a": 1}, **wrong)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="a resource"):
        RayJob({"a": 1}, cpus_per_host=0)
