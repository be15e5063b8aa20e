"""No survivors: whatever is killed at any moment, 2 s later no process, socket, folder or shared memory is left."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from leaks import processes, session_folders, shared_memory, wait_until, zygotes
from monarch._procs.os.posix import proc_start_time

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm")]

BOUND = 2.0
"""Seconds until nothing may be left, as promised."""

PROGRAM = """
import os, subprocess, sys, time
from monarch.actor import Actor, endpoint, this_host

class Worker(Actor):
    def __init__(self):
        self.children = []

    @endpoint
    def have_children(self):
        self.children.append(subprocess.Popen(["sleep", "1000"]))
        self.children.append(subprocess.Popen(["sleep", "1000"], process_group=0))
        subprocess.run(["sh", "-c", "sleep 1000 & exit"])

    @endpoint
    def echo(self, value):
        return value

    @endpoint
    def own(self, again):
        self.mesh = this_host().spawn_procs({"inner": 2}).spawn("inner", Worker)
        self.mesh.echo.call(1).get()
        self.mesh.have_children.call().get()
        return [dict(point) for point, _ in self.mesh.echo.call(1).get()]

if __name__ == "__main__":
    print("begins", flush=True)
    mode = sys.argv[1]
    procs = this_host().spawn_procs({"gpus": 4})
    if mode == "spawning":
        while True:
            procs = [this_host().spawn_procs({"gpus": 4}) for _ in range(3)]
            for each in procs:
                each.spawn("w", Worker).echo.call(bytes(300_000))
            procs[0].initialized.get()
            for each in procs[1:]:
                each.stop()
    w = procs.spawn("w", Worker)
    w.echo.call(bytes(300_000)).get()
    if mode == "children":
        w.have_children.call().get()
        w.slice(gpus=0).own.call_one(1).get()
    print("ready", flush=True)
    if mode == "is replaced":
        os.execv("/bin/sleep", ["sleep", "1000"])
    try:
        while mode != "ends":
            w.echo.call(bytes(300_000)).get()
    except Exception as error:
        print(type(error).__name__, flush=True)
        time.sleep(1000)
