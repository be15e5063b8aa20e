"""Exhausted or lost resources: memory, disk, socket files, hosts. Each ends in time, with an error that names it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from light import LIGHT
from monarch._procs.os.oom import OomWatch
from monarch._procs.session_folder import restore_folder
from monarch._wire.tcp import LEASE_S
from workers import Workers

pytestmark = pytest.mark.slow

START = """
import os, resource, shutil, signal, subprocess, sys, tempfile, time
from contextlib import suppress
from monarch.actor import Actor, attach_to_workers, endpoint, heal_mesh, shutdown_context, this_host
from monarch._meshes.procs import starting
from monarch._node.current import current_node
from monarch._session.session import need_session
from monarch.exceptions import *
class A(Actor):
    @endpoint
    def pid(self):
        return os.getpid()
    @endpoint
    def ask(self, other):
        return other.pid.call_one().get(timeout=20)
    @endpoint
    def limit(self, what, size):
        resource.setrlimit(what, (size, resource.getrlimit(what)[1]))
    @endpoint
    def take(self, size):
        return len(bytearray(size))
def own_base():
    # Other sessions would restore their sockets if it were theirs.
    global home
    home = tempfile.TemporaryDirectory(prefix="m")
    os.environ["XDG_RUNTIME_DIR"] = home.name
def start(count, **options):
    procs = this_host().spawn_procs({"gpus": count}, **options)
    return procs.spawn("a", A)
def use(count):
    procs = this_host().spawn_procs({"gpus": count})
    try:
        return len(procs.spawn("a", A).pid.call().get(timeout=30))
    finally:
        procs.stop().get(30)
def dies(actors):
    # It is not known at once that a process was killed.
    try:
        while True:
            actors.pid.call().get(30)
    except SupervisionError as error:
        return str(error)
"""


# Files that somebody removes

REMOVED = (
    START
    + """
if sys.argv[1] == "base":
    own_base()
actors = start(3)
pids = list(actors.pid.call().get(30).values())
folder = current_node().folder
def remove():
    if sys.argv[1] == "files":
        for name in os.listdir(folder):
            os.unlink(os.path.join(folder, name))
    else:
        shutil.rmtree(folder if sys.argv[1] == "folder" else os.path.dirname(folder))
remove()
print(list(actors.pid.call().get(30).values()) == pids)
print(actors.slice(gpus=0).ask.call_one(actors.slice(gpus=1)).get(30) == pids[1])
remove()
print(use(2))
os.kill(pids[0], 9)
dies(actors)
remove()
heal_mesh(actors, timeout=30)
print(list(actors.pid.call().get(30).values())[1:] == pids[1:])
"""
)


@pytest.mark.parametrize("what", ["files", "folder", "base"])
def test_removed_sockets_are_restored(program: Callable[..., Any], what: str) -> None:
    assert program(REMOVED, what).ok().splitlines() == ["True", "True", "2", "True"]


TAKEN = (
    START
    + """
own_base()
actors = start(1)
actors.pid.call().get(30)
base = os.path.dirname(current_node().folder)
os.rename(base, base + "-away")
os.symlink("/tmp", base)
try:
    use(1)
except DeviceMeshError as error:
    print("is not a folder owned by this user" in str(error), base in str(error))
os.unlink(base)
os.rename(base + "-away", base)
print(use(1))
"""
)


def test_foreign_session_folder_is_not_used(program: Callable[..., Any]) -> None:
    """A folder put in the place of the session's could answer for its ranks."""
    assert program(LIGHT + TAKEN).ok().splitlines() == ["True True", "1"]


@pytest.mark.parametrize("what", ["file", "link"])
def test_only_own_folder_is_restored(tmp_path: Path, what: str) -> None:
    base = tmp_path / "base"
    folder = str(base / "s1")
    restore_folder(folder)
    assert os.stat(folder).st_mode & 0o777 == os.stat(base).st_mode & 0o777 == 0o700
    os.rmdir(folder)
    if what == "file":
        Path(folder).touch()
    else:
        os.symlink(tmp_path, folder)
    with pytest.raises(PermissionError, match="is not a folder owned by this user"):
        restore_folder(folder)


