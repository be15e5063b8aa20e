"""Messages of one sender to one receiver arrive in order and exactly once, over all adverbs and views."""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy
import pytest

from leaks import wait_until
from monarch.actor import Actor, Channel, endpoint, send


class Log(Actor):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    @endpoint
    def note(self, who: str, number: int, ballast: Any = None) -> int:
        self.seen.append((who, number))
        return len(self.seen)

    @endpoint(explicit_response_port=True)
    def note_by_port(self, port: Any, who: str, number: int) -> None:
        self.seen.append((who, number))
        port.send(len(self.seen))

    @endpoint
    def read(self) -> list[Any]:
        return self.seen


class AsyncLog(Log):
    @endpoint
    async def note(self, who: str, number: int, ballast: Any = None) -> int:
        # What comes before the first await runs in the order sent.
        self.seen.append((who, number))
        return len(self.seen)


class Sender(Actor):
    @endpoint
    def send_all(self, log: Any, who: str, count: int, seed: int) -> list[list[int]]:
        return send_all(log, who, count, seed)


def send_all(log: Any, who: str, count: int, seed: int) -> list[list[int]]:
    """Send to a mesh of 2x2 by all adverbs and views; return the numbers that each member must have."""
    rng = random.Random(seed)
    expected: list[list[int]] = [[] for _ in range(4)]
    port, receiver = Channel.open()
    views = [
        (log, [0, 1, 2, 3]),
        (log.slice(a=0), [0, 1]),
        (log.slice(b=1), [1, 3]),
        (log.flatten("all").slice(all=slice(3, 4)), [3]),
        (log.slice(a=1, b=0), [2]),
        (log.rename(a="x").slice(x=slice(0, 2), b=0), [0, 2]),
    ]
    futures: list[Any] = []
    for number in range(count):
        view, members = rng.choice(views)
        kind = rng.randrange(7)
        if kind == 0:
            futures.append(view.note.call(who, number))
        elif kind == 1:
            view.note.broadcast(who, number)
        elif kind == 2:
            futures.extend(view.note.stream(who, number))
        elif kind == 3:
            send(view.note, (who, number), {}, port)
        elif kind == 4:
            futures.append(view.note_by_port.call(who, number))
        elif kind == 5 and number % 10 == 0:
            # By shared memory.
            futures.append(view.note.call(who, number, numpy.zeros(200_000, numpy.uint8)))
        elif len(members) == 1:
            futures.append(view.note.call_one(who, number))
        else:
            send(view.note, (who, number))
        for member in members:
            expected[member].append(number)
    for future in futures:
        future.get()
    receiver.close()
    return expected


@pytest.mark.parametrize("cls", [Log, AsyncLog])
def test_order_holds_with_many_senders_and_threads(procs: Any, cls: type) -> None:
    log = procs({"a": 2, "b": 2}).spawn("log", cls)
    senders = procs(3).spawn("senders", Sender)
    runs = [senders.slice(gpus=index).send_all.call_one(log, f"sender {index}", 400, index) for index in range(3)]
    expected: dict[str, list[list[int]]] = {}

    def thread(name: str, seed: int) -> None:
        expected[name] = send_all(log, name, 400, seed)

    threads = [threading.Thread(target=thread, args=(f"thread {index}", 10 + index)) for index in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    for index, run in enumerate(runs):
        expected[f"sender {index}"] = run.get(timeout=60)
    seen = log.read.call().get(timeout=20)
    for member in range(4):
        for who, lists in expected.items():
            assert [number for name, number in seen[member] if name == who] == lists[member]
        assert len(seen[member]) == sum(len(lists[member]) for lists in expected.values())


def test_spawn_calls_and_stop_are_in_order(procs: Any) -> None:
    mesh = procs(2)
    futures = []
    for _ in range(20):
        log = mesh.spawn("log", Log)
        futures += [log.note.call("x", number) for number in range(3)]
        log.stop()
    assert [list(future.get(timeout=20).values()) for future in futures] == [[1, 1], [2, 2], [3, 3]] * 20


def test_replies_come_in_order_from_one_actor(procs: Any) -> None:
    log = procs(1).spawn("log", Log)
    order: list[int] = []
    futures = [log.note.call_one("x", number) for number in range(500)]
    for number, future in enumerate(futures):
        future.add_done_callback(lambda _, number=number: order.append(number))
    futures[-1].get(timeout=20)
    assert all(future.done for future in futures)
    assert [future.get() for future in futures] == list(range(1, 501))
    assert wait_until(lambda: len(order) == 500)
    assert sorted(order) == list(range(500))
