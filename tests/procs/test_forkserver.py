"""The fork server: sessions of one user and environment share one import, and none depends on it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from leaks import pids_named, processes, session_folders, wait_until
from light import LIGHT

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cold")]

PROGRAM = """
import json, os, sys
from monarch.actor import Actor, endpoint, this_host
from monarch.exceptions import SupervisionError

class Worker(Actor):
    @endpoint
    def about(self, value):
        return [value, os.getppid(), "torch" in sys.modules, os.getcwd(), os.environ.get("OF_SESSION")]

for line in sys.stdin:
    workers = this_host().spawn_procs({"gpus": 4}).spawn("workers", Worker)
    try:
        about = [value for _, value in workers.about.call(os.getpid()).get()]
    except SupervisionError:
        # It asked an agent of whose death it has not heard.
        about = [[0, 0]]
    print(json.dumps(about), flush=True)
"""


class Session:
    """A separate program that spawns a mesh on request."""

    def __init__(self, folder: Path, light: bool, env: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", LIGHT + PROGRAM if light else PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=folder,
            env={**os.environ, **env},
        )

    def ask(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("mesh\n")
        self.process.stdin.flush()

    def answer(self) -> list[list[object]]:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def agent(self) -> int:
        self.ask()
        return int(str(self.answer()[0][1]))

    def end(self) -> None:
        # Its standard input is closed, which ends it normally.
        self.process.communicate(timeout=20)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Session]]:
    before, folders = processes(), session_folders()
    sessions: list[Session] = []

    def begin(folder: Path = tmp_path, light: bool = True, **env: str) -> Session:
        sessions.append(Session(folder, light, env))
        return sessions[-1]

    yield begin
    for session in sessions:
        session.end()
    wait_until(lambda: processes().keys() <= before.keys() and session_folders() <= folders, 5)


def servers() -> list[int]:
    return pids_named("monarch-server")


def test_sessions_that_start_together_share_one_import(start: Callable[..., Session], tmp_path: Path) -> None:
    before = len(servers())
    folders = [tmp_path / str(number) for number in range(6)]
    for folder in folders:
        folder.mkdir()
    sessions = [start(folder, light=False, OF_SESSION=folder.name) for folder in folders]
    for session in sessions:
        session.ask()
    for session, folder in zip(sessions, folders, strict=True):
        about = session.answer()
        # They share nothing else, and each is as if its program had started it.
        assert [each[0] for each in about] == [session.process.pid] * 4
        assert [each[2:] for each in about] == [[True, str(folder), folder.name]] * 4
    assert len(servers()) == before + 1


def test_sessions_of_other_environments_share_nothing(start: Callable[..., Session]) -> None:
    before = len(servers())
    for session in (start(), start(OPENBLAS_VERBOSE="0")):
        session.agent()
    assert len(servers()) == before + 2


def test_session_works_without_fork_server(start: Callable[..., Session]) -> None:
    before = servers()
    session = start(MONARCH_SHARED_ZYGOTE="0")
    assert Path(f"/proc/{session.agent()}/cmdline").read_text().split("\0")[2] == "monarch._procs.agent.main"
    assert servers() == before


def test_death_of_server_harms_no_session(start: Callable[..., Session]) -> None:
    before = servers()
    session = start()
    agent = session.agent()
    (server,) = set(servers()) - set(before)
    os.kill(server, signal.SIGKILL)
    assert session.agent() == agent
    # The next one has another server.
    other = start()
    assert other.agent() != agent
    assert server not in servers() and len(servers()) == len(before) + 1


def test_session_starts_while_fork_server_is_stuck(start: Callable[..., Session]) -> None:
    before = servers()
    first = start()
    first.agent()
    (server,) = set(servers()) - set(before)
    os.kill(server, signal.SIGSTOP)
    try:
        agent = start().agent()
        assert Path(f"/proc/{agent}/cmdline").read_text().split("\0")[2] == "monarch._procs.agent.main"
    finally:
        with suppress(ProcessLookupError):
            os.kill(server, signal.SIGCONT)


def test_session_cleans_up_after_killed_agent(start: Callable[..., Session]) -> None:
    """And continues with another, of the same server."""
    session = start()
    agent, count = session.agent(), len(servers())
    os.kill(agent, signal.SIGKILL)
    assert wait_until(lambda: not Path(f"/proc/{agent}").exists())
    assert (session.agent() or session.agent()) not in (0, agent)
    assert len(servers()) == count
