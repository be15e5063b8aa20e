"""Futures: threads, event loops and notebook cells read them any number of times."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import warnings
from contextvars import ContextVar
from typing import Any

import pytest

from monarch.actor import Actor, Future, concurrent_endpoint, context, endpoint, returns_future
from monarch.exceptions import ActorError, ArgumentError, CallTimeoutError

NAME: ContextVar[str] = ContextVar("NAME", default="nobody")
ran: list[tuple[str, str]] = []


@returns_future
async def told(text: str, fails: bool = False) -> str:
    ran.append((text, NAME.get()))
    await asyncio.sleep(0)
    if fails:
        raise LookupError(text)
    return f"{text} of {context().actor_instance.name}"


class Teller(Actor):
    @endpoint
    def get(self) -> str:
        return told("get").get(20)


class AsyncTeller(Actor):
    @endpoint
    async def wait(self) -> tuple[str, str]:
        return await told("await"), told("inside").get(20)


class Gate(Actor):
    """Answers when another actor of the same proc asks it to."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()

    @concurrent_endpoint
    async def wait(self) -> str:
        await self.opened.wait()
        return "open"

    @endpoint
    async def open(self) -> None:
        self.opened.set()

    @endpoint
    async def fail(self) -> None:
        raise KeyError("gone")

    @endpoint
    async def ask(self, other: Any) -> list[Any]:
        future = other.value.call()
        first = await future
        again = await future
        return [list(first.values()), list(again.values()), future.get(timeout=5) is first]

    @endpoint(concurrent=True)
    async def value(self) -> int:
        return 5


@pytest.fixture
def gate(procs: Any) -> Any:
    return procs(1).spawn("gate", Gate).slice(gpus=0)


def test_get_can_be_called_again(gate: Any) -> None:
    future = gate.value.call_one()
    assert future.get(timeout=20) == future.get() == future.result() == 5
    assert future.exception() is None
    assert isinstance(future, Future) and "done" in repr(future)


def test_a_timeout_leaves_the_call_as_it_is(gate: Any) -> None:
    future = gate.wait.call_one()
    words = r"gate\.wait\(\) has not finished within 0\.05 s.*you can call get\(\) again"
    with pytest.raises(CallTimeoutError, match=words):
        future.get(timeout=0.05)
    with pytest.raises(TimeoutError):
        future.get(0)
    with pytest.raises(TimeoutError):
        future.exception(timeout=0.01)
    gate.open.call_one().get(timeout=20)
    assert future.get(timeout=20) == "open"


@pytest.mark.parametrize("timeout", [-1, -0.001, float("nan"), float("inf")])
def test_invalid_timeout_is_refused(gate: Any, timeout: float) -> None:
    future = gate.value.call_one()
    with pytest.raises(ValueError, match="of at least 0"):
        future.get(timeout=timeout)
    assert future.get(timeout=20) == 5


def test_an_error_is_raised_each_time_and_does_not_grow(gate: Any) -> None:
    future = gate.fail.call_one()
    lengths = []
    for _ in range(3):
        with pytest.raises(ActorError, match="gone") as caught:
            future.get(timeout=20)
        lengths.append(len(caught.traceback))
    assert len(set(lengths)) == 1
    assert isinstance(future.exception(), ActorError)


def test_await_in_asyncio_run(gate: Any) -> None:
    async def main() -> None:
        future = gate.value.call_one()
        assert await future == 5
        assert await future == 5
        assert await asyncio.gather(*(gate.value.call_one() for _ in range(50))) == [5] * 50
        late = gate.wait.call_one()
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(late.as_asyncio(), 0.05)
        await gate.open.call_one()
        assert await asyncio.wait_for(late, 20) == "open"
        with pytest.raises(ActorError, match="gone"):
            await gate.fail.call_one()

    asyncio.run(main())


def test_await_lets_other_tasks_run(gate: Any) -> None:
    async def main() -> None:
        late = gate.wait.call_one()

        async def opener() -> None:
            for _ in range(5):
                await asyncio.sleep(0)
            await gate.open.call_one()

        task = asyncio.create_task(opener())
        assert await late == "open"
        await task

    asyncio.run(asyncio.wait_for(main(), 20))


def test_await_in_an_async_endpoint(procs: Any) -> None:
    first = procs(1).spawn("first", Gate)
    second = procs(2).spawn("second", Gate)
    assert first.ask.call_one(second).get(timeout=20) == [[5, 5], [5, 5], True]
    # Its own endpoint too, if that is concurrent.
    assert first.ask.call_one(first).get(timeout=20) == [[5], [5], True]


def test_many_threads_wait_at_once(gate: Any) -> None:
    late = gate.wait.call_one()
    found: list[Any] = []

    def work(index: int) -> None:
        for _ in range(100):
            found.append(gate.value.call_one().get(timeout=20))
        found.append(late.get(timeout=20))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    gate.open.call_one().get(timeout=20)
    for thread in threads:
        thread.join(20)
    assert sorted(map(str, found)) == ["5"] * 400 + ["open"] * 4