def test_session_folder_is_locked_against_cleaners(program: Callable[..., Any]) -> None:
    """systemd-tmpfiles leaves alone folders that it cannot lock."""
    text = START + "use(1)\nprint(subprocess.run(['flock', '-nx', current_node().folder, 'true']).returncode)\n"
    assert program(text).ok() == "1\n"


# Processes that never get ready

STUCK = (
    START
    + """
use(1)
agent = need_session(current_node()).agent_pid
(zygote,) = [
    int(pid)
    for pid in open(f"/proc/{agent}/task/{agent}/children").read().split()
    if open(f"/proc/{pid}/comm").read() == "monarch-zygote\\n"
]
os.kill(zygote, signal.SIGSTOP)
# What MONARCH_READY_SECONDS sets; the first zygote of a loaded machine may take longer than this.
starting.READY_SECONDS = 2.0
actors = start(2)
begun = time.monotonic()
try:
    actors.pid.call().get(0.1)
except CallTimeoutError as error:
    print("all 2 ranks not started yet" in str(error))
try:
    actors.pid.call().get(30)
except SpawnError as error:
    print("not ready within 2 s" in str(error), time.monotonic() - begun < 20)
os.kill(zygote, signal.SIGCONT)
starting.READY_SECONDS = 300.0
print(use(2))
"""
)


def test_rank_that_is_never_ready_is_killed(program: Callable[..., Any]) -> None:
    done = program(STUCK)
    assert done.ok().splitlines() == ["True", "True True", "2"], done.err


# A host agent that is told to end

TERMINATED = (
    START
    + """
actors = start(2)
actors.pid.call().get(30)
os.kill(need_session(current_node()).agent_pid, signal.SIGTERM)
print("lost with the host agent, which exited with code" in dies(actors), use(2))
"""
)


def test_terminated_agent_is_an_error_and_not_a_hang(program: Callable[..., Any]) -> None:
    """It removes the session's folder, which the program then looks through."""
    done = program(TERMINATED)
    assert done.ok() == "True 2\n", done.err
    assert "Traceback" not in done.err


# Hosts that are lost

LOST = (
    START
    + """
key, how, *addresses = sys.argv[1:]
hosts = attach_to_workers(ca=key, workers=addresses, silence=1.0)
procs = hosts.spawn_procs()
actors, local = procs.spawn("a", A), start(1)
pids = list(actors.pid.call().get(60).values())
local.pid.call().get(30)
if how == "stopped":
    # For longer than the lease, as a laptop whose lid is closed.
    waker = subprocess.Popen(["sh", "-c", f"sleep 3; kill -CONT {os.getpid()}"], start_new_session=True)
    os.kill(os.getpid(), signal.SIGSTOP)
    waker.wait()
else:
    os.kill(int(open(f"/proc/{pids[0]}/stat").read().rpartition(")")[2].split()[1]), 9)
def attempt(what):
    begun = time.monotonic()
    try:
        what()
        print("worked")
    except MonarchError as error:
        # An actor that has called it says so in turn.
        kind = (error.exception if isinstance(error, ActorError) else error).__class__.__name__
        print(kind, "lost" in str(error), time.monotonic() - begun < 15)
first = hosts.slice(hosts=0)
attempt(lambda: actors.pid.call().get(30))
attempt(lambda: first.spawn_procs().spawn("b", A).pid.call().get(30))
attempt(lambda: local.ask.call_one(actors.slice(hosts=0)).get(30))
attempt(lambda: heal_mesh(actors, timeout=30))
attempt(lambda: local.pid.call().get(30))
"""
)


