"""Hosts that are cut off or silent: within the lease their calls fail and their ranks end."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from leaks import processes, wait_until
from light import LIGHT
from namespaces import why_none

pytestmark = pytest.mark.slow


NAMESPACES = r"""
import os, subprocess, sys, time
from monarch.actor import Actor, endpoint, shutdown_context
from monarch._session.workers import WorkerHosts
from monarch.exceptions import SupervisionError
import monarch._node.current as process

def sh(*command):
    subprocess.run(command, check=True)

class Worker(Actor):
    @endpoint
    def pid(self):
        return os.getpid()
    @endpoint
    def nap(self, seconds):
        time.sleep(seconds)
        return "slept"
    @endpoint
    def echo(self, x):
        return x
    @endpoint
    def ask(self, other, x):
        return list(other.echo.call(x).get(timeout=30).values())

if __name__ == "__main__":
    sh("ip", "link", "set", "lo", "up")
    sh("ip", "link", "add", "br0", "type", "bridge")
    sh("ip", "addr", "add", "10.77.0.1/24", "dev", "br0")
    sh("ip", "link", "set", "br0", "up")
    holders = []
    for index in range(2):
        holder = subprocess.Popen(["unshare", "-n", "sleep", "1000"])
        holders.append(holder)
        while os.readlink(f"/proc/{holder.pid}/ns/net") == os.readlink("/proc/self/ns/net"):
            time.sleep(0.01)
        inside = ["nsenter", "-t", str(holder.pid), "-n"]
        sh("ip", "link", "add", f"v{index}", "type", "veth", "peer", "name", f"w{index}")
        sh("ip", "link", "set", f"v{index}", "master", "br0")
        sh("ip", "link", "set", f"v{index}", "up")
        sh("ip", "link", "set", f"w{index}", "netns", str(holder.pid))
        sh(*inside, "ip", "addr", "add", f"10.77.0.{index + 2}/24", "dev", f"w{index}")
        sh(*inside, "ip", "link", "set", f"w{index}", "up")
        sh(*inside, "ip", "link", "set", "lo", "up")
    hosts = WorkerHosts(
        2,
        addresses=["10.77.0.2", "10.77.0.3"],
        prefixes=[["nsenter", "-t", str(holder.pid), "-n"] for holder in holders],
        controller="10.77.0.1",
        silence=2.0,
    )
    a = hosts.mesh.spawn_procs({"gpus": 2}).spawn("a", Worker)
    print(list(a.echo.call(1).get(timeout=60).values()), flush=True)
    print(list(a.slice(hosts=0).ask.call(a.slice(hosts=1), 2).get(timeout=60).values()), flush=True)
    pids = list(a.slice(hosts=1).pid.call().get(timeout=30).values())
    pids.append(hosts.agents[1].pid)
    future = a.slice(hosts=1).nap.call(1000)
    kept = a.slice(hosts=0).nap.call(1)
    lease = process.current_node().hosts.lease
    start = time.monotonic()
    sh("ip", "link", "set", "v1", "down")
    try:
        future.get(timeout=60)
    except SupervisionError as error:
        print("lost with" in str(error), time.monotonic() - start < lease + 2, flush=True)
    print(list(kept.get(timeout=30).values()), flush=True)
    def ended(pid):
        try:
            return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] in "ZX"
        except OSError:
            return True
    while not all(ended(pid) for pid in pids) and time.monotonic() - start < 30:
        time.sleep(0.02)
    print(all(ended(pid) for pid in pids), time.monotonic() - start < lease + 3, flush=True)
    print(list(a.slice(hosts=0).echo.call(4).get(timeout=30).values()), flush=True)
    hosts.mesh.shutdown().get(timeout=30)
    shutdown_context().get(timeout=30)
    for holder in holders:
        holder.kill()
        holder.wait()
"""


@pytest.mark.slow
def test_cut_off_host_fails_calls_and_ends_its_ranks(tmp_path: Path) -> None:
    """In its own network namespace: within the lease its calls fail, and it ends its ranks itself."""
    reason = why_none()
    if reason:
        pytest.skip(reason)
    path = tmp_path / "program.py"
    path.write_text(LIGHT + NAMESPACES)
    before = processes()
    done = subprocess.run(
        ["unshare", "-Urn", sys.executable, str(path)], capture_output=True, text=True, timeout=100, cwd=tmp_path
    )
    assert done.stdout.splitlines() == [
        "[1, 1, 1, 1]",
        "[[2, 2], [2, 2]]",
        "True True",
        "['slept', 'slept']",
        "True True",
        "[4, 4]",
    ], done.stderr
    assert done.returncode == 0
    # Unresponsive ranks may be reported before their host counts as lost.
    assert not [line for line in done.stderr.splitlines() if "has not answered" not in line], done.stderr
    assert wait_until(lambda: not processes().keys() - before.keys(), 5)


SILENT = """
import os, signal, time
from monarch.actor import Actor, endpoint
from monarch.exceptions import ArgumentError, SupervisionError
from monarch.testing import local_hosts