"""


class Run:
    """A separate program, with all that it starts."""

    def __init__(self, path: Path, mode: str, wait_for: str = "ready") -> None:
        self.before = processes()
        self.folders, self.memory = session_folders(), shared_memory()
        self.process = subprocess.Popen(
            [sys.executable, str(path), mode], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self.process.stdout is not None
        for word in ("begins", "ready"):
            assert self.process.stdout.readline() == f"{word}\n"
            if word == wait_for:
                break

    def ours(self) -> dict[int, str]:
        return {pid: name for pid, name in processes().items() if pid not in self.before}

    def of_session(self) -> list[str]:
        """Return processes except the program itself, and its fork server."""
        # It has one of its own if the shared one does not answer in time, as on a busy machine.
        server = ("monarch-server", "monarch-warming", "monarch-image")
        return [name for pid, name in self.ours().items() if pid != self.process.pid and name not in server]

    def files(self) -> set[str]:
        return session_folders() - self.folders

    def find(self, what: str) -> list[int]:
        """Return the pids of a kind of its processes, as far as there are some."""
        ours = self.ours()
        if what == "controller":
            return [self.process.pid]
        if what == "agent":
            return [pid for pid, name in ours.items() if name == "monarch-agent"]
        if what == "zygote":
            return zygotes(self.before)
        if what == "rank":
            return [pid for pid, name in ours.items() if re.fullmatch(r"procs\[\d+\]", name)]
        return [pid for pid, name in ours.items() if name == what]

    def kill(self, *whats: str) -> list[int]:
        """Kill one of each kind, as simultaneously as possible."""
        pids = [pid for what in whats for pid in self.find(what)[:1]]
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        return pids

    def left(self) -> list[str]:
        """Return leftovers since before the program."""
        found = [f"{pid} {name}" for pid, name in self.ours().items() if pid != self.process.pid]
        found += [*self.files()]
        # Other programs on this machine have shared memory too, with names that are not ours.
        found += [name for name in shared_memory() - self.memory if "monarch" in name]
        return found

    def nothing_left(self) -> None:
        """After the bound."""
        assert wait_until(lambda: self.process.poll() is not None, 5)
        assert wait_until(lambda: not self.left(), BOUND), self.left()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        for pid in self.ours():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    runs: list[Run] = []

    def begin(mode: str, wait_for: str = "ready") -> Run:
        runs.append(Run(path, mode, wait_for))
        return runs[-1]

    yield begin
    for run in runs:
        run.end()


@pytest.mark.parametrize("what", ["controller", "controller agent", "agent controller", "zygote controller"])
def test_death_of_controller_leaves_nothing(start: Callable[..., Run], what: str) -> None:
    run = start("calls")
    assert len(run.kill(*what.split())) == len(what.split())
    run.nothing_left()


def test_program_that_another_replaces_leaves_nothing(start: Callable[..., Run]) -> None:
    run = start("is replaced")
    assert wait_until(lambda: not (run.of_session() or run.files())), (run.of_session(), run.files())
    assert run.process.poll() is None


def test_death_of_agent_leaves_nothing_of_its_ranks(start: Callable[..., Run]) -> None:
    """The program lives on and is notified; its ranks and their sockets are gone."""
    run = start("calls")
    run.kill("agent")
    assert run.process.stdout is not None
    assert run.process.stdout.readline() == "SupervisionError\n"
    assert wait_until(lambda: not run.of_session(), BOUND), run.ours()
    # Only the controller's own socket is left in its folder.
    files = f"monarch-{os.getuid()}/s*/*"
    assert wait_until(lambda: len([name for name in run.files() if fnmatch(name, files)]) == 1, BOUND), run.files()
    run.kill("controller")
    run.nothing_left()


@pytest.mark.parametrize("what", ["zygote", "rank"])
def test_death_of_zygote_or_rank_leaves_nothing(start: Callable[..., Run], what: str) -> None:
    run = start("calls")
    ranks = run.find("rank")
    assert len(ranks) == 4
    files = session_folders()
    (pid,) = run.kill(what)
    # Its spare has the number of its session.
    assert wait_until(lambda: proc_start_time(pid) is None, BOUND)
    if what == "rank":
        assert run.process.stdout is not None
        assert run.process.stdout.readline() == "SupervisionError\n"
        assert wait_until(lambda: len(session_folders()) == len(files) - 1, BOUND)
        assert len(run.find("rank")) == 3
    else:
        assert run.find("rank") == ranks
    run.kill("controller")
    run.nothing_left()


@pytest.mark.parametrize("what", ["controller", "agent", "controller agent", "rank"])
def test_descendants_of_ranks_end_with_them(start: Callable[..., Run], what: str) -> None:
    """Subprocesses, also in their own groups, orphans, and the ranks spawned by a rank with theirs."""
    run = start("children")
    assert wait_until(lambda: len(run.find("sleep")) == 18)
    assert len(run.find("rank")) == 6
    if what == "rank":
        for pid in run.find("rank"):
            # Ranks spawned by a rank may have ended with it by now.
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert wait_until(lambda: not run.find("sleep"), BOUND), run.ours()
        run.kill("controller")
    else:
        run.kill(*what.split())
        assert wait_until(lambda: not run.of_session(), BOUND), run.ours()
        run.kill("controller")
    run.nothing_left()


def at_random(start: Callable[..., Run], seed: int, mode: str, longest: float) -> list[str]:
    """Return what is left of a program after a kill at a random moment."""
    chance = random.Random(seed)
    run = start(mode, "begins")
    time.sleep(chance.random() * longest)
    whats = chance.choice(["controller", "agent", "zygote", "controller agent", "agent controller", "rank"]).split()
    run.kill(*whats)
    if "controller" not in whats:
        time.sleep(chance.random() * 0.2)
        run.kill("controller")
    try:
        run.nothing_left()
    except AssertionError as error:
        # With the agent dead and no zygote yet, the next session sweeps the folder.
        if any(" " in what for what in run.left()):
            raise AssertionError(f"seed {seed}, {whats}: {error}") from error
        from monarch._procs.session_folder import make_folder, remove_folder

        remove_folder(make_folder())
    left = run.left()
    run.end()
    return [f"seed {seed}, {whats}: {what}" for what in left]


@pytest.mark.usefixtures("cold")
@pytest.mark.parametrize("seed", range(8))
def test_kill_during_start_leaves_nothing(start: Callable[..., Run], seed: int) -> None:
    assert not at_random(start, seed, "calls", 0.3)


@pytest.mark.parametrize("seed", range(100, 106))
def test_kill_during_spawn_leaves_nothing(start: Callable[..., Run], seed: int) -> None:
    assert not at_random(start, seed, "spawning", 2.0)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_kills_at_many_moments_leave_nothing(start: Callable[..., Run]) -> None:
    for seed in range(200, 208):
        assert not at_random(start, seed, "calls", 0.4)
    for seed in range(300, 304):
        assert not at_random(start, seed, "spawning", 2.5)


FAREWELL = """
import os, signal, sys
from pathlib import Path
from typing import Any
from monarch._procs.os import posix
from monarch._procs.zygote import main

