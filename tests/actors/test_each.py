"""Different arguments for each actor: call_each, and a map over many items."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from leaks import wait_until
from monarch._groups.breaking import position
from monarch._meshes.actors import backpressure
from monarch._meshes.actors.ask import ask
from monarch._meshes.actors.each import UNREAD
from monarch.actor import Actor, current_rank, endpoint, this_host
from monarch.exceptions import ActorError, ArgumentError, DeviceMeshError, SendTimeoutError
from monarch.testing import local_hosts


class Worker(Actor):
    def __init__(self) -> None:
        self.done: list[Any] = []

    @endpoint
    def add(self, value: Any, more: int = 0, factor: int = 1) -> Any:
        self.done.append(value)
        return (current_rank().rank, value * factor + more)

    @endpoint
    def nbytes(self, array: Any) -> int:
        return int(array.nbytes)

    @endpoint
    def square(self, item: int) -> int:
        if item < 0:
            raise ValueError(f"negative: {item}")
        return item * item

    @endpoint
    def slow(self, item: float) -> int:
        time.sleep(item)
        self.done.append(item)
        return current_rank().rank

    @endpoint
    def hold(self, gate: str) -> None:
        if not gate:
            raise ValueError("no gate")
        assert wait_until(lambda: os.path.exists(gate))
        self.done.append(gate)

    @endpoint
    def pass_gate(self, gate: str) -> int:
        assert not gate or wait_until(lambda: os.path.exists(gate))
        return current_rank().rank

    @endpoint
    def die(self, item: int) -> int:
        if item == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return item

    @endpoint
    def took(self) -> int:
        return len(self.done)


@pytest.fixture(scope="module", params=["procs", "hosts"])
def workers(request: pytest.FixtureRequest, own_server: None) -> Iterator[Any]:
    with contextlib.ExitStack() as stack:
        hosts: Any = this_host() if request.param == "procs" else stack.enter_context(local_hosts(2))
        procs = hosts.spawn_procs({"gpus": 4 if request.param == "procs" else 2})
        workers = procs.spawn("workers", Worker)
        # Up, with its connections and shared memory, before the first test looks what there is.
        workers.nbytes.call_each([np.zeros(1 << 20)] * 4).get()
        list(workers.square.map(range(20)))
        yield workers
        procs.stop().get()


def test_each_actor_gets_its_own_value(workers: Any) -> None:
    values = workers.add.call_each([10, 20, 30, 40], 5, factor=2).get()
    assert list(values.values()) == [(rank, 20 * (rank + 1) + 5) for rank in range(4)]
    again = workers.add.call_each(workers.square.call_each([1, 2, 3, 4]).get()).get()
    assert list(again.values()) == [(rank, (rank + 1) ** 2) for rank in range(4)]


def test_large_values_arrive_at_their_rank(workers: Any) -> None:
    arrays = [np.zeros((rank + 1) << 20, np.uint8) for rank in range(4)]
    assert list(workers.nbytes.call_each(arrays).get().values()) == [(rank + 1) << 20 for rank in range(4)]


def test_view_gets_a_value_for_each_of_its_actors(workers: Any) -> None:
    label = workers.extent.labels[-1]
    view = workers.slice(**{label: 1})
    values = view.add.call_each(list(range(len(view)))).get()
    assert [value for _, value in values.values()] == list(range(len(view)))


@pytest.mark.parametrize("values", [[1, 2, 3], [1] * 5, 7, "four", {1: 2}])
def test_wrong_values_are_refused(workers: Any, values: Any) -> None:
    with pytest.raises(ArgumentError, match=r"workers\.add\.call_each: expected"):
        workers.add.call_each(values)


def test_call_each_reaches_all_or_none(procs: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In a collective of the endpoint, ranks before one without room would wait for it."""
    monkeypatch.setattr(backpressure, "ROOM_S", 0.5)
    workers, gate = procs(3).spawn("workers", Worker), tmp_path / "gate"
    behind = workers.slice(gpus=2)
    behind.hold.broadcast(str(gate))
    with pytest.raises(SendTimeoutError):
        for _ in range(50_000):
            behind.took.broadcast()
    with pytest.raises(
        SendTimeoutError, match=r"not sent to any rank: rank 2 of workers is \S+ messages behind"
    ) as raised:
        workers.add.call_each([1, 2, 3])
    assert raised.value.rank == 2
    gate.touch()
    assert list(workers.took.call().get(60).values()) == [0, 0, 1]
    assert list(workers.add.call_each([1, 2, 3]).get(60).values()) == [(0, 1), (1, 2), (2, 3)]