class A(Actor):
    @endpoint
    def agent(self):
        return os.getppid()

if __name__ == "__main__":
    for wrong in (0, -1, float("nan")):
        try:
            with local_hosts(1, silence=wrong):
                pass
        except ArgumentError as error:
            print(str(error).split(",")[0])
    with local_hosts(2, silence=1.0) as hosts:
        actors = hosts.spawn_procs().spawn("actors", A)
        agent = list(actors.agent.call().get().values())[1]
        os.kill(agent, signal.SIGSTOP)
        begun = time.monotonic()
        try:
            actors.agent.call().get(20)
        except SupervisionError as error:
            # The usual bound would be five seconds.
            print("lost with" in str(error), 0.5 < time.monotonic() - begun < 4.5)
        os.kill(agent, signal.SIGCONT)
"""


@pytest.mark.slow
def test_silent_host_is_lost_after_lease(program: Callable[..., Any]) -> None:
    said = "silence: expected a number of seconds from 0.1 to 3600"
    assert program(SILENT, timeout=60).ok().splitlines() == [said, said, said, "True True"]


PARTED = """
import os, subprocess, sys, time
from contextlib import closing
from chaos.training_places import Namespaces, _run
from monarch._node.current import current_node
from monarch._session.session import need_session
from monarch.actor import Actor, current_rank, endpoint, heal_mesh, shutdown_context
from monarch.exceptions import DeviceMeshError

class A(Actor):
    @endpoint
    def who(self):
        return current_rank().rank
    @endpoint
    def ask(self, other):
        return list(other.who.call().get(30).values())

if __name__ == "__main__":
    with closing(Namespaces(silence=2.0)) as place:
        hosts = place.make()
        procs = hosts.mesh.spawn_procs({"gpus": 2})
        actors, others = procs.spawn("actors", A), procs.spawn("others", A)
        print(list(actors.ask.call(others).get(60).values()), flush=True)
        way = ["10.77.0.3", "dev", "w0"]
        _run(*place._inside[0], "ip", "neigh", "replace", *way, "lladdr", "02:00:00:00:00:99", "nud", "permanent")
        begun, lost = time.monotonic(), None
        while lost is None and time.monotonic() - begun < 60:
            try:
                # The program reaches all of them, until one host is given up.
                actors.who.call().get(30)
                time.sleep(0.05)
            except DeviceMeshError as error:
                lost = error
        print(len(lost.ranks), "dropped with" in str(lost), flush=True)
        _run(*place._inside[0], "ip", "neigh", "del", *way)
        more = place.make()
        heal_mesh(actors, hosts=more.mesh)
        print(list(actors.ask.call(others).get(60).values()), flush=True)
        for each in (hosts, more):
            each.mesh.shutdown().get(30)
    shutdown_context().get(30)
"""


@pytest.mark.slow
def test_one_of_two_parted_hosts_is_dropped(tmp_path: Path) -> None:
    """One of them is dropped, so that all agree, and the mesh can be healed."""
    reason = why_none()
    if reason:
        pytest.skip(reason)
    path = tmp_path / "program.py"
    path.write_text(LIGHT + PARTED)
    before = processes()
    done = subprocess.run(
        ["unshare", "-Urn", sys.executable, str(path)],
        capture_output=True,
        text=True,
        timeout=150,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parent.parent)},
    )
    everybody = str([[0, 1, 2, 3]] * 4)
    assert done.stdout.splitlines() == [everybody, "2 True", everybody], done.stderr
    assert done.returncode == 0
    assert wait_until(lambda: not processes().keys() - before.keys(), 5)


LEFT = """
import threading, time
from monarch._procs.os.blocked import ran_on_cpu
from monarch.actor import Actor, endpoint, this_host
from monarch.testing import local_hosts

class A(Actor):
    @endpoint
    def f(self):
        return 1

if __name__ == "__main__":
    kept = this_host().spawn_procs().spawn("kept", A)
    with local_hosts(2) as hosts:
        hosts.spawn_procs().spawn("actors", A).f.call().get()
    watcher = next(each for each in threading.enumerate() if each.name == "monarch-hosts")
    before, begun = ran_on_cpu(watcher.ident), time.monotonic()
    while time.monotonic() < begun + 1:
        kept.f.call().get()
        time.sleep(0.05)
    print(ran_on_cpu(watcher.ident) - before < 0.1)
"""


def test_program_rests_after_its_hosts_have_left(program: Callable[..., Any]) -> None:
    """The thread that watches connections to hosts waits if there is none."""
    assert program(LEFT).ok() == "True\n"
