"""An interrupt ends one call and the programs that it started, and no call ahead of it or behind it."""

from __future__ import annotations

import asyncio
import ctypes
import os
import pickle
import re
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from leaks import processes, wait_until
from monarch._actors import interrupting
from monarch._actors.interrupts import ThreadInterrupt, raised
from monarch._meshes.actors.ask import ask
from monarch._node.current import current_node
from monarch.actor import Actor, endpoint
from monarch.exceptions import ActorError, CallTimeoutError


class Runs(Actor):
    @endpoint
    def run(self, command: str) -> int:
        return subprocess.run(command, shell=True).returncode

    @endpoint
    def have_worker(self) -> int:
        import multiprocessing

        self.queue = multiprocessing.get_context("fork").Queue()
        self.worker = multiprocessing.get_context("fork").Process(target=self.queue.get, daemon=True)
        self.worker.start()
        return self.worker.pid or 0

    @endpoint
    def worker_lives(self) -> bool:
        return self.worker.is_alive()


def interrupt(actors: Any, call: Any) -> Any:
    return ask(actors, interrupting.interrupt, actors._key, current_node().proc, call.port).get(20)


@pytest.mark.parametrize("place", [0, 1])
def test_interrupt_ends_programs_that_the_call_has_started(procs: Any, tmp_path: Path, place: int) -> None:
    mesh = procs(1)
    runs = [mesh.spawn(name, Runs) for name in ("first", "second")][place]
    runs.have_worker.call_one().get(timeout=20)
    begun = tmp_path / "begun"
    call = runs.run.call_one(f"touch {begun}; sleep 1000; true")
    assert wait_until(begun.exists) and wait_until(lambda: "sleep" in processes().values())
    assert interrupt(runs, call) == {0: True}
    with pytest.raises(ActorError, match="KeyboardInterrupt"):
        call.get(timeout=20)
    assert wait_until(lambda: "sleep" not in processes().values(), 5)
    assert runs.worker_lives.call_one().get(timeout=20)


class Spins(Actor):
    @endpoint
    def loop(self) -> None:
        while True:
            pass

    @endpoint
    def ok(self) -> int:
        return 1


class SpinsAsync(Actor):
    @endpoint
    async def loop(self) -> None:
        await asyncio.Event().wait()

    @endpoint
    async def ok(self) -> int:
        return 1


@pytest.fixture(params=[("first", Spins), ("second", Spins), ("first", SpinsAsync), ("second", SpinsAsync)])
def spins(request: pytest.FixtureRequest, procs: Any) -> Any:
    """An actor in the main thread of its rank or in a separate thread, sync or async."""
    name, cls = request.param
    mesh = procs(1)
    actors = {each: mesh.spawn(each, cls) for each in ("first", "second")}
    actors[name].ok.call_one().get(timeout=20)
    return actors[name]


def test_interrupt_of_a_queued_call_spares_the_one_in_front(spins: Any) -> None:
    front = spins.loop.call_one()
    behind = spins.ok.call_one()
    assert interrupt(spins, behind) == {0: True}
    with pytest.raises(ActorError, match=r"KeyboardInterrupt|CancelledError"):
        behind.get(timeout=20)
    after = spins.ok.call_one()
    with pytest.raises(CallTimeoutError):
        after.get(timeout=0.2)
    assert interrupt(spins, front) == {0: True}
    with pytest.raises(ActorError, match=r"KeyboardInterrupt|CancelledError"):
        front.get(timeout=20)
    assert after.get(timeout=20) == 1


class SlowToBegin(Actor):
    def __init__(self, go: str) -> None:
        while not os.path.exists(go):
            time.sleep(0.01)

    @endpoint
    def ok(self) -> int:
        return 1


def test_wait_behind_a_constructor_reports_its_time(procs: Any, tmp_path: Path) -> None:
    begun = time.monotonic()
    slow = procs(1).spawn("slow", SlowToBegin, str(tmp_path / "go"))
    with pytest.raises(CallTimeoutError, match=r"still runs? slow\.__init__\(\), started (\d+) s ago") as caught:
        slow.ok.call().get(timeout=1)
    said = re.search(r"started (\d+) s ago", str(caught.value))
    assert said is not None and int(said[1]) <= time.monotonic() - begun + 1
    (tmp_path / "go").touch()
    assert next(iter(slow.ok.call().get(timeout=30).values())) == 1


@pytest.mark.slow
def test_wait_behind_another_call_names_it(spins: Any, capfd: pytest.CaptureFixture[str]) -> None:
    front = spins.loop.call_one()
    behind = spins.ok.call_one()
    with pytest.raises(
        CallTimeoutError, match=r"ok\(\) has not .*rank 0 still runs \w+.loop\(\), started \d+ s ago; it"
    ):
        behind.get(timeout=1)
    waiter = threading.Thread(target=behind.get)
    waiter.start()
    said: list[str] = []

    def is_said() -> bool:
        said.append(capfd.readouterr().err)
        return "ok() is waiting: rank 0 still runs" in "".join(said)

    assert wait_until(is_said), said
    interrupt(spins, front)
    assert behind.get(timeout=20) == 1
    waiter.join(20)


class Holds(Actor):
    def __init__(self) -> None:
        self.notes: list[int] = []

    @endpoint
    def hold(self, path: Path) -> None:
        path.touch()
        # PyDLL keeps the GIL, so that nothing else of this process runs.
        ctypes.PyDLL(None).usleep(700_000)

    @endpoint
    def note(self, number: int) -> None:
        self.notes.append(number)

    @endpoint
    def read(self) -> list[int]:
        return self.notes


@pytest.mark.parametrize("place", [0, 1])
def test_call_interrupted_while_another_keeps_the_gil_never_runs(procs: Any, tmp_path: Path, place: int) -> None:
    mesh = procs(1)
    holds = [mesh.spawn(name, Holds) for name in ("first", "second")][place]
    for number in range(3):
        path = tmp_path / str(number)
        held = holds.hold.call_one(path)
        assert wait_until(path.exists)
        noted = holds.note.call_one(number)
        assert interrupt(holds, noted) == {0: True}
        held.get(20)
        with pytest.raises(ActorError, match="interrupted before it began"):
            noted.get(20)
    assert holds.read.call_one().get(20) == []


def test_interrupt_that_is_copied_counts_as_raised_nowhere_else() -> None:
    """Actors keep errors, and pickle them; where one is loaded, nobody has been interrupted."""
    ident = threading.get_ident()
    error = ThreadInterrupt()
    assert raised.pop(ident) is error
    copied = pickle.loads(pickle.dumps(error))
    assert type(copied) is KeyboardInterrupt
    assert ident not in raised
