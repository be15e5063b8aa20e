"""Processes without free file descriptors: errors that say so; nothing aborts or hangs."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from leaks import wait_until
from light import LIGHT
from monarch._procs.session_folder import Residence
from monarch._wire import descriptors
from monarch._wire.accepting import tolerate_full_table
from monarch._wire.descriptors import RESERVE, Reserve, limit_of, used_by
from monarch._wire.links import Inbox, Link, make_context, shut_path

LIMITED = """
import resource, sys
limit = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
from monarch.actor import Actor, endpoint, this_host
from monarch.exceptions import LimitError
class A(Actor):
    @endpoint
    def f(self):
        return 1
def use(count):
    procs = this_host().spawn_procs({"gpus": count})
    assert len(procs.spawn("a", A).f.call().get(timeout=60)) == count
    procs.stop().get(timeout=60)
for count in map(int, sys.argv[2:]):
    try:
        use(count)
        print("worked")
    except LimitError as error:
        assert error.limit == limit and error.need > error.free, error
        print("refused" if f"of its {limit} are free" in str(error) and "ulimit -n" in str(error) else error)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limit", "counts", "outcomes"),
    [
        (64, "96 3", "refused worked"),
        (128, "24 96 360 12", "refused refused refused worked"),
        (256, "128 24 4", "refused worked worked"),
    ],
)
def test_spawn_works_or_is_refused_at_low_limit(
    program: Callable[..., Any], limit: int, counts: str, outcomes: str
) -> None:
    assert program(LIGHT + LIMITED, str(limit), *counts.split()).ok().split() == outcomes.split()


def test_session_is_refused_when_no_descriptor_is_left(program: Callable[..., Any]) -> None:
    said = program(LIGHT + LIMITED, "30", "1").ok()
    assert said.startswith("cannot start a session: ") and "ulimit -n" in said


GREEDY = """
import os, resource, sys, time
resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
from monarch.actor import Actor, endpoint, this_host
from monarch.exceptions import ActorError
held = []
class A(Actor):
    @endpoint
    def take(self):
        while True:
            held.append(open(os.devnull))
    @endpoint
    def give_back(self):
        held.clear()
    @endpoint
    def pid(self):
        return os.getpid()
    @endpoint
    def ask(self, other):
        return other.pid.call_one().get(timeout=30)
procs = this_host().spawn_procs({"gpus": 3})
actors = procs.spawn("a", A)
one, two = actors.slice(gpus=0), actors.slice(gpus=1)
pid = one.pid.call_one().get(30)
try:
    one.take.call_one().get(30)
except ActorError as error:
    print(type(error.exception).__name__, error.exception.errno)
# It answers those that it is connected to, connects to others, and is connected to when there is room again.
print(one.pid.call_one().get(30) == pid, one.ask.call_one(two).get(30) == two.pid.call_one().get(30))
asked = two.ask.call_one(one)
one.give_back.call_one().get(30)
print(asked.get(30) == pid)
"""


@pytest.mark.slow
def test_rank_without_descriptors_answers(program: Callable[..., Any]) -> None:
    done = program(LIGHT + GREEDY)
    assert done.ok().splitlines() == ["OSError 24", "True True", "True"], done.err


CONTROLLER = """
import os, resource, sys, time
resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
from monarch.actor import Actor, endpoint, heal_mesh, this_host
from monarch.exceptions import LimitError, SupervisionError
class A(Actor):
    @endpoint
    def pid(self):
        return os.getpid()
procs = this_host().spawn_procs({"gpus": 2})
actors = procs.spawn("a", A)
pids = actors.pid.call().get(30)
held = []
try:
    while True:
        held.append(open(os.devnull))
except OSError:
    pass
print(list(actors.pid.call().get(30).values()) == list(pids.values()))
for attempt in (lambda: this_host().spawn_procs(), lambda: this_host().spawn_procs({"gpus": 4})):
    try:
        attempt()
    except LimitError as error:
        print("refused", error.free)
held.clear()
os.kill(actors.slice(gpus=0).pid.call_one().get(30), 9)
try:
    while True:
        actors.pid.call().get(30)
except SupervisionError:
    heal_mesh(actors, timeout=30)
print(len(actors.pid.call().get(30)), len(this_host().spawn_procs({"gpus": 3}).spawn("b", A).pid.call().get(30)))
"""


@pytest.mark.slow
def test_program_without_descriptors_refuses_and_recovers(program: Callable[..., Any]) -> None:
    done = program(LIGHT + CONTROLLER)
    assert done.ok().splitlines() == ["True", "refused 0", "refused 0", "2 3"], done.err


# The parts

FULL = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
from monarch._wire import links
from monarch._wire.links import Inbox, make_context
links.tolerate_full_table = lambda: False
inbox = Inbox(make_context(), "ipc://" + sys.argv[1])
assert inbox.tend()
held = []
try:
    while True:
        held.append(os.dup(0))
except OSError:
    pass
assert not inbox.tend()
print("full", flush=True)
sys.stdin.readline()
for fd in held:
    os.close(fd)
assert inbox.tend()
while True:
    frame = inbox.socket.recv()
    if frame.startswith(b"last"):
        break
