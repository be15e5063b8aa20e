"""User code that breaks the event loop of its actor: calls are still answered, or fail with a death."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from monarch.actor import Actor, concurrent_endpoint, endpoint
from monarch.config import STOP_CANCEL, STOP_DRAIN
from monarch.exceptions import MonarchError, SupervisionError


class Looped(Actor):
    def __init__(self) -> None:
        self.seen: list[int] = []

    @endpoint
    async def ok(self) -> int:
        return 1

    @endpoint
    async def note(self, value: int) -> list[int]:
        await asyncio.sleep(0)
        self.seen.append(value)
        return self.seen

    @endpoint
    async def exit_in_task(self, error: type[BaseException]) -> str:
        async def leave() -> None:
            raise error(9)

        task = asyncio.create_task(leave())
        await asyncio.wait({task})
        return "cancelled" if task.cancelled() else type(task.exception()).__name__

    @endpoint
    async def exit_in_callback(self) -> int:
        asyncio.get_running_loop().call_soon(sys.exit, 3)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return 2

    @endpoint
    async def stop_loop(self) -> int:
        asyncio.get_running_loop().stop()
        await asyncio.sleep(0)
        return 3

    @endpoint
    async def break_factory(self) -> None:
        def fail(loop: Any, work: Any, **more: Any) -> Any:
            work.close()
            raise LookupError("broken on purpose")

        asyncio.get_running_loop().set_task_factory(fail)

    @concurrent_endpoint
    async def hold(self) -> None:
        await asyncio.Event().wait()

    @endpoint
    async def break_selector(self) -> None:
        asyncio.get_running_loop()._selector.close()  # pyright: ignore[reportAttributeAccessIssue]

    @endpoint
    async def block_in_callback(self) -> None:
        def block() -> None:
            while True:
                try:
                    time.sleep(0.01)
                except BaseException:
                    pass

        asyncio.get_running_loop().call_soon(block)


@pytest.fixture(params=["first", "second"])
def looped(request: pytest.FixtureRequest, procs: Callable[..., Any]) -> Any:
    """An async actor in the main thread of its rank, and one in a separate thread."""
    mesh = procs(1)
    actors = [mesh.spawn(name, Looped) for name in ("first", "second")]
    for actor in actors:
        actor.ok.call_one().get(timeout=20)
    return actors[request.param == "second"]


@pytest.mark.parametrize("error", [SystemExit, GeneratorExit, asyncio.CancelledError, KeyboardInterrupt])
def test_an_exit_raised_in_a_task_leaves_the_actor_working(looped: Any, error: type[BaseException]) -> None:
    expected = "cancelled" if error is asyncio.CancelledError else error.__name__
    assert looped.exit_in_task.call_one(error).get(timeout=20) == expected
    assert looped.ok.call_one().get(timeout=20) == 1


def test_an_exit_raised_in_a_callback_leaves_the_actor_working(looped: Any) -> None:
    assert looped.exit_in_callback.call_one().get(timeout=20) == 2
    assert looped.ok.call_one().get(timeout=20) == 1


def test_stopping_the_loop_leaves_the_actor_working(looped: Any) -> None:
    assert looped.stop_loop.call_one().get(timeout=20) == 3
    looped.note.broadcast(4)
    assert looped.note.call_one(5).get(timeout=20) == [4, 5]


def test_a_broken_task_factory_does_not_reach_the_runtime(looped: Any) -> None:
    looped.break_factory.call_one().get(timeout=20)
    assert looped.ok.call_one().get(timeout=20) == 1
    looped.stop().get(timeout=20)


def test_a_broken_loop_fails_the_calls_of_its_actor(procs: Callable[..., Any]) -> None:
    mesh = procs(1)
    first, second = mesh.spawn("first", Looped), mesh.spawn("second", Looped)
    held = second.hold.call_one()
    second.break_selector.call_one().get(timeout=20)
    with pytest.raises(MonarchError, match="its event loop failed: ValueError"):
        held.get(timeout=20)
    with pytest.raises(MonarchError, match="its event loop failed: ValueError"):
        second.ok.call_one().get(timeout=20)
    assert first.ok.call_one().get(timeout=20) == 1
    first.break_selector.call_one().exception(timeout=20)
    with pytest.raises(SupervisionError, match="exited with code 1"):
        first.ok.call_one().get(timeout=20)


def test_a_stop_that_a_callback_blocks_names_no_endpoint(procs: Callable[..., Any]) -> None:
    mesh = procs(1, env={STOP_DRAIN.variable: "0.3", STOP_CANCEL.variable: "0.1"})
    mesh.spawn("other", Looped)
    looped = mesh.spawn("looped", Looped)
    looped.block_in_callback.call_one().get(timeout=20)
    with pytest.raises(MonarchError, match=r"a background task or callback of looped.* did not finish within 0.3 s"):
        looped.stop().get(timeout=20)
