"""What tests of zygotes start."""

from __future__ import annotations

import secrets
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch._procs.os import posix
from small_agents import Agent


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Agent]]:
    """Starts agents, and sees to it that they leave no process behind."""
    agents: list[Agent] = []
    posix.set_child_subreaper()

    def make(**setup: Any) -> Agent:
        session = tmp_path / f"session{len(agents)}"
        session.mkdir()
        (session / "socket").touch()
        agents.append(Agent(session, **setup))
        return agents[-1]

    yield make
    try:
        for agent in agents:
            agent.close()
    finally:
        posix.set_child_subreaper(False)


@pytest.fixture
def cold(monkeypatch: pytest.MonkeyPatch) -> None:
    """The programs of this test have a fork server of their own: it is started by the first, and ends with the last."""
    # Python reads no such variable, but might: fork servers are told apart by all that start like this.
    monkeypatch.setenv("PYTHON_OF_THIS_TEST", secrets.token_hex(4))


@pytest.fixture
def dead_controller() -> list[int]:
    process = subprocess.Popen(["sleep", "60"])
    start_time = posix.proc_start_time(process.pid)
    process.kill()
    process.wait()
    assert start_time is not None
    return [process.pid, start_time]
