"""Named singletons of a session, for the program and ranks."""

from __future__ import annotations

import os
import secrets
from typing import Any

import pytest

from monarch.actor import Actor, endpoint, get_or_spawn_controller
from monarch.exceptions import ActorError


class Tally(Actor):
    def __init__(self, start: int = 0) -> None:
        self.count = start

    @endpoint
    async def add(self, x: int) -> int:
        self.count += x
        return self.count

    @endpoint
    async def pid(self) -> int:
        return os.getpid()


class Fails(Actor):
    def __init__(self) -> None:
        raise ValueError("no controller today")

    @endpoint
    def f(self) -> None: ...


class User(Actor):
    @endpoint
    def use(self, name: str) -> int:
        return get_or_spawn_controller(name, Tally, 100).get().add.call_one(1).get()

    @endpoint
    def use_failing(self, name: str) -> Any:
        return get_or_spawn_controller(name, Fails).get()


class AsyncUser(Actor):
    @endpoint
    async def use(self, name: str) -> int:
        tally = await get_or_spawn_controller(name, Tally, 100)
        return await tally.add.call_one(1)


@pytest.fixture
def name() -> str:
    return f"tally {secrets.token_hex(4)}"


@pytest.fixture
def stop(name: str) -> Any:
    """Stop a controller by name; it belongs to the program."""
    yield
    get_or_spawn_controller(name, Tally).get(timeout=20).stop().get(timeout=20)


def test_the_program_and_ranks_share_one(procs: Any, name: str, stop: Any) -> None:
    users = procs(2).spawn("user", User)
    mine = get_or_spawn_controller(name, Tally, 10).get(timeout=20)
    assert mine.pid.call_one().get(timeout=20) == os.getpid()
    assert mine.add.call_one(1).get(timeout=20) == 11
    assert sorted(users.use.call(name).get(timeout=20).values()) == [12, 13]
    assert get_or_spawn_controller(name, Tally, 99).get(timeout=20).add.call_one(0).get(timeout=20) == 13


def test_concurrent_requests_make_one_controller(procs: Any, name: str, stop: Any) -> None:
    users = procs(2).spawn("user", AsyncUser)
    assert sorted(users.use.call(name).get(timeout=20).values()) == [101, 102]
    assert sorted(users.use.call(name).get(timeout=20).values()) == [103, 104]


def test_a_controller_may_ask_for_another(host: Any, name: str, stop: Any) -> None:
    class Nested(Actor):
        def __init__(self, inner: str) -> None:
            self.inner = get_or_spawn_controller(inner, Tally, 5).get()

        @endpoint
        def add(self) -> int:
            return self.inner.add.call_one(1).get()

    nested = get_or_spawn_controller(f"nested {name}", Nested, name).get(timeout=20)
    assert nested.add.call_one().get(timeout=20) == 6
    nested.stop().get(timeout=20)


def test_controller_can_be_retried_after_constructor_error(procs: Any, name: str, stop: Any) -> None:
    with pytest.raises(ActorError, match="no controller today"):
        get_or_spawn_controller(name, Fails).get(timeout=20)
    users = procs(1).spawn("user", User)
    with pytest.raises(ActorError, match="no controller today"):
        users.use_failing.call_one(name).get(timeout=20)
    assert users.use.call_one(name).get(timeout=20) == 101
