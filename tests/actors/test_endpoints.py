"""Endpoints: sync, async, with an explicit port, without a decorator, and invalid ones."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from monarch.actor import Actor, Port, as_endpoint, concurrent_endpoint, endpoint
from monarch.exceptions import ActorError, ArgumentError, NotAnEndpointError


class Kinds(Actor):
    def __init__(self, base: int = 0) -> None:
        self.base = base
        self.inside = 0
        self.most = 0

    @endpoint
    def plain(self, x: int, *, twice: bool = False) -> int:
        return self.base + x * (2 if twice else 1)

    @endpoint
    def explicit_in_words(self, a: int, /, b: int = 2, *rest: int, c: int, **more: int) -> Any:
        return a, b, rest, c, more

    def bare(self, x: int) -> int:
        return self.base - x

    def bare_port(self, port: Port[int], x: int) -> None:
        port.send(x * 10)

    @endpoint
    def inner(self, x: int) -> Any:
        # On the actor itself an endpoint is the plain method.
        return self.plain(x)  # pyright: ignore[reportCallIssue]

    @endpoint(explicit_response_port=True)
    def through_port(self, port: Port[Any], x: int) -> str:
        port.send(x + 1)
        return "dropped"

    @endpoint(explicit_response_port=True)
    def keeps_port(self, port: Port[Any]) -> None:
        threading.Timer(0.01, port.send, ("later",)).start()

    @endpoint(explicit_response_port=True)
    def raises_by_port(self, port: Port[Any]) -> None:
        port.exception(ValueError("by port"))

    @endpoint(explicit_response_port=True)
    def drops_port(self, port: Port[Any]) -> None:
        pass

    @endpoint
    def thread_name(self) -> bool:
        return threading.current_thread() is threading.main_thread()


class Async(Actor):
    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.inside = self.most = 0

    @endpoint(concurrent=True)
    async def wait(self) -> int:
        self.inside += 1
        self.most = max(self.most, self.inside)
        await self.open.wait()
        self.inside -= 1
        return self.most

    @concurrent_endpoint
    async def wait_too(self) -> int:
        await self.open.wait()
        return 7

    @endpoint
    async def let_go(self) -> None:
        self.open.set()

    @endpoint
    def sync_among_async(self) -> int:
        return self.inside

    @endpoint(explicit_response_port=True, concurrent=True)
    async def late(self, port: Port[int]) -> None:
        await self.open.wait()
        port.send(3)

    @endpoint
    async def running_loop(self) -> bool:
        return asyncio.get_running_loop() is not None

    async def bare(self, x: int) -> int:
        await asyncio.sleep(0)
        return x


def test_sync_endpoints_take_arguments_of_every_kind(procs: Any) -> None:
    kinds = procs(2).spawn("kinds", Kinds, base=10)
    assert list(kinds.plain.call(1).get(timeout=20).values()) == [11, 11]
    assert kinds.slice(gpus=1).plain.call_one(1, twice=True).get(timeout=20) == 12
    answer = kinds.explicit_in_words.call(1, 2, 3, 4, c=5, d=6).get(timeout=20)
    assert answer[0] == (1, 2, (3, 4), 5, {"d": 6})
    assert kinds.inner.call(4).get(timeout=20)[1] == 14
    assert kinds.slice(gpus=0).thread_name.call_one().get(timeout=20)


def test_arguments_are_checked_before_anything_is_sent(procs: Any) -> None:
    kinds = procs(1).spawn("kinds", Kinds)
    for args, kwargs in [((), {}), ((1, 2), {}), ((1,), {"thrice": True}), ((1,), {"x": 2})]:
        with pytest.raises(TypeError, match=r"Kinds\.plain\(\): .*signature is \(x"):
            kinds.plain.call(*args, **kwargs)
    with pytest.raises(ArgumentError, match="missing"):
        kinds.explicit_in_words.broadcast(1)
    with pytest.raises(ArgumentError, match="too many positional"):
        kinds.through_port.call_one(1, 2)
    assert kinds.plain.call_one(1).get(timeout=20) == 1


def test_unknown_way_to_call_is_told_with_the_nearest(procs: Any) -> None:
    endpoint = procs(1).spawn("kinds", Kinds).plain
    with pytest.raises(
        AttributeError, match=r"<endpoint plain of kinds> has no attribute 'cal'; did you mean 'call'\?"
    ):
        endpoint.cal(1)
    with pytest.raises(AttributeError, match=r"has no attribute 'x'; it has broadcast, call, .*choose"):
        endpoint.x


def test_constructor_arguments_are_checked_by_spawn(procs: Any) -> None:
    mesh = procs(1)
    with pytest.raises(TypeError, match="Kinds"):
        mesh.spawn("kinds", Kinds, 1, 2)
    with pytest.raises(TypeError, match="Async"):
        mesh.spawn("async", Async, 1)


def test_concurrent_endpoints_of_one_actor_overlap(procs: Any) -> None:
    one = procs(1).spawn("one", Async).flatten("all").slice(all=0)
    waiting = [one.wait.call_one() for _ in range(5)]
    other = one.wait_too.call_one()
    assert one.running_loop.call_one().get(timeout=20)
    assert one.sync_among_async.call_one().get(timeout=20) == 5
    assert not any(future.done for future in waiting)
    one.let_go.call_one().get(timeout=20)
    assert [future.get(timeout=20) for future in waiting] == [5] * 5
    assert other.get(timeout=20) == 7


def test_explicit_port_may_answer_later(procs: Any) -> None:
    kinds = procs(2).spawn("kinds", Kinds)
    assert list(kinds.through_port.call(1).get(timeout=20).values()) == [2, 2]
    assert list(kinds.keeps_port.call().get(timeout=20).values()) == ["later"] * 2
    with pytest.raises(ActorError, match="by port"):
        kinds.raises_by_port.call().get(timeout=20)
    one = kinds.slice(gpus=1)
    with pytest.raises(ActorError, match="ValueError: by port") as caught:
        one.raises_by_port.call_one().get(timeout=20)
    assert isinstance(caught.value.exception, ValueError)


def test_dropped_response_port_raises(procs: Any) -> None:
    kinds = procs(1).spawn("kinds", Kinds)
    with pytest.raises(Exception, match=r"kinds\[gpus=0\].drops_port\(\) dropped its response port without a reply"):
        kinds.drops_port.call_one().get(timeout=20)
    kinds.drops_port.broadcast()
    assert kinds.plain.call_one(1).get(timeout=20) == 1


def test_async_endpoint_answers_on_explicit_port(procs: Any) -> None:
    one = procs(1).spawn("one", Async)
    late = one.late.call_one()
    one.let_go.call_one().get(timeout=20)
    assert late.get(timeout=20) == 3


def test_methods_without_a_decorator_are_callable(procs: Any) -> None:
    kinds = procs(1).spawn("kinds", Kinds, 5)
    assert as_endpoint(kinds.bare).call_one(1).get(timeout=20) == 4
    assert as_endpoint(kinds.bare_port, explicit_response_port=True).call_one(4).get(timeout=20) == 40
    with pytest.raises(NotAnEndpointError, match=r"kinds\.bare is a method, not an endpoint; decorate it"):
        kinds.bare(1)
    with pytest.raises(RuntimeError):
        kinds.bare(1)
    with pytest.raises(ArgumentError, match="'call' is for endpoints"):
        kinds.bare.call(1)
    with pytest.raises(TypeError):
        as_endpoint(kinds.bare).call_one()
    with pytest.raises(ValueError, match="method of a spawned actor"):
        as_endpoint(lambda x: x)
    one = procs(1).spawn("one", Async)
    assert as_endpoint(one.bare).call_one(9).get(timeout=20) == 9


def test_undecorated_async_method_on_sync_actor_is_an_error(procs: Any) -> None:
    class Sync(Actor):
        @endpoint
        def f(self) -> int:
            return 1

        async def g(self) -> int:
            return 2

    sync = procs(1).spawn("sync", Sync)
    with pytest.raises(Exception, match="async"):
        as_endpoint(sync.g).call_one().get(timeout=20)
    assert sync.f.call_one().get(timeout=20) == 1


@pytest.mark.parametrize("name", ["slice", "stop", "size", "flatten", "extent", "initialized", "rename", "to_table"])
def test_endpoint_named_like_a_mesh_attribute_is_refused(procs: Any, name: str) -> None:
    cls = type("Taken", (Actor,), {name: endpoint(lambda self: 1)})
    with pytest.raises(ValueError, match=f"endpoint named '{name}'"):
        procs(1).spawn("taken", cls)


def test_invalid_endpoints_and_actors_are_refused(procs: Any) -> None:
    with pytest.raises(ValueError, match="async"):

        class _A(Actor):
            @concurrent_endpoint  # pyright: ignore[reportArgumentType]
            def f(self) -> None: ...

    with pytest.raises(ValueError, match="already"):

        class _B(Actor):
            @concurrent_endpoint  # pyright: ignore[reportArgumentType]
            @endpoint
            async def f(self) -> None: ...

    with pytest.raises(TypeError):
        endpoint(3)  # type: ignore[call-overload]
    for thing in (int, 3, "Kinds", Kinds()):
        with pytest.raises(ValueError, match=r"subclass of monarch.actor.Actor"):
            procs(1).spawn("thing", thing)


def test_endpoints_are_inherited_and_overridden(procs: Any) -> None:
    class Child(Kinds):
        @endpoint
        def plain(self, x: int) -> str:
            return f"child {x}"

        @endpoint
        def own(self) -> int:
            return Kinds.plain.method(self, 3)

    child = procs(1).spawn("child", Child, 100)
    assert child.plain.call_one(1).get(timeout=20) == "child 1"
    assert child.own.call_one().get(timeout=20) == 103
    assert child.inner.call_one(2).get(timeout=20) == "child 2"
    assert {"own", "plain", "through_port"} <= set(dir(child))
