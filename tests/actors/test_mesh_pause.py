"""``mesh.pause()``, ``where``, ``evaluate`` and ``resume`` in programs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from leaks import wait_until
from monarch.actor import Actor, endpoint
from monarch.debug import Frame, Position
from monarch.exceptions import ArgumentError

SOON = 20.0


class Trainer(Actor):
    @endpoint
    def train(self, steps: int) -> int:
        step = 0
        while step < steps:
            step += 1
            time.sleep(0.001)
        return step

    @endpoint
    def write(self, path: str) -> None:
        while not Path(f"{path}.end").exists():
            with open(path, "a") as file:
                file.write("x")

    @endpoint
    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class Server(Actor):
    def __init__(self) -> None:
        self.served = 0

    @endpoint
    async def serve_all(self, end: str) -> int:
        while not Path(end).exists():
            await asyncio.sleep(0.01)
            self.served += 1
        return self.served

    @endpoint
    async def serve(self, value: int) -> int:
        return value


@pytest.fixture
def mesh(procs: Any) -> Iterator[Any]:
    made = procs(2)
    yield made
    made.resume()


def runs(mesh: Any) -> set[str]:
    """Return the functions in which the ranks are; before an actor runs, its module may be imported."""
    ranks = mesh.where().values()
    return {each.frames[0].function if each.state == "running" and each.frames else "" for each in ranks}


def test_ranks_pause_are_looked_at_and_resume(mesh: Any) -> None:
    training = mesh.spawn("trainer", Trainer).train.call(2000)
    assert wait_until(lambda: runs(mesh) == {"train"})
    paused = mesh.pause().values()
    assert all(isinstance(each, Position) and each.state == "paused" for each in paused)
    assert all(isinstance(each.frames[0], Frame) and each.frames[0].function == "train" for each in paused)
    steps = mesh.evaluate("step").values()
    assert mesh.evaluate("step").values() == steps and mesh.evaluate("steps").item(gpus=0) == "2000"
    assert mesh.slice(gpus=0).resume().values() == [True]
    assert wait_until(lambda: [each.state for each in mesh.where().values()] == ["idle", "paused"])
    assert mesh.resume().values() == [False, True]
    assert training.get(timeout=SOON).values() == [2000, 2000]


@pytest.mark.parametrize("beside", [False, True], ids=["main thread", "thread"])
def test_endpoint_that_awaits_pauses_where_it_wakes(mesh: Any, tmp_path: Path, beside: bool) -> None:
    if beside:
        # Has the main thread, so the next actor gets a thread of its own.
        mesh.spawn("first", Trainer).sleep.call(0).get(timeout=SOON)
    serving = mesh.spawn("server", Server).serve_all.call(str(tmp_path / "end"))
    assert wait_until(lambda: runs(mesh) == {"serve_all"})
    mesh.pause()
    assert wait_until(lambda: [each.state for each in mesh.where().values()] == ["paused"] * 2)
    served = mesh.evaluate("self.served").values()
    (tmp_path / "end").touch()
    assert mesh.evaluate("self.served").values() == served
    assert mesh.resume().values() == [True, True]
    assert len(serving.get(timeout=SOON).values()) == 2


def test_idle_async_actor_pauses_at_its_next_call(mesh: Any) -> None:
    server = mesh.spawn("server", Server)
    assert server.serve.call(1).get(timeout=SOON).values() == [1, 1]
    part = mesh.slice(gpus=slice(1, 2))
    assert [each.state for each in part.pause().values()] == ["idle"]
    assert all("rank 1 at [0]" in repr(each) for each in (part.where(), part.evaluate("1"), part.threads()))
    answers = server.serve.call(2)
    assert wait_until(lambda: mesh.where().values()[1].state == "paused")
    assert not answers.done
    assert mesh.resume().values() == [False, True]
    assert answers.get(timeout=SOON).values() == [2, 2]


def test_actors_in_threads_pause_too(mesh: Any) -> None:
    """The second actor of a rank runs in a thread of its own."""
    server = mesh.spawn("server", Server)
    assert server.serve.call(1).get(timeout=SOON).values() == [1, 1]
    trainer = mesh.spawn("trainer", Trainer)
    for _ in range(5):
        training = trainer.train.call(300)
        assert wait_until(lambda: runs(mesh) == {"train"})
        paused = mesh.pause().values()
        assert [(each.state, each.frames[0].function) for each in paused] == [("paused", "train")] * 2, paused
        steps = mesh.evaluate("step").values()
        assert mesh.evaluate("step").values() == steps
        assert mesh.resume().values() == [True, True]
        assert training.get(timeout=SOON).values() == [300, 300]


def test_long_sleep_of_a_thread_pauses_at_once(mesh: Any) -> None:
    mesh.spawn("server", Server).serve.call(1).get(timeout=SOON)
    trainer = mesh.spawn("trainer", Trainer)
    sleeping = trainer.sleep.call(2.0)
    assert wait_until(lambda: runs(mesh) == {"sleep"})
    paused = mesh.pause().values()
    assert [(each.state, each.frames[0].function) for each in paused] == [("paused", "sleep")] * 2, paused
    mesh.resume()
    assert sleeping.get(timeout=SOON).values() == [None, None]


def test_all_threads_of_a_rank_pause(procs: Any, tmp_path: Path) -> None:
    mesh = procs(1)
    paths = [tmp_path / f"{number}" for number in range(3)]
    trainers = [mesh.spawn(path.name, Trainer) for path in paths]
    writing = [trainer.write.call_one(str(path)) for trainer, path in zip(trainers, paths, strict=True)]
    assert wait_until(lambda: all(path.exists() for path in paths))

    def count() -> list[int]:
        return [path.stat().st_size for path in paths]

    assert mesh.pause().values()[0].state == "paused"

    def is_still() -> bool:
        before = count()
        return mesh.evaluate("1 + 1").values() == ["2"] and count() == before

    # The first thread is paused, and the others are at their next line.
    assert wait_until(is_still)
    before = count()
    assert is_still() and count() == before
    mesh.resume()
    assert wait_until(lambda: all(now > then for now, then in zip(count(), before, strict=True)))
    for path in paths:
        path.with_suffix(".end").touch()
    assert [each.get(timeout=SOON) for each in writing] == [None] * 3


def test_wrong_expressions_are_refused(mesh: Any) -> None:
    with pytest.raises(ArgumentError, match="is not an expression: invalid syntax"):
        mesh.evaluate("x = 1")
    with pytest.raises(ArgumentError, match="all_reduce would wait for other ranks"):
        mesh.evaluate("dist.all_reduce(x)")
    with pytest.raises(ArgumentError, match=r"up: expected a number from 0 to .*, got -1"):
        mesh.evaluate("x", up=-1)
    assert "NameError" in mesh.evaluate("missing").item(gpus=0)


def test_dead_ranks_are_named(mesh: Any) -> None:
    mesh.stop().get()
    assert [each.state for each in mesh.where().values()] == ["dead", "dead"]
