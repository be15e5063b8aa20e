"""Deadlocks of actors raise an error that names the actors, and the actors stay usable."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest

from monarch.actor import Actor, endpoint
from monarch.exceptions import ActorError, DeadlockError, SupervisionError


class Link(Actor):
    def __init__(self, name: str) -> None:
        self.name = name

    @endpoint
    def follow(self, chain: list[Any]) -> str:
        if not chain:
            return self.name
        return self.name + chain[0].follow.call_one(chain[1:]).get()

    @endpoint
    def follow_all(self, mesh: Any) -> int:
        return len(mesh.follow.call([]).get())

    @endpoint
    def fine(self) -> str:
        return self.name

    @endpoint
    def sleep_on(self, path: str) -> str:
        import time

        # Until the test says so; it ends by itself if that never comes.
        deadline = time.monotonic() + 30
        while not os.path.exists(path) and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.name


class AsyncLink(Actor):
    @endpoint
    async def follow(self, chain: list[Any]) -> int:
        return 1 + (await chain[0].follow.call_one(chain[1:]) if chain else 0)

    @endpoint(concurrent=True)
    async def overlap(self, chain: list[Any]) -> int:
        return 1 + (await chain[0].overlap.call_one(chain[1:]) if chain else 0)

    @endpoint
    async def follow_both(self, other: Any, me: Any) -> list[int]:
        return await asyncio.gather(other.follow.call_one([]), other.follow.call_one([me]))

    @endpoint
    async def follow_one(self, chain: list[Any]) -> int:
        """Start a call and return without its answer, so there is no deadlock."""
        waiting = chain[0].follow.call_one(chain[1:]).as_asyncio()
        await asyncio.sleep(0.3)
        return int(not waiting.done())

    @endpoint
    async def overlap_from_turn(self, other: Any, me: Any) -> int:
        await asyncio.sleep(0.15)
        return await other.overlap.call_one([me, other, me])

    @endpoint
    async def wait_in_sync(self, me: Any) -> int:
        return me.overlap.call_one([]).get()

    @endpoint
    async def fine(self) -> int:
        return 1


def check(error: BaseException | None, *words: str) -> None:
    assert isinstance(error, (ActorError, DeadlockError)), error
    text = str(error)
    assert "DeadlockError" in text or isinstance(error, DeadlockError)
    for word in words:
        assert word in text, text


def test_actor_waiting_for_itself_raises(procs: Any) -> None:
    one = procs(1).spawn("one", Link, "1")
    check(one.follow.call_one([one]).exception(timeout=20), "one[gpus=0].follow() waits for one.follow()")
    assert one.fine.call_one().get(timeout=20) == "1"


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("same_proc", [False, True])
def test_cycle_of_calls_raises(procs: Any, count: int, same_proc: bool) -> None:
    if same_proc:
        mesh = procs(1)
        links = [mesh.spawn(f"link{index}", Link, str(index)) for index in range(count)]
    else:
        whole = procs(count)
        links = [whole.slice(gpus=index).spawn(f"link{index}", Link, str(index)) for index in range(count)]
    error = links[0].follow.call_one([*links[1:], links[0]]).exception(timeout=20)
    check(error, *(f"link{index}" for index in range(count)))
    assert [link.fine.call_one().get(timeout=20) for link in links] == [str(index) for index in range(count)]
    assert links[0].follow.call_one(links[1:]).get(timeout=20) == "".join(map(str, range(count)))


def test_member_calling_its_whole_mesh_raises(procs: Any) -> None:
    links = procs(3).spawn("links", Link, "x")
    error = links.slice(gpus=1).follow_all.call_one(links).exception(timeout=20)
    check(error, "links[gpus=1]")
    assert list(links.fine.call().get(timeout=20).values()) == ["x"] * 3


def test_two_cycles_at_once_raise(procs: Any) -> None:
    links = [procs(1).spawn(f"link{index}", Link, str(index)) for index in range(4)]
    errors = [
        links[0].follow.call_one([links[1], links[0]]),
        links[2].follow.call_one([links[3], links[2]]),
    ]
    for error in errors:
        check(error.exception(timeout=20))
    assert [link.fine.call_one().get(timeout=20) for link in links] == ["0", "1", "2", "3"]


def test_two_actors_calling_each_other_raise(procs: Any) -> None:
    one, two = procs(1).spawn("one", Link, "1"), procs(1).spawn("two", Link, "2")
    for _ in range(20):
        futures = one.follow.call_one([two]), two.follow.call_one([one])
        outcomes = [future.exception(timeout=20) for future in futures]
        for outcome in outcomes:
            if outcome is not None:
                check(outcome)
        assert one.fine.call_one().get(timeout=20) == "1" and two.fine.call_one().get(timeout=20) == "2"


def test_long_wait_is_no_deadlock(procs: Any, tmp_path: Any) -> None:
    one, two = procs(1).spawn("one", Link, "1"), procs(1).spawn("two", Link, "2")
    busy = two.sleep_on.call_one(str(tmp_path / "go"))
    waiting = [one.follow.call_one([two]) for _ in range(3)]
    with pytest.raises(TimeoutError):
        waiting[-1].get(timeout=1.5)
    (tmp_path / "go").touch()
    assert busy.get(timeout=20) == "2"
    assert [future.get(timeout=20) for future in waiting] == ["12"] * 3


def test_concurrent_endpoints_in_a_cycle_do_not_deadlock(procs: Any) -> None:
    one, two = procs(1).spawn("one", AsyncLink), procs(1).spawn("two", AsyncLink)
    assert one.overlap.call_one([two, one, two, one]).get(timeout=20) == 5
    assert one.overlap.call_one([one, one]).get(timeout=20) == 3
    assert one.overlap_from_turn.call_one(two, one).get(timeout=20) == 4


def test_async_endpoints_that_await_in_a_cycle_raise(procs: Any) -> None:
    one, two = procs(1).spawn("one", AsyncLink), procs(1).spawn("two", AsyncLink)
    check(one.follow.call_one([one]).exception(timeout=20), "one[gpus=0].follow() waits for one.follow()")
    check(one.follow.call_one([two, one]).exception(timeout=20), "one[gpus=0]", "two[gpus=0]", "concurrent=True")
    check(one.follow_both.call_one(two, one).exception(timeout=20), "one[gpus=0].follow_both() waits for two.follow()")
    check(one.wait_in_sync.call_one(one).exception(timeout=20), "one[gpus=0].wait_in_sync() waits for one.overlap()")
    mixed = procs(1).spawn("mixed", Link, "m")
    check(one.follow.call_one([mixed, one]).exception(timeout=20), "mixed[gpus=0].follow()")
    assert [each.fine.call_one().get(timeout=20) for each in (one, two, mixed)] == [1, 1, "m"]
    assert one.follow.call_one([two]).get(timeout=20) == 2


def test_async_endpoint_that_can_continue_is_no_deadlock(procs: Any) -> None:
    one, two = procs(1).spawn("one", AsyncLink), procs(1).spawn("two", AsyncLink)
    assert one.follow_one.call_one([two, one]).get(timeout=20) == 1
    assert two.fine.call_one().get(timeout=20) == 1


def test_death_in_a_chain_of_calls_raises(procs: Any) -> None:
    class Dies(Actor):
        @endpoint
        def follow(self, chain: list[Any]) -> str:
            os._exit(9)

    one, dies = procs(1).spawn("one", Link, "1"), procs(1).spawn("dies", Dies)
    error = one.follow.call_one([dies]).exception(timeout=20)
    assert "exited with code 9" in str(error) and isinstance(error, (ActorError, SupervisionError))
    assert one.fine.call_one().get(timeout=20) == "1"
