"""What programs tell each other of their meshes, and ``monarch top``, which shows it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event
from typing import Any

import pexpect
import pytest

from leaks import session_folders, wait_until
from light import LIGHT
from monarch._core.telemetry import events as e
from monarch._core.telemetry.events import RankState
from monarch._core.telemetry.model import MeshModel
from monarch._procs.session_folder import make_folder, program_folders, remove_folder
from monarch._telemetry.exchange import NAME
from monarch._telemetry.mesh_telemetry import MeshTelemetry
from monarch._telemetry.programs import OTHER_VERSION, SILENT, MeshCopy, Programs, WatchedProgram
from monarch._telemetry.serving import MOST_ENTRIES, Caption, TelemetryServer, caption, set_caption

pytestmark = pytest.mark.slow

TOP = ["-m", "monarch", "top"]
# Each starts a fork server of its own.
TRAIN = f"""{LIGHT}
import sys
from monarch import log_metric
from monarch.actor import Actor, endpoint, this_host

class Trainer(Actor):
    @endpoint
    def step(self):
        log_metric("loss", 0.25, step=7)

mesh = this_host().spawn_procs(per_host={{"gpus": 2}}, name="trainers")
mesh.spawn("trainer", Trainer).step.call().get()
print("ready", flush=True)
sys.stdin.readline()
"""
NOBODY = 65534
SOON = 30.0


class Train:
    """A program with a mesh of two ranks that has logged a value, in a process of its own."""

    def __init__(self, path: Path) -> None:
        path.write_text(TRAIN)
        self.process = subprocess.Popen(
            [sys.executable, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    @property
    def name(self) -> str:
        return f"train.py (process {self.process.pid})"

    def end(self) -> None:
        with self.process:
            if self.process.poll() is None:
                self.process.send_signal(signal.SIGCONT)
                self.process.communicate("\n", timeout=SOON)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Programs that begin here see each other only: meshes of this process would fill the terminal.

    Pytest has the folder of its own folders by then: it is no temporary one of a test.
    """
    with tempfile.TemporaryDirectory(prefix="top") as folder:
        for name in ("XDG_RUNTIME_DIR", "TMPDIR"):
            monkeypatch.setenv(name, folder)
        monkeypatch.setattr(tempfile, "tempdir", None)
        yield


@pytest.fixture
def train(warm: None, leaks: Any, alone: None, tmp_path: Path) -> Iterator[Train]:
    program = Train(tmp_path / "train.py")
    yield program
    program.end()


def ran(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *TOP, *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=SOON, check=False, env={**os.environ, **env})


@pytest.fixture
def terminal() -> Iterator[Callable[[], Any]]:
    """A function that starts ``monarch top`` in a terminal."""
    started: list[Any] = []

    def start() -> Any:
        child = pexpect.spawn(sys.executable, TOP, encoding="utf-8", timeout=SOON, dimensions=(40, 160))
        started.append(child)
        return child

    yield start
    for child in started:
        child.close(force=True)


def test_top_shows_the_ranks_of_another_program_once(train: Train) -> None:
    done = ran("--once")
    assert done.returncode == 0 and train.name in done.stdout
    assert "trainers (gpus=2): 2 idle" in done.stdout and "loss 0.25" in done.stdout


def test_top_without_a_program_says_what_to_start(alone: None) -> None:
    if program_folders(NAME):
        pytest.skip("a program of this user runs a mesh outside the tests")
    for words in ((), ("--once",)):
        # A folder of its own: this process may run meshes.
        with tempfile.TemporaryDirectory(prefix="top") as folder:
            done = ran(*words, XDG_RUNTIME_DIR=folder, TMPDIR=folder)
        assert done.returncode == 1 and not done.stdout
        assert done.stderr.startswith("monarch top: none of your programs is running a mesh on this machine; start one")


def test_top_help_names_the_option() -> None:
    done = ran("--help")
    assert done.returncode == 0 and "--once" in done.stdout
    main = subprocess.run([sys.executable, "-m", "monarch", "--help"], capture_output=True, text=True, check=True)
    assert "top " in main.stdout


