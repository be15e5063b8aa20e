"""Launchers by name, plug-ins among them; names of hosts; and the wait for hosts."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from socket import gethostname
from typing import Any

import pytest

import sshd
from leaks import Kit
from light import LIGHT
from monarch._node.current import current_node
from monarch._procs.agent.request import AgentConfig
from monarch._procs.launch.hostnames import HostEntry, expand_names, read_hostfile
from monarch._procs.launch.interface import Environment, Queued
from monarch._procs.launch.payload import BOOT, LaunchOrder
from monarch._procs.launch.registry import launcher_names, make_launcher
from monarch._procs.launch.reports import problem
from monarch._procs.launch.ssh import SSHLauncher
from monarch._session.launching.launching import launch_hosts
from monarch._session.launching.waiting import describe_news
from monarch._wire.keys import KeyPair
from monarch.exceptions import ArgumentError, SpawnError


@pytest.mark.parametrize(
    "text, names",
    [
        ("a", ["a"]),
        ("a, b", ["a", "b"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[08-10,12].x,me@b", ["n08.x", "n09.x", "n10.x", "n12.x", "me@b"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("ssh://me@[::1]:2222", ["ssh://me@[::1]:2222"]),
        ("", []),
    ],
)
def test_lists_of_host_names_are_expanded(text: str, names: list[str]) -> None:
    assert expand_names(text) == names


@pytest.mark.parametrize("text", ["n[1", "n[a-b]", "n[3-1]", "n[]", "n[1-99999999]"])
def test_unreadable_lists_of_host_names_are_errors(text: str) -> None:
    with pytest.raises(ArgumentError):
        expand_names(text)


def test_host_files_name_hosts_and_their_python(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# the cluster\nn[1-2] slots=8 # two\n\nn3 python=/opt/py\n")
    assert read_hostfile(str(path)) == [HostEntry("n1"), HostEntry("n2"), HostEntry("n3", "/opt/py")]
    path.write_text("# none\n")
    with pytest.raises(ArgumentError, match="lists no hosts"):
        read_hostfile(str(path))


def test_launchers_are_made_by_name() -> None:
    assert {"process", "ssh"} <= {*launcher_names()}
    launcher = make_launcher("ssh:n[1-4]", 2, {"reverse": True})
    assert isinstance(launcher, SSHLauncher) and launcher.reverse
    assert [each.name for each in launcher.hosts] == ["n1", "n2"]
    with pytest.raises(ArgumentError, match=r"unknown launcher 'abacus'; expected one of .*ssh"):
        make_launcher("abacus:3")
    with pytest.raises(ArgumentError, match=r"launcher 'ssh' has no option 'colour'"):
        make_launcher("ssh:n1", 0, {"colour": "red"})


PLUGIN = """
import sys
from monarch._procs.launch.process import ProcessLauncher
from monarch._procs.launch.payload import BOOT, LaunchOrder
from monarch._procs.launch.registry import launcher_names, make_launcher
from monarch._session.launching.launching import launch_hosts

def make(where, count, options):
    return ProcessLauncher(count=int(where) * options["times"])

if __name__ == "__main__":
    assert "abacus" in launcher_names()
    hosts = launch_hosts(make_launcher("abacus:1", 0, {"times": 2})).mesh
    print(hosts.sizes, hosts.spawn_procs({"gpus": 1}).initialized.get(60))
    hosts.shutdown().get(30)
