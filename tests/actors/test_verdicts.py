"""Calls wait for a verdict only while it is open."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from leaks import wait_until
from monarch._meshes import verdicts
from monarch._meshes.verdicts import verdicts_of
from monarch._node.current import current_node
from monarch.actor import Actor, MeshFailure, endpoint, heal_mesh, supervise
from monarch.exceptions import DeviceMeshError, StoppedError, SupervisionError


class Worker(Actor):
    def __init__(self) -> None:
        self.numbers: list[int] = []

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def note(self, number: int) -> list[int]:
        self.numbers.append(number)
        return self.numbers


@pytest.fixture
def busy() -> Iterator[None]:
    """Set the shortest switch interval."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_no_verdict_stays_open_when_judges_race(host: Any, busy: None) -> None:
    watch, stop = verdicts_of(current_node()), threading.Event()
    late: list[BaseException] = []

    def wait() -> None:
        while not stop.is_set():
            try:
                watch.wait("race", "race", "a call")
            except SupervisionError as error:
                late.append(error)

    def judge() -> None:
        for number in range(25):
            watch.decide("race", f"judge {number}", lambda: None)

    waiting = [threading.Thread(target=wait) for _ in range(2)]
    judges = [threading.Thread(target=judge) for _ in range(4)]
    for thread in (*waiting, *judges):
        thread.start()
    for thread in judges:
        thread.join(60)
    assert wait_until(lambda: not watch.is_open("race"))
    stop.set()
    for thread in waiting:
        thread.join(20)
    assert not any(thread.is_alive() for thread in (*waiting, *judges)) and not late
    assert wait_until(lambda: not any(each.name == "monarch-judge" for each in threading.enumerate()))
    assert not watch.is_open("race") and watch.wait("race", "race", "a call") is False


def test_wait_for_a_verdict_is_bounded_and_names_it(
    procs: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(verdicts, "VERDICT_S", 0.3)
    mesh, gate, asked = procs(2, name="mesh"), threading.Event(), threading.Event()
    workers = mesh.spawn("workers", Worker)
    pids = list(workers.pid.call().get(30).values())

    def slow(failure: MeshFailure) -> Any:
        asked.set()
        assert gate.wait(60)
        return heal_mesh(failure.mesh)

    with supervise(mesh, slow):
        os.kill(pids[1], signal.SIGKILL)
        assert asked.wait(20)
        text = r"workers.pid\(\) has waited 0.3 s because a failure of .*are handling the death of rank 1.*continues"
        with pytest.raises(SupervisionError, match=text):
            workers.pid.call().get(30)
        # A slice of those that live waits for nobody.
        assert workers.slice(gpus=0).pid.call_one().get(30) == pids[0]
        with pytest.raises(SupervisionError, match=r"the end of supervise\(\) has waited"), supervise(mesh):
            pass
        with pytest.raises(ZeroDivisionError), supervise(mesh):
            1 / 0  # pyright: ignore[reportUnusedExpression]
        assert "the end of supervise() has waited" in capsys.readouterr().err
        monkeypatch.setattr(verdicts, "VERDICT_S", 60.0)
        gate.set()
        assert len(list(workers.pid.call().get(30).values())) == 2


@pytest.mark.parametrize("heals", [True, False])
def test_event_loop_runs_while_a_verdict_is_open(
    procs: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, heals: bool
) -> None:
    monkeypatch.setattr(verdicts, "VERDICT_S", 20.0)
    mesh, gate, asked = procs(2, name="mesh"), threading.Event(), threading.Event()
    workers = mesh.spawn("workers", Worker)
    pids = list(workers.pid.call().get(30).values())

    def judge(failure: MeshFailure) -> Any:
        asked.set()
        assert gate.wait(60)
        return heal_mesh(failure.mesh) if heals else True

    async def main() -> None:
        # Ranks that live are called at once; calls to all of them wait, and the loop does not.
        assert await workers.slice(gpus=0).note.call_one(0) == [0]
        calls = [workers.note.call(1), workers.note.call(2)]
        workers.note.broadcast(3)
        arrivals = list(workers.note.stream(4))
        await asyncio.sleep(0.1)
        assert not any(call.done for call in (*calls, *arrivals))
        gate.set()
        if heals:
            assert list((await calls[1]).values()) == [[0, 1, 2], [1, 2]]
            assert sorted([await each for each in arrivals]) == [[0, 1, 2, 3, 4], [1, 2, 3, 4]]
            assert list((await workers.note.call(5)).values()) == [[0, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5]]
            return
        for each in (*calls, *arrivals):
            with pytest.raises(SupervisionError, match="was killed by signal 9"):
                await each
        with pytest.raises(SupervisionError):
            await workers.note.call(5)
        with pytest.raises(SupervisionError):
            workers.note.call(5).get(20)

    with supervise(mesh, judge):
        os.kill(pids[1], signal.SIGKILL)
        assert asked.wait(20)
        asyncio.run(main())


def test_calls_after_stop_raise_supervision_errors(procs: Callable[..., Any]) -> None:
    mesh = procs(1)
    workers, others = mesh.spawn("workers", Worker), mesh.spawn("others", Worker)
    workers.stop().get(30)
    for call in (workers.pid.call, workers.pid.stream, workers.pid.broadcast):
        with pytest.raises(SupervisionError, match="was stopped") as caught:
            call()
        assert type(caught.value) is StoppedError
    mesh.stop().get(30)
    for touch in (lambda: others.pid.call().get(30), lambda: mesh.spawn("third", Worker)):
        with pytest.raises(SupervisionError, match="was stopped") as caught:
            touch()
        assert type(caught.value) is StoppedError and isinstance(caught.value, DeviceMeshError)