def test_one_future_read_by_threads_and_a_loop_at_once(gate: Any) -> None:
    late = gate.wait.call_one()
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(late.get(timeout=20))) for _ in range(3)]
    for thread in threads:
        thread.start()

    async def main() -> None:
        task = asyncio.ensure_future(late.as_asyncio())
        await gate.open.call_one()
        found.append(await task)

    asyncio.run(asyncio.wait_for(main(), 20))
    for thread in threads:
        thread.join(20)
    assert found == ["open"] * 4


def test_get_works_inside_a_running_loop(gate: Any) -> None:
    async def cell() -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            first = gate.value.call_one().get(timeout=20)
        return first, await gate.value.call_one(), gate.value.call_one().get()

    assert asyncio.run(cell()) == (5, 5, 5)


def test_cancelling_a_waiter_does_not_cancel_the_call(gate: Any) -> None:
    async def main() -> None:
        late = gate.wait.call_one()
        waiter = asyncio.ensure_future(late.as_asyncio())
        await asyncio.sleep(0)
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter
        await gate.open.call_one()
        assert await late == "open"

    asyncio.run(asyncio.wait_for(main(), 20))


def test_as_asyncio_needs_a_loop(gate: Any) -> None:
    future = gate.value.call_one()
    with pytest.raises(RuntimeError, match="loop"):
        future.as_asyncio()
    assert future.get(timeout=20) == 5


def test_closed_loop_ignores_late_answer(gate: Any) -> None:
    late = gate.wait.call_one()

    async def main() -> None:
        late.as_asyncio()

    asyncio.run(main())
    gate.open.call_one().get(timeout=20)
    assert late.get(timeout=20) == "open"


def test_callbacks_run_once_before_or_after(gate: Any) -> None:
    late = gate.wait.call_one()
    called: list[Any] = []
    event = threading.Event()
    late.add_done_callback(lambda future: (called.append(future), event.set()))
    gate.open.call_one().get(timeout=20)
    assert event.wait(20)
    late.add_done_callback(called.append)
    assert called == [late, late]


def test_background_thread_receives_answers(gate: Any) -> None:
    late = gate.wait.call_one()
    event = threading.Event()
    late.add_done_callback(lambda _: event.set())
    gate.open.broadcast()
    assert event.wait(20)


def test_a_short_wait_ends_in_time(gate: Any) -> None:
    late = gate.wait.call_one()
    start = time.monotonic()
    with pytest.raises(TimeoutError):
        late.get(timeout=0.2)
    # A guard against a wait without end, and no measure of speed.
    assert 0.19 < time.monotonic() - start < 10
    gate.open.call_one().get(timeout=20)


def test_returned_future_runs_once_when_first_looked_at(host: Any) -> None:
    ran.clear()
    token = NAME.set("caller")
    futures = [told("a"), told("b"), told("c", fails=True), told("unseen")]
    NAME.reset(token)
    assert ran == []
    assert isinstance(futures[0], Future) and futures[0].get(20) == futures[0].get(20) == "a of root"

    async def look() -> list[str]:
        # The second one waits for the task of the first.
        both = await asyncio.gather(futures[1].as_asyncio(), futures[1].as_asyncio())
        return [*both, await futures[0]]

    assert asyncio.run(look()) == ["b of root", "b of root", "a of root"]
    assert futures[1].get(20) == "b of root" and isinstance(futures[2].exception(20), LookupError)
    with pytest.raises(LookupError, match="c"):
        asyncio.run(look_at(futures[2]))
    called = threading.Event()
    last = told("d")
    last.add_done_callback(lambda _: called.set())
    assert called.wait(20) and last.done
    assert ran == [("a", "caller"), ("b", "caller"), ("c", "caller"), ("d", "nobody")]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        futures.clear()
        gc.collect()


async def look_at(future: Future[str]) -> str:
    return await future


def test_returned_futures_work_in_actors(procs: Any) -> None:
    mesh = procs(1)
    assert mesh.spawn("sync", Teller).get.call_one().get(timeout=20) == "get of sync"
    found = mesh.spawn("later", AsyncTeller).wait.call_one().get(timeout=20)
    assert tuple(found) == ("await of later", "inside of later")


def test_returned_future_goes_on_after_a_timeout(host: Any) -> None:
    opened = threading.Event()

    @returns_future
    async def waits() -> str:
        await asyncio.to_thread(opened.wait)
        return "opened"

    future = waits()
    with pytest.raises(CallTimeoutError, match=r"waits\(\) has not finished"):
        future.get(0.05)
    opened.set()
    assert future.get(20) == "opened"
    wrong: Any = len
    with pytest.raises(ArgumentError, match="expected an async function, got len"):
        returns_future(wrong)