def test_ctrl_c_ends_top_with_0(train: Train, terminal: Callable[[], Any]) -> None:
    child = terminal()
    child.expect_exact(train.name)
    child.expect_exact("trainers (gpus=2): 2 idle")
    child.sendintr()
    child.expect(pexpect.EOF)
    child.close()
    assert (child.exitstatus, child.signalstatus) == (0, None)


def test_top_names_a_killed_program_and_goes_on(train: Train, terminal: Callable[[], Any], tmp_path: Path) -> None:
    child = terminal()
    child.expect_exact("trainers (gpus=2): 2 idle")
    train.process.kill()
    child.expect_exact(f"{train.name} has ended")
    other = Train(tmp_path / "other.py")
    try:
        child.expect_exact(f"other.py (process {other.process.pid})")
    finally:
        other.end()
    child.sendintr()
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0


def test_top_of_a_suspended_program_shows_its_last_state(train: Train, terminal: Callable[[], Any]) -> None:
    child = terminal()
    child.expect_exact("trainers (gpus=2): 2 idle")
    train.process.send_signal(signal.SIGSTOP)
    child.expect_exact(f"{train.name} {SILENT}")
    child.expect_exact("trainers (gpus=2): 2 idle")
    train.process.send_signal(signal.SIGCONT)
    wait_until(lambda: SILENT not in ran("--once").stdout, SOON)
    assert f"{train.name}\n" in ran("--once").stdout
    child.sendintr()
    child.expect(pexpect.EOF)


@pytest.mark.skipif(os.getuid() != 0, reason="needs to become another user")
def test_another_user_cannot_connect(train: Train) -> None:
    (folder,) = [program.folder for program in _looked().running if program.pid == train.process.pid]
    path = os.path.join(folder, NAME)
    assert "PermissionError" in _connects(path, NOBODY)
    assert not _connects(path, 0)


def _connects(path: str, user: int) -> str:
    code = f"import os, socket; os.setuid({user}); socket.socket(socket.AF_UNIX).connect({path!r})"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False).stderr


def _looked() -> Programs:
    programs = Programs()
    programs.look()
    return programs


# The exchange itself, in one process


class Desk:
    """A server with one mesh, and a program that looks at it."""

    def __init__(self) -> None:
        self.log = MeshTelemetry("uid", "mesh", lambda: None, lambda: None)
        self.log.add(e.MeshStarted("mesh", ("gpus",), (2,), ("host", "host")))
        self.logs = [self.log]
        self.folder = make_folder()
        self.server = TelemetryServer(self.folder, lambda: self.logs)
        self.program = WatchedProgram(self.folder, os.getpid())

    def look(self) -> MeshCopy:
        self.program.look()
        return self.program.meshes["uid"]

    def close(self) -> None:
        self.server.close()
        remove_folder(self.folder)


@pytest.fixture
def desk() -> Iterator[Desk]:
    made = Desk()
    yield made
    made.close()


def whole(model: MeshModel) -> MeshModel:
    return model


def report(rank: int, state: RankState, since: float) -> e.RankReport:
    return e.RankReport(rank, state, "cell [1] line 2", since, 0, "cpu", e.ResourceUsage(0.5, 1 << 30))


def test_a_copy_has_the_state_of_the_mesh(desk: Desk) -> None:
    desk.log.add(e.RankStarted(0, 11, 0), 99.0)
    desk.log.add(e.CallStarted(1, "cell [1]", 1, (0, 1)), 99.5)
    desk.log.add(report(0, RankState.RUNNING, 100.0), 100.0)
    desk.log.add(e.Metrics(1, "loss", (0, 1), (0.5, float("inf"))), 100.5)
    desk.log.add(e.Progress(0, "epoch", 1, 10, "it", False), 101.0)
    copy = desk.look()
    assert copy.read(whole) == desk.log.model()
    # What lasts in the state ends by later entries.
    desk.log.add(report(0, RankState.COLLECTIVE, 102.0), 102.0)
    desk.log.add(e.CallAnswered(1, (0, 1), ""), 103.0)
    assert desk.look() is copy and copy.read(whole) == desk.log.model()
    assert (desk.program.title, desk.program.trouble) == (caption().title, "")


