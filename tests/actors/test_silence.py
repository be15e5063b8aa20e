"""Ranks that are alive but do not answer are reported as unresponsive, not as dead."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from threading import get_ident
from typing import Any

import pytest

from leaks import wait_until
from monarch._node.current import current_node
from monarch._node.liveness import Liveness
from monarch._session.session import need_session
from monarch.actor import Actor, endpoint
from monarch.exceptions import ArgumentError, CallTimeoutError, SupervisionError

SILENCE = 2.0


class Worker(Actor):
    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def keep_the_lock(self, path: str) -> str:
        """Stay in a C call that holds the GIL until a byte arrives in a pipe."""
        import ctypes

        ctypes.PyDLL(None).open(path.encode(), os.O_RDONLY)
        return "out"

    @endpoint
    def compute_in_c(self, seconds: float) -> None:
        """Compute in C code that holds the GIL."""
        from collections import deque
        from itertools import takewhile

        deque(takewhile((time.monotonic() + seconds).__gt__, iter(time.monotonic, None)), maxlen=0)

    @endpoint
    def let_go(self, path: str) -> str:
        """Stay busy in Python code, which still answers."""
        while not os.path.exists(path):
            sum(range(1000))
        return "out"


def test_suspended_rank_is_reported(procs: Callable[..., Any], capfd: pytest.CaptureFixture[str]) -> None:
    # Long enough for those that live to answer, however busy the machine is.
    mesh = procs(3, name="mesh", silence=SILENCE)
    workers = mesh.spawn("workers", Worker)
    pids = list(workers.pid.call().get(30).values())
    os.kill(pids[1], signal.SIGSTOP)
    try:
        waiting = workers.pid.call()
        assert wait_until(lambda: "its process is stopped by a signal" in mesh.to_table())
        assert wait_until(
            lambda: [row.endswith("alive") for row in mesh.to_table().splitlines()[1:4]] == [True, False, True]
        )
        assert "has not answered for" in mesh.to_table().splitlines()[2]
        with pytest.raises(
            CallTimeoutError, match=r"rank 1 did not answer \(rank 1, which has not answered for .*SIGSTOP"
        ):
            waiting.get(0.1)
        said: list[str] = []
        assert wait_until(lambda: said.append(capfd.readouterr().err) or "calls are waiting" in "".join(said))
        assert "monarch: rank 1 of mesh has not answered for" in "".join(said)
        assert "it is alive, and its calls are waiting" in "".join(said)
    finally:
        os.kill(pids[1], signal.SIGCONT)
    # Nothing is lost, and it counts as there again.
    assert list(waiting.get(30).values()) == pids
    assert wait_until(lambda: "has not answered" not in mesh.to_table())
    assert wait_until(lambda: "monarch: rank 1 of mesh answers again" in capfd.readouterr().err)


def test_rank_whose_agent_is_suspended_is_not_said_to_live(
    procs: Callable[..., Any], capfd: pytest.CaptureFixture[str]
) -> None:
    mesh = procs(2, name="mesh", silence=SILENCE)
    workers = mesh.spawn("workers", Worker)
    pids = list(workers.pid.call().get(30).values())
    agent = need_session(current_node()).agent_pid
    os.kill(agent, signal.SIGSTOP)
    try:
        os.kill(pids[1], signal.SIGKILL)
        waiting = workers.pid.call()
        said: list[str] = []
        assert wait_until(lambda: said.append(capfd.readouterr().err) or "calls are waiting" in "".join(said))
        text = "".join(said)
        assert "its process has ended, but the agent of its host" in text and "is alive" not in text
    finally:
        os.kill(agent, signal.SIGCONT)
    with pytest.raises(SupervisionError, match="SIGKILL"):
        waiting.get(30)


def test_rank_holding_the_gil_is_reported(
    procs: Callable[..., Any], tmp_path: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    mesh = procs(2, name="mesh", silence=SILENCE)
    workers = mesh.spawn("workers", Worker)
    path, pipe = str(tmp_path / "go"), str(tmp_path / "pipe")
    os.mkfifo(pipe)
    stuck = workers.slice(gpus=0).keep_the_lock.call_one(pipe)
    busy = workers.slice(gpus=1).let_go.call_one(path)
    try:
        assert wait_until(lambda: "rank 0 of mesh has not answered" in capfd.readouterr().err)
        assert "C code that holds the GIL" in mesh.to_table()
        assert "rank 1" not in capfd.readouterr().err
    finally:
        open(path, "w").close()
        open(pipe, "w").close()
    assert stuck.get(30) == busy.get(30) == "out"


def test_rank_without_a_cpu_is_not_said_to_hold_the_gil(
    procs: Callable[..., Any], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As on a machine with far more to do than it can.
    monkeypatch.setattr("monarch._node.liveness.cpu_shares", lambda pid: (0.0, time.monotonic()))
    mesh = procs(1, name="mesh", silence=SILENCE)
    pipe = str(tmp_path / "pipe")
    os.mkfifo(pipe)
    stuck = mesh.spawn("workers", Worker).keep_the_lock.call_one(pipe)
    try:
        assert wait_until(lambda: "has not answered" in mesh.to_table())
        assert "it gets no CPU time, because this machine is overloaded" in mesh.to_table()
    finally:
        open(pipe, "w").close()
    assert stuck.get(30) == "out"


def test_rank_that_computes_raises_no_alarm(procs: Callable[..., Any], capfd: pytest.CaptureFixture[str]) -> None:
    mesh = procs(1, name="mesh", silence=0.3)
    busy = mesh.spawn("workers", Worker).compute_in_c.call_one(3.0)
    assert wait_until(lambda: "C code that holds the GIL" in mesh.to_table() or busy.done)
    assert not busy.done, "asked for, it is told"
    busy.get(30)
    assert "answer" not in capfd.readouterr().err


def test_checks_come_with_the_calls_of_a_program(procs: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    workers = procs(1).spawn("workers", Worker)
    ticked, threads = current_node().part(Liveness).ticked, list[int]()
    monkeypatch.setattr(ticked, "subscribers", (*ticked.subscribers, lambda _: threads.append(get_ident())))
    until = time.monotonic() + 60
    while len(threads) < 5 and time.monotonic() < until:
        workers.pid.call_one().get(30)
        time.sleep(0.05)
    assert threads.count(get_ident()) >= 3, "another thread has to wake up for each of them"


def test_dead_rank_is_not_unresponsive(procs: Callable[..., Any]) -> None:
    mesh = procs(1, silence=0.2)
    workers = mesh.spawn("workers", Worker)
    pid = workers.pid.call_one().get(30)
    os.kill(pid, signal.SIGSTOP)
    waiting = workers.pid.call_one()
    assert wait_until(lambda: "has not answered" in mesh.to_table())
    os.kill(pid, signal.SIGKILL)
    assert waiting.exception(30) is not None
    assert "SIGKILL" in mesh.to_table() and "has not answered" not in mesh.to_table()


@pytest.mark.parametrize("wrong", [0, -1, float("nan"), float("inf")])
def test_invalid_silence_is_refused(procs: Callable[..., Any], wrong: float) -> None:
    with pytest.raises(ArgumentError, match="silence: expected a number of seconds above 0"):
        procs(1, silence=wrong)