"""


def test_plugins_are_launchers(program: Callable[..., Any], tmp_path: Path) -> None:
    metadata = tmp_path / "abacus-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: abacus\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[monarch.launchers]\nabacus = program:make\n")
    assert program(PLUGIN, PYTHONPATH=str(tmp_path)).ok() == "{'hosts': 2} True\n"


def test_simulated_hosts_come_from_a_launcher(host: Any, light: None, leaks: Kit) -> None:
    launched = launch_hosts(make_launcher("process:2"), parts={"a": 1, "b": 1})
    assert [mesh.sizes for mesh in launched.meshes.values()] == [{"hosts": 1}] * 2
    for mesh in launched.meshes.values():
        mesh.shutdown().get(30)
    with pytest.raises(ArgumentError, match="at least 1"):
        launch_hosts(make_launcher("process"))
    with pytest.raises(ArgumentError, match="at_least: works with one mesh only, got 2 meshes"):
        launch_hosts(make_launcher("process:2"), parts={"a": 1, "b": 1}, at_least=1)
    with pytest.raises(SpawnError, match=r"a host agent at 192\.0\.2\.1 cannot listen"):
        from monarch._session.workers import WorkerHosts

        WorkerHosts(2, addresses=["127.0.0.1", "192.0.2.1"])
    # This program listens for hosts from now on.
    leaks.rebase()


@pytest.mark.parametrize(
    "where, count, options, problem",
    [
        ("process:2", 3, {}, "'process:2' asks for 2 hosts, but 3 are requested; write 'process:3'"),
        ("process:3", 2, {}, "'process:3' asks for 3 hosts, but 2 are requested"),
        (
            "process:2",
            0,
            {"at_least": 5},
            "but only 2 requested; request 5 or more, or lower the minimum to 2",
        ),
        ("process", 2, {"at_least": 3}, "at least 3 hosts are needed to start, but only 2 requested"),
        (
            "process:2",
            0,
            {"spare": 2},
            "2 spare hosts of 2 would leave none for ranks; keep at most 1 spare",
        ),
        ("process:3", 0, {"spare": 2, "at_least": 2}, "2 spare hosts of at least 2 would leave none for ranks"),
        ("ssh:n1,n2", 3, {}, "ssh: 3 hosts are requested, but only 2 named; name 3, or request 2 at most"),
        ("ssh:n1,n2", 0, {"at_least": 3}, "at least 3 hosts are needed to start, but only 2 requested"),
    ],
)
def test_numbers_of_hosts_that_disagree_are_errors(
    host: Any, light: None, leaks: Kit, where: str, count: int, options: dict[str, Any], problem: str
) -> None:
    if where.startswith("ssh") and sshd.why_none():
        pytest.skip(sshd.why_none())
    with pytest.raises(ArgumentError) as raised:
        launch_hosts(make_launcher(where, count), count, **options)
    assert problem in str(raised.value)


def test_simulated_hosts_have_the_name_of_this_machine(host: Any, light: None, leaks: Kit) -> None:
    launched = launch_hosts(make_launcher("process:2"))
    more = launch_hosts(make_launcher("process:1"))
    names = [*launched.names, *more.names]
    assert len({*names}) == 3 and all(re.fullmatch(rf"{re.escape(gethostname())} \(\d+\)", name) for name in names)
    known = [current_node().hosts.name_of(id) for id in [*launched.ids, *more.ids]]
    assert known == names
    for each in (launched, more):
        each.mesh.shutdown().get(30)
    leaks.rebase()


def test_light_hosts_import_no_torch() -> None:
    """Tests of hosts would take twice as long."""
    text = "import importlib, sys\nfor name in _client.PRELOAD + _client.LATER: importlib.import_module(name)\n"
    command = [sys.executable, "-c", f"{LIGHT}{text}print('torch' in sys.modules)"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "False\n"


def test_agent_of_a_launcher_ends_if_no_program_connects(leaks: Kit) -> None:
    agent = AgentConfig("", "", "", 0, 0, [], owner_public=KeyPair.new().public.decode(), unclaimed=1.0)
    process = subprocess.Popen([sys.executable, "-u", "-c", BOOT], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(LaunchOrder(agent, "127.0.0.1", 0, {}).encode())
    process.stdin.flush()
    # Its standard input stays open, as that of a pod does.
    assert process.wait(60) == 0
    assert b'"listening"' in process.stdout.read()
    process.stdin.close()
    process.stdout.close()


def test_steps_of_the_wait_are_sentences() -> None:
    assert describe_news(Queued("job 7", "Priority", 3)) == ["queued: job 7, 3 pending ahead of it (Priority)"]
    assert describe_news(Queued("pod monarch-ab-0", "pending")) == ["queued: pod monarch-ab-0 (pending)"]
    assert "expected start" in describe_news(Queued("job 7", start=1e9))[0]
    about = describe_news(Environment("n1", "3.11.7", "2.1", "/py", ("torch is 2.1, this program has 2.2",)))
    assert about == ["environment of n1: Python 3.11.7, torch 2.1"]


def test_another_minor_version_of_python_is_refused() -> None:
    reason = problem({"python": "3.4.1", "executable": "/py", "missing": []})
    assert reason is not None and "its Python is 3.4.1 (/py)" in reason[0] and "python=PATH" in reason[1]