def test_subscribers_of_a_copy_are_called_when_it_changes(desk: Desk) -> None:
    copy, changed = desk.look(), Event()
    end = copy.subscribe(changed.set)
    desk.look()
    assert not changed.is_set()
    desk.log.add(e.RankStarted(1, 12, 0))
    desk.look()
    assert changed.is_set()
    end()
    changed.clear()
    desk.log.add(e.RankStarted(0, 13, 0))
    desk.look()
    assert not changed.is_set()


def test_many_entries_come_as_the_state(desk: Desk) -> None:
    copy = desk.look()
    for step in range(MOST_ENTRIES + 1):
        desk.log.add(e.Metrics(0, "loss", (step,), (1.0,)), 100.0)
    assert desk.look() is copy and copy.read(whole) == desk.log.model()


def test_a_stopped_mesh_is_shown_as_ended(desk: Desk) -> None:
    copy = desk.look()
    desk.logs.clear()
    desk.program.look()
    assert desk.program.meshes == {}
    ended, reason = copy.read(lambda model: (model.ended, model.reason))
    assert ended > 0 and "stopped" in reason


def test_a_removed_socket_comes_back(desk: Desk) -> None:
    desk.look()
    os.unlink(os.path.join(desk.folder, NAME))
    desk.program.look()
    assert desk.program.trouble == SILENT
    wait_until(lambda: os.path.exists(os.path.join(desk.folder, NAME)), SOON)
    desk.look()
    assert not desk.program.trouble


def test_askers_that_say_nothing_or_nonsense_end_nothing(desk: Desk) -> None:
    path = os.path.join(desk.folder, NAME)
    for said in (b"", b"\xff\xff\xff\xff", b"\x02\x00\x00\x00\x93\x01"):
        with socket.socket(socket.AF_UNIX) as asker:
            asker.connect(path)
            asker.sendall(said)
    # A suspended one holds up the next briefly.
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(path)

        def answered() -> bool:
            desk.program.look()
            return not desk.program.trouble

        assert wait_until(answered, SOON)


def test_a_program_of_another_version_is_named_as_such(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / NAME))
        listener.listen()
        program = WatchedProgram(str(tmp_path), 12)
        _answer_once(listener, b"\x02\x00\x00\x00\x91\x63", program.look)
    assert program.trouble == OTHER_VERSION and program.name == "process 12"


def _answer_once(listener: socket.socket, answer: bytes, meanwhile: Callable[[], None]) -> None:
    from threading import Thread

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(1 << 16)
            connection.sendall(answer)

    thread = Thread(target=serve)
    thread.start()
    meanwhile()
    thread.join(SOON)


def test_the_caption_of_a_program_is_what_was_set(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("monarch._telemetry.serving._caption", None)
    set_caption(Caption("train.ipynb", "17"))
    desk.look()
    assert (desk.program.title, desk.program.server) == ("train.ipynb", "17")


def test_a_closed_server_leaves_no_file() -> None:
    before = session_folders()
    desk = Desk()
    desk.server.close()
    assert not os.path.exists(os.path.join(desk.folder, NAME))
    desk.close()
    assert session_folders() == before


SHUT_DOWN = """
import threading, time
from monarch._node.current import current_node
from monarch._telemetry import collector, serving
collector.UNWATCHED, serving._TEND, serving.REQUEST_S = 0.01, 3600.0, 3600.0
from monarch.actor import Actor, endpoint, shutdown_context, this_host

class Trainer(Actor):
    @endpoint
    def step(self):
        return 1

mesh = this_host().spawn_procs()
mesh.spawn("trainer", Trainer).step.call().get()
assert {"monarch-telemetry", "monarch-shown"} <= {thread.name for thread in threading.enumerate()}
while not current_node().part(collector.Collector)._calls.asleep:
    time.sleep(0.01)
# From here on, a thread that nobody wakes outlives the session.
collector.UNWATCHED = 3600.0
shutdown_context().get(timeout=60)
deadline = time.monotonic() + 20
while threading.active_count() > 1 and time.monotonic() < deadline:
    time.sleep(0.01)
print([thread.name for thread in threading.enumerate()])
"""


def test_shutdown_wakes_the_threads_of_telemetry() -> None:
    ended = subprocess.run([sys.executable, "-c", SHUT_DOWN], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout == "['MainThread']\n", ended.stdout + ended.stderr
