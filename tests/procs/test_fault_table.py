"""Whatever set of processes is killed at once, nothing is left of the ranks: no process, file or shared memory."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from leaks import pids_named, processes, session_folders, wait_until, zygotes
from monarch._procs.os.posix import proc_start_time
from monarch._procs.session_folder import make_folder, remove_folder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(30)]

BOUND = 2.0
"""Seconds until nothing may be left."""


BYSTANDER = """
import os, signal, sys
from contextlib import suppress
from monarch.actor import Actor, endpoint, this_host
class A(Actor):
    @endpoint
    def pid(self):
        return os.getpid()
def start(count):
    return this_host().spawn_procs({"gpus": count}).spawn("a", A)
first = start(2)
pids = list(first.pid.call().get(30).values())
# These are being made when the others die.
second = start(4)
for pid in map(int, sys.argv[1:]):
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
made = list(second.pid.call().get(30).values())
print(list(first.pid.call().get(30).values()) == pids)
print(list(second.pid.call().get(30).values()) == made)
print(len(start(4).pid.call().get(30)), list(first.pid.call().get(30).values()) == pids)
"""
"""A session that shares the fork server, and kills what it is told to."""


class Family:
    """A program, its ranks, and their children."""

    def __init__(self) -> None:
        self.before, self.folders = processes(), session_folders()
        self.program = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / "family.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self.program.stdout is not None
        known = json.loads(self.program.stdout.readline())
        self.memory: list[str] = known["memory"]
        assert wait_until(lambda: zygotes(self.before) and self.named("monarch-spare"))
        self.pids: dict[str, list[int]] = {
            "controller": [self.program.pid],
            "agent": [known["agent"]],
            "zygote": zygotes(self.before),
            "rank": known["ranks"],
            "spare": self.named("monarch-spare"),
            "server": self.named("monarch-server", "monarch-image"),
        }
        self.children = {
            (pid, proc_start_time(pid)): kind for children in known["children"] for kind, pid in children.items()
        }
        assert len(self.children) == 18 and all(start for _, start in self.children)

    def named(self, *names: str) -> list[int]:
        """Pids of new processes of a name."""
        return pids_named(*names, before=self.before)

    def kill(self, *whats: str) -> None:
        """Kill all processes of each kind, as simultaneously as possible."""
        for what in whats:
            for pid in self.pids[what]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def living(self) -> list[str]:
        """Return the children of live ranks."""
        return [kind for (pid, start), kind in self.children.items() if proc_start_time(pid) == start]

    def shared(self) -> list[str]:
        """Return the shared memory of ranks; other programs of this user have some too."""
        return [name for name in self.memory if Path("/dev/shm", name).exists()]

    def left(self) -> list[str]:
        """Return leftovers since before the program, except the program itself and its files."""
        found = [f"{pid} {name}" for pid, name in processes().items() if pid not in {*self.before, self.program.pid}]
        if self.program.poll() is None:
            # It stays for the next start of the program.
            found = [what for what in found if not what.endswith((" monarch-server", " monarch-image"))]
        found += self.shared()
        if self.program.poll() is not None:
            found += [*(session_folders() - self.folders)]
        return [*self.living(), *found]

    def end(self) -> None:
        self.program.kill()
        self.program.communicate()
        # The next session cleans up what no process was left to end or remove.
        remove_folder(make_folder())
        wait_until(lambda: not self.left(), BOUND)
        for pid, start in self.children:
            if proc_start_time(pid) == start:
                os.kill(pid, signal.SIGKILL)
        for pid in set(processes()) - set(self.before):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def family() -> Iterator[Family]:
    made = Family()
    yield made
    made.end()


@pytest.mark.parametrize(
    "whats",
    [
        "controller",
        "agent",
        "agent zygote",
        "zygote agent",
        "agent controller",
        "controller agent",
        "zygote controller",
        "rank agent",
        "rank agent zygote",
        "rank controller",
        "controller agent zygote",
        "controller agent zygote spare",
        "rank controller agent zygote server",
        "server controller",
        "server agent",
    ],
)
def test_nothing_is_left_after_kills(family: Family, whats: str) -> None:
    family.kill(*whats.split())
    assert wait_until(lambda: not family.left(), BOUND), family.left()


@pytest.mark.timeout(90)
@pytest.mark.parametrize("whats", ["rank controller agent zygote spare", "controller server", "zygote agent server"])
def test_another_session_does_not_notice(family: Family, program: Callable[..., Any], whats: str) -> None:
    """A session of the same user runs on, and spawns ranks while the other one is killed and after that."""
    pids = [str(pid) for what in whats.split() for pid in family.pids[what]]
    done = program(BYSTANDER, *pids)
    assert done.code == 0, done.err
    assert done.out.splitlines() == ["True", "True", "4 True"], done.err
    assert wait_until(lambda: not family.left(), BOUND), family.left()


def test_children_of_ranks_end_with_them(family: Family) -> None:
    family.kill("rank")
    assert wait_until(lambda: not family.living(), BOUND), family.living()
    assert wait_until(lambda: not family.shared(), BOUND), family.shared()
    assert family.program.poll() is None


def test_children_of_ranks_end_when_their_mesh_is_stopped(family: Family) -> None:
    assert family.program.stdin is not None and family.program.stdout is not None
    family.program.stdin.write("stop\n")
    family.program.stdin.flush()
    assert family.program.stdout.readline() == "stopped\n"
    assert wait_until(lambda: not family.living(), BOUND), family.living()
    assert family.program.poll() is None


@pytest.mark.parametrize("whats", ["zygote", "server", "server zygote spare"])
def test_children_of_ranks_outlive_their_parents(family: Family, whats: str) -> None:
    """The session runs on, and ends them with its ranks."""
    family.kill(*whats.split())
    assert len(family.living()) == 18
    assert family.program.stdin is not None and family.program.stdout is not None
    family.program.stdin.write("stop\n")
    family.program.stdin.flush()
    assert family.program.stdout.readline() == "stopped\n"
    assert wait_until(lambda: not family.living(), BOUND), family.living()


def test_next_session_ends_leftover_processes(family: Family) -> None:
    """None of its processes is left; a process without a living rank is still known by its marker."""
    family.kill(*family.pids)
    family.program.wait()
    # A folder stays for as long as the fork server in it has not quite ended.
    assert wait_until(lambda: not any(proc_start_time(pid) for pids in family.pids.values() for pid in pids), BOUND)
    remove_folder(make_folder())
    assert wait_until(lambda: not family.left(), BOUND), family.left()


def test_session_leaves_children_of_living_ranks_alone(family: Family) -> None:
    remove_folder(make_folder())
    assert len(family.living()) == 18


def test_process_without_marker_is_left_alone(family: Family) -> None:
    """Like one that its user wants to outlive the rank."""
    (pid, start), *_ = [child for child, kind in family.children.items() if kind == "background, setsid"]
    _unlimit(pid)
    family.kill("rank")
    assert wait_until(lambda: len(family.living()) <= 1, BOUND)
    assert proc_start_time(pid) == start
    family.kill("controller")
    assert wait_until(lambda: not family.left(), BOUND), family.left()


def _unlimit(pid: int) -> None:
    resource.prlimit(pid, resource.RLIMIT_RTTIME, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