os.setsid()
folder = Path(sys.argv[1])
pids = {}
for title in ("monarch-spare", "rank"):
    reader, writer = os.pipe()
    pids[title] = os.fork()
    if not pids[title]:
        posix.set_comm(title)
        os.write(writer, b".")
        signal.pause()
    os.read(reader, 1)

def lives(title):
    return posix.proc_start_time(pids[title]) is not None

def remove(name):
    print("removes the folder", lives("monarch-spare"), lives("rank"))

main.remove_folder = remove
main._farewell(main.Setup(1 << 22, (0, 0), str(folder), [], {}))
print("ends", lives("monarch-spare"))
"""


def test_zygote_cleans_up_before_it_ends_its_spare(program: Callable[..., Any], tmp_path: Path) -> None:
    """Both clean up after a dead agent, and might kill one another before one has removed the session's folder."""
    folder = tmp_path / "base" / "session"
    folder.mkdir(parents=True)
    assert program(FAREWELL, str(folder)).ok() == "removes the folder True False\nends False\n"


ADOPTING = """
import os, subprocess, sys, time
from monarch._procs.os import posix
from monarch._procs.os.orphans import children

def name(pid):
    try:
        return open(f"/proc/{pid}/comm").read().strip()
    except OSError:
        return ""

def lines(pid):
    return [name(pid)] + [each for child in children(pid) for each in lines(child)]

posix.set_child_subreaper()
program = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE)
assert program.stdout.readline()
# The successor of the server's zygote imports at that time.
until = time.monotonic() + 20
while "monarch-warming" not in lines(os.getpid()) and time.monotonic() < until:
    time.sleep(0.01)
program.kill()
assert time.monotonic() < until, "the server had no successor"
ended = []
while True:
    try:
        # Ended, and not reaped yet: it still has its name.
        pid = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT).si_pid
    except ChildProcessError:
        break
    ended.append("program" if pid == program.pid else name(pid))
    os.waitpid(pid, 0)
print(sorted(ended))
"""

WARMING = """
import time
from monarch.actor import this_host

procs = this_host().spawn_procs({"gpus": 2})
procs.initialized.get()
print("ready", flush=True)
time.sleep(1000)
"""


def test_killed_program_leaves_one_process_to_init(cold: None) -> None:
    """The init process of a container may never reap anything: only the last process to end may come to it."""
    del cold
    ended = subprocess.run(
        [sys.executable, "-c", ADOPTING, WARMING], stdout=subprocess.PIPE, text=True, timeout=60, check=True
    )
    assert ended.stdout == "['monarch-server', 'program']\n"
