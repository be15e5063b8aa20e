"""A spawn whose constructor raises, and calls to its actors."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest

import monarch.actor
from leaks import wait_until
from monarch._meshes.procs.starting import ProcStarter
from monarch.actor import Actor, current_rank, endpoint, this_host
from monarch.exceptions import ActorError, SerializationError, SupervisionError


class Picky(Actor):
    def __init__(self, bad: int) -> None:
        if current_rank().rank == bad:
            raise FileNotFoundError(2, "No such file", "weights.pt")

    @endpoint
    def f(self) -> int:
        return current_rank().rank

    @endpoint
    def end(self) -> None:
        os._exit(1)


class PickyAsync(Picky):
    @endpoint
    async def f(self) -> int:
        return current_rank().rank


@pytest.mark.parametrize("cls", [Picky, PickyAsync])
def test_initialized_and_calls_raise_the_error(procs: Any, cls: type) -> None:
    mesh = procs(3)
    picky = mesh.spawn("picky", cls, 1)
    with pytest.raises(ActorError, match=r"picky\.__init__\(\) failed on rank 1 \(gpus=1\)") as caught:
        picky.initialized.get(timeout=20)
    assert "FileNotFoundError" in str(caught.value) and "test_spawn_errors.py" in str(caught.value)
    assert isinstance(caught.value.exception, FileNotFoundError)
    with pytest.raises((ActorError, SupervisionError), match=r"weights.pt"):
        picky.f.call().get(timeout=20)
    # The others were made, and the procs can have other actors.
    assert list(picky.slice(gpus=slice(0, 3, 2)).f.call().get(timeout=20).values()) == [0, 1]
    assert list(mesh.spawn("again", cls, 7).f.call().get(timeout=20).values()) == [0, 1, 2]
    picky.stop().get(timeout=20)


def test_earlier_call_is_answered(procs: Any) -> None:
    picky = procs(2).spawn("picky", Picky, 0)
    with pytest.raises((ActorError, SupervisionError), match=r"weights.pt"):
        picky.f.call().get(timeout=20)


def test_await_of_a_spawn_raises(procs: Any) -> None:
    import asyncio

    async def main() -> None:
        with pytest.raises(ActorError, match=r"weights.pt"):
            await procs(2).spawn("picky", Picky, 0)

    asyncio.run(asyncio.wait_for(main(), 20))


def test_constructor_that_exits_is_a_death(procs: Any) -> None:
    class Ends(Actor):
        def __init__(self) -> None:
            print("I am gone", file=sys.stderr)
            os._exit(7)

        @endpoint
        def f(self) -> None: ...

    ends = procs(2).spawn("ends", Ends)
    with pytest.raises(SupervisionError, match="exited with code 7") as caught:
        ends.f.call().get(timeout=20)
    assert "I am gone" in str(caught.value)
    with pytest.raises(SupervisionError):
        ends.initialized.get(timeout=20)


def test_unpicklable_constructor_argument_raises(procs: Any) -> None:
    import threading

    class Takes(Actor):
        def __init__(self, x: Any) -> None: ...

        @endpoint
        def f(self) -> None: ...

    with pytest.raises(SerializationError, match=r"spawn\('takes', Takes\).*lock"):
        procs(1).spawn("takes", Takes, threading.Lock())


def test_failed_spawn_is_no_unhandled_failure(procs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(monarch.actor, "unhandled_fault_hook", lambda failure: told.append(failure.mesh_name))

    def fail(*_: Any) -> None:
        raise OSError("no place for it")

    with monkeypatch.context() as patch:
        patch.setattr(ProcStarter, "_spawn", fail)
        with pytest.raises(OSError, match="no place for it"):
            this_host().spawn_procs({"gpus": 2}, name="unborn")
    # The news of the second death comes after any of theirs.
    for number in (1, 2):
        procs(1).spawn("picky", Picky, -1).end.broadcast()
        assert wait_until(lambda number=number: told.count("procs") == number)
    assert "unborn" not in told


def test_failed_broadcast_fails_actor_and_tells_owner(procs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Breaks(Actor):
        @endpoint
        def break_(self) -> None:
            raise ValueError("out of tune")

        @endpoint
        def f(self) -> int:
            return 1

    told: list[Any] = []
    monkeypatch.setattr(monarch.actor, "unhandled_fault_hook", told.append)
    mesh = procs(2)
    breaks = mesh.spawn("breaks", Breaks)
    assert breaks.break_.broadcast() is None
    # As one, unless the machine is so busy that one rank comes much later; each once in any case.
    assert wait_until(lambda: len([rank for failure in told for rank in failure.ranks]) == 2)
    assert sorted(rank for failure in told for rank in failure.ranks) == [0, 1]
    assert all(failure.mesh_name == "breaks" and "out of tune" in str(failure) for failure in told)
    with pytest.raises((ActorError, SupervisionError), match="out of tune"):
        breaks.f.call().get(timeout=20)
    assert list(mesh.spawn("more", Breaks).f.call().get(timeout=20).values()) == [1, 1]