@pytest.fixture
def workers(warm: None, leaks: Any, tmp_path: Path) -> Iterator[Workers]:
    made = Workers(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_lost_host_is_an_error_immediately(workers: Workers, tmp_path: Path, how: str) -> None:
    # The program's lease counts from a heartbeat, and a message after that suspends it: so the workers have one too.
    started = [workers.start("", "--silence", "1") for _ in range(2)]
    for process, _ in started:
        workers.wait(process)
    script = tmp_path / "program.py"
    script.write_text(LOST)
    command = [sys.executable, str(script), workers.key, how, *(address for _, address in started)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.stdout.splitlines() == [
        "SupervisionError True True",
        "SpawnError True True",
        "SupervisionError True True",
        "SpawnError True True",
        "worked",
    ], done.stderr
    assert done.returncode == 0
    # A process that never existed is not reported as alive.
    assert "it is alive" not in done.stderr


# Memory

MEMORY = (
    START
    + """
actors = start(2)
pids = list(actors.pid.call().get(30).values())
one = actors.slice(gpus=0)
used = int(open(f"/proc/{pids[0]}/statm").read().split()[0]) * 4096
one.limit.call_one(resource.RLIMIT_AS, used + (200 << 20)).get(30)
try:
    one.take.call_one(2 << 30).get(30)
except ActorError as error:
    print(type(error.exception).__name__)
print(list(actors.pid.call().get(30).values()) == pids, actors.take.call(1 << 20).get(30).extent.nelements)
"""
)


MESSAGES = (
    START
    + """
def leave(megabytes):
    # Lets this process use so much more memory than it does.
    used = int(open("/proc/self/statm").read().split()[0]) * 4096
    resource.setrlimit(resource.RLIMIT_AS, (used + (megabytes << 20), resource.getrlimit(resource.RLIMIT_AS)[1]))
class B(A):
    @endpoint
    def leave(self, megabytes):
        leave(megabytes)
    @endpoint
    def length(self, value):
        return len(value)
    @endpoint
    def make(self, number):
        return "x" * number
    @endpoint
    def fill(self):
        leave(0)
        self.kept = []
        with suppress(MemoryError):
            while True:
                self.kept.append(bytearray(100_000))
def attempt(what):
    try:
        print(what())
    except MonarchError as error:
        print(type(getattr(error, "exception", error)).__name__, "no memory left for a message" in str(error))
    except MemoryError as error:
        print("MemoryError here")
actors = this_host().spawn_procs({"gpus": 2}).spawn("b", B)
one = actors.slice(gpus=0)
one.leave.call_one(30).get(30)
attempt(lambda: one.length.call_one(["x" * 100_000_000]).get(60))
attempt(lambda: one.length.call_one("abc").get(30))
print("answers")
answer = actors.slice(gpus=1).make.call_one(60_000_000)
leave(40)
attempt(lambda: len(answer.get(30)))
attempt(lambda: one.length.call_one("abc").get(30))
hard = resource.getrlimit(resource.RLIMIT_AS)[1]
resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
print("full")
one.fill.call_one().get(30)
attempt(lambda: one.length.call_one("x" * 900_000).get(30))
attempt(lambda: actors.slice(gpus=1).length.call_one("abc").get(30))
"""
)


def test_message_without_memory_for_it_is_an_error(program: Callable[..., Any]) -> None:
    """Its value is mapped when it is read; a rank that cannot receive even a small one ends."""
    done = program(MESSAGES)
    *lines, full, other = done.ok().splitlines()
    assert lines == ["MemoryError False", "3", "answers", "MemoryError here", "3", "full"], done.err
    # Its allocator may have room for the message, and then none for the value.
    assert full in ("SupervisionError True", "MemoryError False") and other == "3", done.err


def test_rank_without_memory_raises_and_continues(program: Callable[..., Any]) -> None:
    done = program(MEMORY)
    assert done.ok().splitlines() == ["MemoryError", "True 2"], done.err


BOTH = """
import resource, sys
from monarch.actor import Actor, endpoint, this_host
from monarch.exceptions import LimitError
used = int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
resource.setrlimit(resource.RLIMIT_AS, (used + (int(sys.argv[1]) << 20),) * 2)
class A(Actor):
    @endpoint
    def one(self):
        return 1
for count in (2, 24, 2):
    try:
        procs = this_host().spawn_procs({"gpus": count})
        print(sum(procs.spawn("a", A).one.call().get(60).values()))
        procs.stop().get(60)
    except LimitError as error:
        print("memory" if "ulimit -v" in str(error) else "descriptors" if "ulimit -n" in str(error) else error)
"""


@pytest.mark.parametrize(
    ("megabytes", "outcomes"),
    [(4000, "2 descriptors 2"), (20, "memory memory memory")],
)
def test_few_descriptors_and_little_memory_together(program: Callable[..., Any], megabytes: int, outcomes: str) -> None:
    done = program(LIGHT + BOTH, str(megabytes))
    assert done.ok().split() == outcomes.split(), done.err


KILLED = (
    START
    + """
actors = start(2)
pids = list(actors.pid.call().get(30).values())
with open(sys.argv[1] + "/cgroup.procs", "w") as file:
    file.write(str(pids[0]))
try:
    actors.slice(gpus=0).take.call_one(1 << 30).get(60)
except SupervisionError as error:
    print("SIGKILL" in str(error), "out of memory and killing processes (OOM killer)" in str(error))
heal_mesh(actors, timeout=30)
print(len(actors.pid.call().get(30)))
"""
)


@pytest.fixture
def small_cgroup() -> Iterator[str]:
    """A control group with little memory."""
    roots = [("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")]
    for root, limit in roots:
        path = Path(root, f"monarch-test-{os.getpid()}")
        try:
            path.mkdir()
            (path / limit).write_text(str(300 << 20))
        except OSError:
            if path.is_dir():
                path.rmdir()
            continue
        yield str(path)
        path.rmdir()
        return
    pytest.skip("this machine lets nobody make control groups with a limit of memory")


def test_out_of_memory_killer_is_named(program: Callable[..., Any], small_cgroup: str) -> None:
    done = program(KILLED, small_cgroup)
    assert done.ok().splitlines() == ["True True", "2"], done.err


def test_out_of_memory_kills_are_counted_once(tmp_path: Path) -> None:
    counts = tmp_path / "vmstat"
    counts.write_text("pgfault 12\noom_kill 3\n")
    watch = OomWatch(str(counts))
    assert not watch.has_struck()
    counts.write_text("pgfault 12\noom_kill 5\n")
    assert watch.has_struck() and not watch.has_struck()
    assert not OomWatch(str(tmp_path / "none")).has_struck()


# Disk

FULL = (
    LIGHT
    + START
    + """
print(use(2))
try:
    use(20)
except DeviceMeshError as error:
    print(type(error).__name__, "No space left on device" in str(error))
print(use(2))
"""
)


@pytest.fixture
def small_disk() -> Iterator[str]:
    """A folder with room for a few files; its name is short, as a session folder's must be."""
    folder = tempfile.mkdtemp(prefix="mk-", dir="/tmp")
    command = ["mount", "-t", "tmpfs", "-o", "size=64k,nr_inodes=16,mode=700", "none", folder]
    if os.getuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        os.rmdir(folder)
        pytest.skip("only root may mount a small file system")
    yield folder
    subprocess.run(["umount", folder], check=True)
    os.rmdir(folder)


def test_full_session_folder_refuses_ranks_and_recovers(program: Callable[..., Any], small_disk: str) -> None:
    done = program(FULL, XDG_RUNTIME_DIR=small_disk)
    assert done.ok().splitlines() == ["2", "SupervisionError True", "2"], done.err
    assert os.listdir(small_disk) == []


KEPT = (
    START
    + """
from monarch.job import attach, end, keep
full = os.path.join(sys.argv[1], "full")
with suppress(OSError), open(full, "wb", buffering=0) as file:
    while True:
        file.write(bytes(512))
os.truncate(full, max(0, os.path.getsize(full) - int(sys.argv[2]) * os.statvfs(full).f_bsize))
try:
    print(keep("kept", 60, **({"on": "process:2"} if sys.argv[3] == "hosts" else {})).hosts.extent.nelements)
except MonarchError as error:
    print(error)
else:
    os.unlink(full)
    end("kept")
"""
)


@pytest.mark.parametrize("kind", ["here", "hosts"])
def test_full_disk_moves_the_record_of_a_kept_mesh(program: Callable[..., Any], small_disk: str, kind: str) -> None:
    """It is found there, and also if the first place has room later."""
    # The second place; in the usual one, which all programs of this user share, another test would find the mesh.
    with tempfile.TemporaryDirectory(prefix="mk-", dir="/tmp") as second:
        done = program(KEPT, small_disk, "0", kind, XDG_RUNTIME_DIR=small_disk, TMPDIR=second)
        assert done.ok() == f"{1 + (kind == 'hosts')}\n", done.err


def test_host_without_room_for_its_record_is_not_kept(program: Callable[..., Any], small_disk: str) -> None:
    done = program(KEPT, small_disk, "1", "hosts", XDG_RUNTIME_DIR=small_disk)
    assert f"its record cannot be written to {small_disk}" in done.ok() and "No space left on device" in done.out


# A program that is stopped

PAUSED = (
    START
    + """
actors = start(2)
pids = list(actors.pid.call().get(30).values())
asked = actors.slice(gpus=0).ask.call_one(actors.slice(gpus=1))
waker = subprocess.Popen(["sh", "-c", f"sleep {sys.argv[1]}; kill -CONT {os.getpid()}"], start_new_session=True)
os.kill(os.getpid(), signal.SIGSTOP)
waker.wait()
print(asked.get(30) == pids[1], list(actors.pid.call().get(30).values()) == pids, use(1))
"""
)


def test_suspended_program_continues_with_its_ranks(program: Callable[..., Any]) -> None:
    """For longer than a lease: on its own host this does not count as its end."""
    assert program(PAUSED, str(LEASE_S + 1), timeout=100).ok() == "True True 1\n"


def test_session_killed_while_suspended_leaves_nothing(program: Callable[..., Any]) -> None:
    text = START + "use(1)\nactors = start(2)\nactors.pid.call().get(30)\n"
    text += "subprocess.Popen(['sh', '-c', f'sleep 1; kill -9 {os.getpid()}'], start_new_session=True)\n"
    text += "os.kill(os.getpid(), signal.SIGSTOP)\n"
    done = program(text)
    assert done.code == -signal.SIGKILL and not done.left


SUSPENDED = (
    START
    + """
from monarch._procs.os.blocked import children_of
use(1)
agent = need_session(current_node()).agent_pid
of_zygote = [pid for pid in children_of(agent) if open(f"/proc/{pid}/comm").read().startswith("monarch-zygote")]
pids = " ".join(str(pid) for pid in ([agent] if sys.argv[1] == "agent" else of_zygote))
print(pids)
subprocess.run(["sh", "-c", f"kill -STOP {pids}"], check=True)
waker = subprocess.Popen(["sh", "-c", f"sleep 2; kill -CONT {pids}"], start_new_session=True)
print(use(2))
waker.wait()
"""
)


@pytest.mark.parametrize("which", ["agent", "zygote"])
def test_suspended_process_that_would_start_ranks_is_named(program: Callable[..., Any], which: str) -> None:
    done = program(SUSPENDED, which, MONARCH_SLOW_START_SECONDS="0.5")
    pids, count = done.ok().splitlines()
    assert count == "2" and f"the {which} of this host (pid {pids.split()[0]})" in done.err
    assert f"kill -CONT {pids} resumes" in done.err and done.err.count("have not started after") == 1


SUSPENDED_ELSEWHERE = (
    START
    + """
from monarch._procs.os.blocked import children_of
from monarch._session.workers import WorkerHosts
hosts = WorkerHosts(1).mesh
class Rank(Actor):
    @endpoint
    def parent(self):
        return os.getppid()
[agent] = hosts.spawn_procs({"gpus": 1}).spawn("rank", Rank).parent.call().get(30).values()
of_zygote = [pid for pid in children_of(agent) if open(f"/proc/{pid}/comm").read().startswith("monarch-zygote")]
pids = " ".join(str(pid) for pid in ([agent] if sys.argv[1] == "agent" else of_zygote))
print(pids)
subprocess.run(["sh", "-c", f"kill -STOP {pids}"], check=True)
waker = subprocess.Popen(["sh", "-c", f"sleep 3; kill -CONT {pids}"], start_new_session=True)
print(len(hosts.spawn_procs({"gpus": 2}).spawn("more", Rank).parent.call().get(30)))
waker.wait()
"""
)


@pytest.mark.parametrize("which", ["agent", "zygote"])
def test_suspended_process_of_another_host_is_named(program: Callable[..., Any], which: str) -> None:
    done = program(SUSPENDED_ELSEWHERE, which, MONARCH_SLOW_START_SECONDS="0.5")
    pids, count = done.ok().splitlines()
    assert count == "2" and done.err.count("have not started after") == 1
    if which == "zygote":
        assert f"(pid {pids.split()[0]})" in done.err and f"on that host, kill -CONT {pids} resumes" in done.err
    else:
        assert "has not answered for 0.5 s; it is suspended, or" in done.err