def test_map_yields_in_order(workers: Any) -> None:
    assert list(workers.square.map(range(50))) == [item * item for item in range(50)]
    assert list(workers.square.map([])) == []


def test_map_takes_items_as_needed(workers: Any) -> None:
    taken: list[int] = []

    def items() -> Iterator[int]:
        number = 0
        while True:
            taken.append(number)
            yield number
            number += 1

    results = workers.square.map(items())
    assert [next(results) for _ in range(5)] == [0, 1, 4, 9, 16]
    # The first answers may come late, and the other actors go on meanwhile.
    assert len(taken) <= 5 + UNREAD * 4


def test_few_results_wait_behind_a_slow_item(workers: Any, tmp_path: Path) -> None:
    gate, taken = tmp_path / "gate", list[str]()

    def items() -> Iterator[str]:
        while True:
            taken.append("" if taken else str(gate))
            yield taken[-1]

    opener = threading.Thread(target=lambda: wait_until(lambda: len(taken) >= UNREAD * 4) and gate.touch())
    opener.start()
    results = workers.pass_gate.map(items())
    next(results)
    opener.join()
    assert len(taken) == UNREAD * 4
    assert len([next(results) for _ in range(200)]) == 200 and len(taken) <= 201 + UNREAD * 4


def test_free_actors_take_the_next_items(workers: Any) -> None:
    before = list(workers.took.call().get().values())
    ranks = list(workers.slow.map([1.5] + [0.01] * 30))
    count = [after - old for after, old in zip(workers.took.call().get().values(), before, strict=True)]
    # The actor with the long item gets few others.
    assert sum(count) == 31 and count[ranks[0]] <= 3


def test_failed_item_raises_in_its_place(workers: Any) -> None:
    results = workers.square.map([2, -1, 3])
    assert next(results) == 4
    with pytest.raises(ActorError, match="negative: -1"):
        next(results)


class AsyncWorker(Actor):
    def __init__(self) -> None:
        self.done: list[Any] = []

    @endpoint
    async def hold(self, gate: str) -> None:
        if not gate:
            raise ValueError("no gate")
        while not os.path.exists(gate):
            await asyncio.sleep(0.005)
        self.done.append(gate)

    @endpoint
    async def took(self) -> int:
        return len(self.done)


@pytest.mark.parametrize("cls", [Worker, AsyncWorker])
def test_failed_item_drops_those_not_begun(cls: type[Any], tmp_path: Path) -> None:
    procs, gate = this_host().spawn_procs({"gpus": 2}), tmp_path / "gate"
    workers: Any = procs.spawn("workers", cls)
    with pytest.raises(ActorError, match="no gate"):
        next(workers.hold.map(["", *[str(gate)] * 9]))
    # An answer of each rank comes after it has handled the end of the map.
    ask(workers, position).get(20)
    gate.touch()
    # One of each actor may have begun.
    assert sum(workers.took.call().get(20).values()) <= 2
    results = workers.hold.map([str(gate)] * 20)
    next(results)
    results.close()
    assert len(workers.took.call().get(20).values()) == 2
    procs.stop().get()


def test_maps_of_two_threads_do_not_mix(workers: Any) -> None:
    found: dict[int, list[int]] = {}

    def run(start: int) -> None:
        found[start] = list(workers.square.map(range(start, start + 30)))

    threads = [threading.Thread(target=run, args=[start]) for start in (0, 1000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {start: [item * item for item in range(start, start + 30)] for start in (0, 1000)}


@pytest.mark.parametrize("items", [3, "abc"])
def test_map_of_no_items_is_refused(workers: Any, items: Any) -> None:
    with pytest.raises(ArgumentError, match=r"workers\.square\.map: expected an iterable"):
        workers.square.map(items)


def test_death_ends_the_map() -> None:
    procs = this_host().spawn_procs({"gpus": 2})
    workers = procs.spawn("workers", Worker)
    with pytest.raises(DeviceMeshError, match="SIGKILL"):
        list(workers.die.map(range(10)))
    procs.stop().get()
