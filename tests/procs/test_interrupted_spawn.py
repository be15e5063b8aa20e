"""Ctrl-C while processes are started: none that the program has no mesh of is left, and its end waits for none."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from leaks import wait_until
from monarch._meshes.procs.starting import ProcStarter
from monarch.actor import Actor, endpoint, this_host

ROUNDS = 40


class Answers(Actor):
    @endpoint
    def answer(self) -> int:
        return 1


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    """The session, of which alone a test would count as left behind."""
    mesh = this_host().spawn_procs(per_host={"gpus": 1})
    # An answer: ZeroMQ may connect to the rank some time after the first message to it.
    mesh.spawn("answers", Answers).answer.call().get(60)
    yield
    mesh.stop().get(30)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ProcStarter]]:
    """Those that have been asked to start processes."""
    found: list[ProcStarter] = []
    start = ProcStarter.start

    def noted(self: ProcStarter, *args: Any) -> None:
        found.append(self)
        start(self, *args)

    monkeypatch.setattr(ProcStarter, "start", noted)
    yield found
    signal.setitimer(signal.ITIMER_REAL, 0)


def ranks_of(mesh: ProcStarter) -> list[str]:
    """Return the pids of the processes of a mesh that live."""
    name = f"{mesh.procs.name}["
    return [pid for pid in os.listdir("/proc") if pid.isdigit() and named(pid).startswith(name)]


def named(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text()
    except OSError:
        return ""


@pytest.mark.parametrize("when", ["before", "after"])
def test_interrupted_spawn_leaves_no_process(
    leaks: Any, started: list[ProcStarter], monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    hosts = this_host()
    start = ProcStarter.start

    def interrupted(self: ProcStarter, *args: Any) -> None:
        if when == "before":
            signal.raise_signal(signal.SIGINT)
        start(self, *args)
        if when == "after":
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(ProcStarter, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        hosts.spawn_procs(per_host={"gpus": 2}, name=f"cut_{when}")
    (mesh,) = started
    assert wait_until(lambda: not ranks_of(mesh))


def test_interrupts_at_any_moment_of_a_spawn_leave_no_process(leaks: Any, started: list[ProcStarter]) -> None:
    hosts = this_host()
    interval, before = sys.getswitchinterval(), signal.signal(signal.SIGALRM, signal.default_int_handler)
    sys.setswitchinterval(1e-6)
    cut = 0
    try:
        for number in range(ROUNDS):
            mesh = None
            try:
                signal.setitimer(signal.ITIMER_REAL, 5e-5 * (number + 1))
                mesh = hosts.spawn_procs(per_host={"gpus": 1}, name=f"cut{number}")
                while signal.getitimer(signal.ITIMER_REAL)[0]:
                    time.sleep(1e-4)
            except KeyboardInterrupt:
                cut += mesh is None
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            if mesh is not None:
                mesh.stop().get(30)
    finally:
        sys.setswitchinterval(interval)
        signal.signal(signal.SIGALRM, before)
    assert cut, "no spawn was interrupted"
    assert wait_until(lambda: not any(map(ranks_of, started)))