print(frame.decode())
"""


def test_full_process_is_not_aborted_by_connection(tmp_path: Path) -> None:
    """Where accept cannot be replaced, libzmq aborts a process without descriptors; so its file is hidden."""
    path = str(tmp_path / "it")
    process = subprocess.Popen(
        [sys.executable, "-c", FULL, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None and process.stdout is not None
    context = make_context()
    with process:
        assert process.stdout.readline() == "full\n"
        assert os.path.exists(shut_path(path)) and not os.path.exists(path)
        links = [Link(context, f"ipc://{path}", b"hello") for _ in range(5)]
        links[0].send(b"last words")
        assert process.poll() is None
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "last words\n"
        assert process.wait(20) == 0
    for link in links:
        link.close()
    context.term()


SURPRISED = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
from monarch._wire.links import Inbox, make_context
inbox = Inbox(make_context(), "ipc://" + sys.argv[1])
held = []
try:
    while True:
        held.append(os.dup(0))
except OSError:
    pass
# Nobody looks after the socket's file: the connections come before the next look.
print("full", flush=True)
sys.stdin.readline()
for fd in held:
    os.close(fd)
print(*sorted(inbox.socket.recv().decode() for _ in range(3)))
"""


@pytest.mark.skipif(not tolerate_full_table(), reason="libzmq aborts then on this machine: see 0034")
def test_connection_before_next_check_aborts_nothing(tmp_path: Path) -> None:
    """As when user code suddenly takes the last descriptors; the connection is accepted when there is room."""
    path = str(tmp_path / "it")
    process = subprocess.Popen(
        [sys.executable, "-c", SURPRISED, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None and process.stdout is not None
    context = make_context()
    with process:
        assert process.stdout.readline() == "full\n"
        links = [Link(context, f"ipc://{path}", b"hello") for _ in range(3)]
        before = os.times()
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1)
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "hello hello hello\n"
        assert process.wait(20) == 0
    # It waited without spinning.
    after = os.times()
    assert after.children_user + after.children_system - before.children_user - before.children_system < 3
    for link in links:
        link.close()
    context.term()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="there are instructions for x86-64 only")
def test_accept_is_replaced_on_this_machine() -> None:
    assert tolerate_full_table()


def test_reserve_is_released_when_descriptors_are_short() -> None:
    code = """
import os, resource
from monarch._wire.descriptors import RESERVE, Reserve, used_by
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
kept = Reserve()
before = used_by()
assert kept.keep() and used_by() == before + RESERVE and kept.free() == 64 - before
assert kept.keep() and used_by() == before + RESERVE
held = []
try:
    while True:
        held.append(os.dup(0))
except OSError:
    pass
assert kept.free() == RESERVE
assert not kept.keep() and used_by() == 64 - RESERVE
for fd in held:
    os.close(fd)
assert kept.keep() and used_by() == before + RESERVE
kept.give_up()
assert used_by() == before
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_fork_does_not_inherit_the_reserve() -> None:
    kept = Reserve()
    assert kept.keep()
    pid = os.fork()
    if pid == 0:
        before = used_by()
        # Its numbers may belong to other files by now.
        kept.give_up()
        os._exit(0 if used_by() == before else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert used_by() >= RESERVE
    kept.give_up()


def test_descriptors_of_another_process_are_counted() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", "import os, sys; [os.dup(0) for _ in range(50)]; print(flush=True); sys.stdin.read()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with process:
        assert process.stdin is not None and process.stdout is not None
        process.stdout.readline()
        assert 53 <= used_by(process.pid) < 60
        assert limit_of(process.pid) == limit_of() == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        process.stdin.close()
    assert wait_until(lambda: process.poll() is not None)


@pytest.mark.parametrize(("total", "text"), [(10, "256"), (257, "512"), (1024, "1024"), (1025, "2048")])
def test_remedy_names_sufficient_limit(total: int, text: str) -> None:
    assert descriptors.remedy(total) == f"`ulimit -n {text}`"


@pytest.mark.parametrize(("many", "pause"), [(0, 5.0), (1 << 30, 1.0)])
def test_checks_are_rarer_with_many_free_descriptors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, many: int, pause: float
) -> None:
    monkeypatch.setattr(descriptors, "_MANY", many)
    context = make_context()
    inbox = Inbox(context, f"ipc://{tmp_path / 'it'}")
    residence = Residence(str(tmp_path), inbox)
    assert residence.tend() == "" and residence.pause == pause
    inbox.close()
    residence.close()
    context.term()
    descriptors.reserve.give_up()


def test_problem_of_the_folder_is_looked_at_each_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descriptors, "_MANY", 0)
    context, folder = make_context(), tmp_path / "base" / "session"
    folder.mkdir(parents=True)
    inbox = Inbox(context, f"ipc://{folder / 'it'}")
    residence = Residence(str(folder), inbox)
    shutil.rmtree(folder.parent)
    folder.parent.write_text("in the way")
    assert "cannot be used" in residence.tend() and residence.pause == 1.0
    folder.parent.unlink()
    assert residence.tend() == "" and residence.pause == 5.0 and (folder / "it").exists()
    inbox.close()
    residence.close()
    context.term()
    descriptors.reserve.give_up()


def test_removed_socket_file_is_restored(tmp_path: Path) -> None:
    context, path = make_context(), str(tmp_path / "it")
    inbox = Inbox(context, f"ipc://{path}")
    first = Link(context, f"ipc://{path}", b"first")
    assert inbox.socket.recv() == b"first"
    os.unlink(path)
    assert inbox.tend() and os.path.exists(path)
    second = Link(context, f"ipc://{path}", b"second")
    assert inbox.socket.recv() == b"second"
    first.send(b"still connected")
    assert inbox.socket.recv() == b"still connected"
    for link in (first, second):
        link.close()
    inbox.close()
    context.term()
    descriptors.reserve.give_up()
