"""An actor handles one message at a time, also in async endpoints; concurrent endpoints overlap."""

from __future__ import annotations

import asyncio
import sys
import threading
from typing import Any

import pytest

from monarch._actors.interrupting import interrupt
from monarch._actors.table import actors_of
from monarch._meshes.actors.ask import ask
from monarch._node.current import current_node
from monarch.actor import Actor, Port, concurrent_endpoint, endpoint
from monarch.exceptions import ActorError


class Turns(Actor):
    def __init__(self) -> None:
        self.log: list[str] = []
        self.open = asyncio.Event()

    async def _visit(self, name: str) -> None:
        self.log.append(f"{name} begins")
        for _ in range(10):
            await asyncio.sleep(0)
        self.log.append(f"{name} ends")

    @endpoint
    async def visit(self, name: str) -> None:
        await self._visit(name)

    @endpoint
    def look(self, name: str) -> list[str]:
        self.log.append(name)
        return self.log

    @endpoint(explicit_response_port=True)
    async def visit_by_port(self, port: Port[str], name: str) -> None:
        port.send(name)
        await self._visit(name)

    @endpoint
    async def raises(self, name: str) -> None:
        await self._visit(name)
        raise ValueError(name)

    async def bare(self, name: str) -> None:
        await self._visit(name)

    @endpoint
    async def hold(self) -> str:
        self.log.append("held")
        await self.open.wait()
        return "let go"

    @concurrent_endpoint
    async def let_go(self) -> list[str]:
        self.open.set()
        return self.log

    @endpoint(concurrent=True, explicit_response_port=True)
    async def log_by_port(self, port: Port[list[str]]) -> None:
        port.send(self.log)


def test_async_endpoints_run_one_at_a_time(procs: Any) -> None:
    from monarch.actor import as_endpoint

    turns = procs(1).spawn("turns", Turns)
    calls = [
        turns.visit.call_one("a"),
        turns.visit.call_one("b"),
        turns.visit_by_port.call_one("c"),
        turns.raises.call_one("d"),
        as_endpoint(turns.bare).call_one("e"),
    ]
    turns.visit.broadcast("f")
    log = turns.look.call_one("g").get(timeout=20)
    assert log == [f"{name} {what}" for name in "abcdef" for what in ("begins", "ends")] + ["g"]
    assert [isinstance(call.exception(timeout=20), ActorError) for call in calls] == [False, False, False, True, False]


def test_concurrent_endpoint_begins_beside_others(procs: Any) -> None:
    turns = procs(1).spawn("turns", Turns)
    held, queued = turns.hold.call_one(), turns.look.call_one("later")
    assert turns.log_by_port.call_one().get(timeout=20) == ["held"]
    assert turns.let_go.call_one().get(timeout=20) == ["held"]
    assert held.get(timeout=20) == "let go"
    assert queued.get(timeout=20) == ["held", "later"]


def test_interrupt_of_a_queued_async_call_ends_only_that(procs: Any) -> None:
    turns = procs(1).spawn("turns", Turns)
    held, first, second = turns.hold.call_one(), turns.visit.call_one("a"), turns.visit.call_one("b")
    assert ask(turns, interrupt, turns._key, current_node().proc, first.port).get(20) == {0: True}
    with pytest.raises(ActorError, match="interrupted"):
        first.get(timeout=20)
    turns.let_go.call_one().get(timeout=20)
    assert held.get(timeout=20) == "let go" and second.get(timeout=20) is None
    assert turns.look.call_one("end").get(timeout=20) == ["held", "b begins", "b ends", "end"]


class Sync(Actor):
    def __init__(self) -> None:
        self.seen: list[str] = []

    @endpoint
    def hold(self, other: Any) -> None:
        other.hold.call_one().get()

    @endpoint
    def note(self, name: str) -> list[str]:
        self.seen.append(name)
        return self.seen


def test_interrupt_of_a_queued_sync_call_ends_only_that(procs: Any) -> None:
    mesh = procs(1)
    turns, sync = mesh.spawn("turns", Turns), mesh.spawn("sync", Sync)
    held, first, second = sync.hold.call_one(turns), sync.note.call_one("a"), sync.note.call_one("b")
    # It has arrived when a later message of the same sender has been answered.
    turns.log_by_port.call_one().get(timeout=20)
    assert ask(sync, interrupt, sync._key, current_node().proc, first.port).get(20) == {0: True}
    turns.let_go.call_one().get(timeout=20)
    held.get(timeout=20)
    with pytest.raises(ActorError, match="interrupted before it began"):
        first.get(timeout=20)
    assert second.get(timeout=20) == ["b"]


def test_concurrent_sync_method_is_refused() -> None:
    with pytest.raises(ValueError, match="expected an async method for a concurrent endpoint, got a sync one"):

        class Wrong(Actor):
            @endpoint(concurrent=True)
            def f(self) -> None: ...


class Computes(Actor):
    @endpoint
    def switch_interval(self, seconds: float | None = None) -> float:
        if seconds is not None:
            sys.setswitchinterval(seconds)
        return sys.getswitchinterval()


def test_rank_releases_the_gil_after_a_millisecond(procs: Any) -> None:
    mesh = procs(1)
    assert mesh.spawn("one", Computes).switch_interval.call_one().get(timeout=20) == pytest.approx(0.001)
    own = mesh.spawn("two", Computes)
    own.switch_interval.call_one(0.004).get(timeout=20)
    assert own.switch_interval.call_one().get(timeout=20) == pytest.approx(0.004)


class Target(Actor):
    def __init__(self) -> None:
        self.count = 0

    @endpoint
    def add(self) -> int:
        self.count += 1
        return self.count


class Neighbour(Actor):
    """Lives in the same process as the target, so its calls are delivered by its own thread."""

    @endpoint
    def interleave(self, target: Any) -> None:
        """Let another thread deliver its call before the first thread that queues one."""
        executor = actors_of(current_node()).here[target._key].executor
        deliver, first, other = executor.deliver, threading.Lock(), threading.Event()

        def wait_first(*args: Any) -> None:
            if first.acquire(blocking=False):
                assert other.wait(30)
                deliver(*args)
            else:
                deliver(*args)
                other.set()

        executor.deliver = wait_first  # pyright: ignore[reportAttributeAccessIssue]

    @endpoint
    def add(self, target: Any) -> int:
        return target.add.call_one().get(timeout=60)


def test_calls_of_two_threads_at_once_both_run(procs: Any) -> None:
    mesh = procs(1)
    target = mesh.spawn("target", Target)
    near = [mesh.spawn(name, Neighbour) for name in ("first", "second")]
    near[0].interleave.call(target).get(timeout=30)
    assert sorted(each.get(timeout=60) for each in [each.add.call_one(target) for each in near]) == [1, 2]
