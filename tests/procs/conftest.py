"""Fixtures for tests of zygotes."""

from __future__ import annotations

import secrets
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from light import light_hosts
from monarch._procs.os import posix
from small_agents import Agent


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Agent]]:
    """Start agents, and check that they leave no process behind."""
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
    """The programs of this test have their own fork server: the first starts it, and it ends with the last."""
    # Python ignores this variable, but could read it: fork servers differ by all variables of this prefix.
    monkeypatch.setenv("PYTHON_OF_THIS_TEST", secrets.token_hex(4))


@pytest.fixture
def light(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hosts that this test gets from launchers import no torch before a rank does."""
    light_hosts(monkeypatch)


@pytest.fixture
def dead_controller() -> list[int]:
    process = subprocess.Popen(["sleep", "60"])
    start_time = posix.proc_start_time(process.pid)
    process.kill()
    process.wait()
    assert start_time is not None
    return [process.pid, start_time]
