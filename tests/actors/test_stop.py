"""The end of actors and procs: earlier messages are handled, cleanup runs, and later calls fail with the reason."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import monarch.actor
from leaks import processes, wait_until
from monarch.actor import Actor, endpoint, this_host
from monarch.exceptions import ActorError, DeviceMeshError, MonarchError, StoppedError

SHORT = {"MONARCH_STOP_DRAIN_S": "0.3", "MONARCH_STOP_CANCEL_S": "0.3", "MONARCH_STOP_CLEANUP_S": "0.4"}
"""Bounds of the end of actors, so that tests need not wait for them."""


class Cleans(Actor):
    def __init__(self, path: str, fail: bool = False) -> None:
        self.path = Path(path)
        self.fail = fail
        self.count = 0

    @endpoint
    def add(self) -> int:
        self.count += 1
        return self.count

    def __cleanup__(self, error: Exception | None) -> None:
        with self.path.open("a") as file:
            file.write(f"{self.count} {error}\n")
        if self.fail:
            raise ValueError("cleanup failed")


class CleansAsync(Actor):
    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self.count = 0

    @endpoint
    async def add(self) -> int:
        await asyncio.sleep(0)
        self.count += 1
        return self.count

    async def __cleanup__(self, error: Exception | None) -> None:
        await asyncio.sleep(0)
        self.path.write_text(f"{self.count} {error}\n")


@pytest.mark.parametrize("cls", [Cleans, CleansAsync])
def test_cleanup_runs_after_earlier_messages(procs: Any, tmp_path: Path, cls: type) -> None:
    mesh = procs(1)
    actor = mesh.spawn("cleans", cls, str(tmp_path / "said"))
    for _ in range(500):
        actor.add.broadcast()
    last = actor.add.call_one()
    actor.stop().get(timeout=20)
    assert last.get(timeout=20) == 501
    assert (tmp_path / "said").read_text() == "501 None\n"
    # The proc goes on.
    again = mesh.spawn("again", cls, str(tmp_path / "again"))
    assert again.add.call_one().get(timeout=20) == 1


@pytest.mark.parametrize("cls", [Cleans, CleansAsync])
def test_stopping_the_procs_cleans_up_too(procs: Any, tmp_path: Path, cls: type) -> None:
    mesh = procs(1)
    actor = mesh.spawn("cleans", cls, str(tmp_path / "said"))
    for _ in range(100):
        actor.add.broadcast()
    mesh.stop().get(timeout=20)
    assert (tmp_path / "said").read_text() == "100 None\n"


def test_stop_raises_the_cleanup_error(procs: Any, tmp_path: Path) -> None:
    actor = procs(2).spawn("cleans", Cleans, str(tmp_path / "said"), fail=True)
    with pytest.raises(ActorError, match="cleanup failed"):
        actor.stop().get(timeout=20)
    with pytest.raises(StoppedError):
        actor.add.call()


def test_an_error_in_cleanup_at_the_end_of_the_procs_is_reported(
    procs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    monkeypatch.setattr(monarch.actor, "unhandled_fault_hook", told.append)
    mesh = procs(1)
    mesh.spawn("cleans", Cleans, str(tmp_path / "said"), fail=True).add.call().get(timeout=20)
    mesh.stop().get(timeout=20)
    assert wait_until(lambda: told), "nobody was told"
    assert told[0].mesh_name == "cleans"
    assert told[0].text.startswith("__cleanup__() raised ValueError: cleanup failed")


def test_calls_after_a_stop_fail_at_once(procs: Any, tmp_path: Path) -> None:
    mesh = procs(2)
    actor = mesh.spawn("cleans", Cleans, str(tmp_path / "said"))
    view = actor.slice(gpus=0)
    actor.stop("not needed any more").get(timeout=20)
    for call in (actor.add.call, actor.add.broadcast, actor.add.stream, actor.add.choose, view.add.call_one):
        with pytest.raises(StoppedError, match=r"cleans was stopped \(not needed any more\); spawn a new one"):
            call()
    assert actor.stop().get(timeout=20) is None
    mesh.stop("enough").get(timeout=20)
    with pytest.raises(StoppedError, match="enough"):
        mesh.spawn("late", Cleans, "x")
    assert mesh.stop().get(timeout=20) is None


def test_calls_to_stopped_procs_raise(procs: Any, tmp_path: Path) -> None:
    mesh = procs(1)
    actor = mesh.spawn("cleans", Cleans, str(tmp_path / "said"))
    actor.add.call().get(timeout=20)
    mesh.stop().get(timeout=20)
    with pytest.raises(StoppedError):
        actor.add.call().get(timeout=20)


def test_reference_to_a_stopped_actor_raises(procs: Any, tmp_path: Path) -> None:
    class Asks(Actor):
        @endpoint
        def ask(self, other: Any) -> Any:
            return other.add.call().get()

    asks = procs(1).spawn("asks", Asks)
    actor = procs(1).spawn("cleans", Cleans, str(tmp_path / "said"))
    asks.ask.call_one(actor).get(timeout=20)
    actor.stop().get(timeout=20)
    with pytest.raises(ActorError, match="was stopped") as caught:
        asks.ask.call_one(actor).get(timeout=20)
    assert isinstance(caught.value.exception, MonarchError)


def test_pending_calls_end_with_the_procs(procs: Any) -> None:
    class Waits(Actor):
        @endpoint
        async def wait(self) -> None:
            await asyncio.Event().wait()

    mesh = procs(2, env=SHORT)
    waiting = mesh.spawn("waits", Waits).wait.call()
    with pytest.raises(TimeoutError):
        waiting.get(timeout=0.1)
    stopping = mesh.stop()
    with pytest.raises((DeviceMeshError, ActorError)):
        waiting.get(timeout=20)
    stopping.get(timeout=20)


def test_pending_calls_end_with_their_actor(procs: Any) -> None:
    class Waits(Actor):
        @endpoint
        async def wait(self) -> None:
            await asyncio.Event().wait()

    actor = procs(1, env=SHORT).spawn("waits", Waits)
    waiting = actor.wait.call_one()
    actor.stop("no more work").get(timeout=20)
    with pytest.raises(StoppedError, match="was stopped: no more work"):
        waiting.get(timeout=20)


def test_stop_refuses_many_calls_behind_a_long_one_at_once(procs: Any) -> None:
    class Sleeps(Actor):
        @endpoint
        def sleep(self) -> None:
            time.sleep(60)

    # The call that runs is a long one for the executor, which then reads its messages for a while before the next call.
    actor = procs(1, env={**SHORT, "MONARCH_STOP_DRAIN_S": "0.8"}).spawn("sleeps", Sleeps)
    calls = [actor.sleep.call_one() for _ in range(30)]
    # It has not ignored interrupts.
    actor.stop().get(timeout=20)
    assert all(isinstance(call.exception(20), (StoppedError, ActorError)) for call in calls)


def test_messages_after_the_stop_are_refused(procs: Any, tmp_path: Path) -> None:
    """Another sender has not heard of the stop yet; each of its calls gets an answer."""

    class Floods(Actor):
        @endpoint
        def flood(self, other: Any, count: int) -> tuple[int, int]:
            futures = [other.add.call_one() for _ in range(count)]
            errors = [future.exception() for future in futures]
            return sum(error is None for error in errors), sum(isinstance(error, StoppedError) for error in errors)

    floods = procs(1).spawn("floods", Floods)
    mesh = procs(1)
    for cls in (Cleans, CleansAsync):
        target = mesh.spawn("target", cls, str(tmp_path / "said"))
        target.add.call().get(timeout=20)
        flood = floods.flood.call_one(target, 5000)
        assert wait_until(lambda target=target: target.add.call_one().get(timeout=20) > 100)
        target.stop().get(timeout=20)
        done, refused = flood.get(timeout=30)
        assert done + refused == 5000
        assert procs(1).spawn("next", cls, str(tmp_path / "said")).add.call_one().get(timeout=20) == 1


class Stubborn(Actor):
    """Ignores interrupts until a file exists."""

    @endpoint
    def insist(self, path: str) -> None:
        while not os.path.exists(path):
            with contextlib.suppress(KeyboardInterrupt):
                time.sleep(0.01)

    @endpoint
    def write(self, path: str) -> None:
        with open(path, "a") as file:
            file.write("x")


class StubbornAsync(Stubborn):
    @endpoint
    async def insist(self, path: str) -> None:
        while not os.path.exists(path):
            with contextlib.suppress(KeyboardInterrupt):
                time.sleep(0.01)

    @endpoint
    async def write(self, path: str) -> None:
        with open(path, "a") as file:
            file.write("x")


@pytest.mark.parametrize("cls", [Stubborn, StubbornAsync])
def test_call_that_was_refused_by_a_stop_never_runs(procs: Any, tmp_path: Path, cls: type) -> None:
    mesh = procs(1, env=SHORT)
    actor = mesh.spawn("stubborn", cls)
    go, effects = tmp_path / "go", tmp_path / "effects"
    actor.write.call_one(str(effects)).get(20)
    insists = actor.insist.call_one(str(go))
    queued = [actor.write.call_one(str(effects)) for _ in range(20)]
    with pytest.raises((MonarchError, ActorError), match="ignored two interrupts"):
        actor.stop().get(timeout=60)
    for call in (insists, *queued):
        with pytest.raises(StoppedError):
            call.get(timeout=20)
    go.touch()
    # Its thread ends now, and what was queued behind it is not run.
    after = mesh.spawn("after", Stubborn)
    after.write.call_one(str(tmp_path / "other")).get(20)
    assert not wait_until(lambda: effects.read_text() != "x", 1.0)


def test_stopped_calls_take_effect_as_answered(procs: Any, tmp_path: Path) -> None:
    class Floods(Actor):
        @endpoint
        def flood(self, other: Any, path: str) -> tuple[int, int]:
            errors = [future.exception() for future in [other.write.call_one(path) for _ in range(2000)]]
            begun = sum("the call had begun" in str(error) for error in errors)
            assert all(error is None or "begin" in str(error) or "begun" in str(error) for error in errors)
            return errors.count(None), begun

    for turn in range(2):
        floods, effects = procs(1).spawn("floods", Floods), tmp_path / str(turn)
        target = procs(1, env=SHORT).spawn("target", Stubborn if turn else StubbornAsync)
        done = floods.flood.call_one(target, str(effects))
        assert wait_until(lambda effects=effects: effects.exists() and effects.stat().st_size > 100)
        target.stop().get(timeout=30)
        answered, begun = done.get(timeout=30)
        assert begun <= 1 and answered <= effects.stat().st_size <= answered + begun


def test_with_and_async_with_stop_at_the_end(host: Any, tmp_path: Path) -> None:
    before = set(processes())
    with this_host().spawn_procs(per_host={"gpus": 2}) as mesh:
        with mesh.spawn("cleans", Cleans, str(tmp_path / "said")) as actor:
            assert list(actor.add.call().get(timeout=20).values()) == [1, 1]
        assert (tmp_path / "said").read_text() == "1 None\n" * 2
    assert set(processes()) <= before

    async def main() -> None:
        async with await this_host().spawn_procs(per_host={"gpus": 2}) as mesh:
            async with await mesh.spawn("cleans", Cleans, str(tmp_path / "again")) as actor:
                assert list((await actor.add.call()).values()) == [1, 1]
            with pytest.raises(StoppedError):
                actor.add.call()

    asyncio.run(asyncio.wait_for(main(), 20))
    assert set(processes()) <= before
    with pytest.raises(ZeroDivisionError), this_host().spawn_procs() as mesh:
        1 / 0  # pyright: ignore[reportUnusedExpression]
    assert set(processes()) <= before


def test_many_spawns_and_stops_leave_nothing(procs: Any, tmp_path: Path) -> None:
    mesh = procs(2)
    node = mesh._node
    threads = threading.active_count()
    for index in range(30):
        cls = (Cleans, CleansAsync)[index % 2]
        actor = mesh.spawn("cleans", cls, str(tmp_path / "said"))
        assert list(actor.add.call().get(timeout=20).values()) == [1, 1]
        actor.stop().get(timeout=20)
    assert wait_until(lambda: threading.active_count() <= threads)
    assert len(node.ports.sinks) < 10


class Ends(Actor):
    """Records how it ends, and delays its end in many ways."""

    def __init__(self, path: str, how: str = "") -> None:
        self.path = Path(path)
        hold(how)

    def note(self, text: str) -> None:
        with self.path.open("a") as file:
            file.write(f"{text}\n")

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def block(self, how: str) -> None:
        self.note("begun")
        try:
            hold(how)
        finally:
            self.note("finally")

    def __cleanup__(self, error: Exception | None) -> None:
        self.note("cleanup")


class EndsAsync(Ends):
    @endpoint(concurrent=True)
    async def wait(self) -> None:
        self.note("begun")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.note("cancelled")
            raise
        finally:
            await asyncio.sleep(0.05)
            self.note("finally")

    @endpoint(concurrent=True)
    async def swallow(self) -> None:
        self.note("begun")
        for _ in range(2):
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            self.note("swallowed")

    async def __cleanup__(self, error: Exception | None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        await asyncio.sleep(0)
        self.note("cleanup")


def hold(how: str) -> None:
    """Block in a given way until an interrupt; with ``ignore``, forever."""
    if how == "event":
        threading.Event().wait()
    while how == "spin":
        pass
    while how == "ignore":
        with contextlib.suppress(BaseException):
            time.sleep(0.01)


def begun(path: Path) -> bool:
    return wait_until(lambda: path.exists() and path.read_text() == "begun\n")


@pytest.mark.parametrize("whole", [False, True])
def test_cancelled_calls_end_before_cleanup(procs: Any, tmp_path: Path, whole: bool) -> None:
    mesh = procs(1, env=SHORT)
    actor = mesh.spawn("ends", EndsAsync, str(tmp_path / "said"))
    waiting = actor.wait.call_one()
    assert begun(tmp_path / "said")
    (mesh if whole else actor).stop("enough").get(timeout=20)
    assert (tmp_path / "said").read_text().split() == ["begun", "cancelled", "finally", "cleanup"]
    with pytest.raises(StoppedError, match="enough"):
        waiting.get(timeout=20)


def test_call_that_swallows_its_cancellation_is_left(procs: Any, tmp_path: Path) -> None:
    mesh = procs(1, env=SHORT)
    actor = mesh.spawn("ends", EndsAsync, str(tmp_path / "said"))
    waiting = actor.swallow.call_one()
    assert begun(tmp_path / "said")
    actor.stop().get(timeout=20)
    assert (tmp_path / "said").read_text().split()[:3] == ["begun", "swallowed", "cleanup"]
    with pytest.raises(StoppedError):
        waiting.get(timeout=20)
    assert mesh.spawn("next", Ends, str(tmp_path / "next")).pid.call_one().get(timeout=20)


@pytest.mark.parametrize("cls", [Ends, EndsAsync])
@pytest.mark.parametrize("how", ["event", "spin"])
def test_stop_interrupts_a_constructor_or_call_that_blocks(procs: Any, tmp_path: Path, cls: type, how: str) -> None:
    mesh = procs(1, env=SHORT)
    made = mesh.spawn("made", cls, str(tmp_path / "made"), how)
    made.stop().get(timeout=20)
    with pytest.raises(StoppedError, match=r"made.*was stopped before it was created"):
        made.initialized.get(timeout=20)
    blocks = mesh.spawn("blocks", cls, str(tmp_path / "said"))
    blocked = blocks.block.call_one(how)
    assert begun(tmp_path / "said")
    blocks.stop().get(timeout=20)
    assert (tmp_path / "said").read_text().split() == ["begun", "finally", "cleanup"]
    with pytest.raises(StoppedError):
        blocked.get(timeout=20)


@pytest.mark.parametrize("cls", [Ends, EndsAsync])
def test_stop_gives_up_on_code_that_ignores_interrupts(procs: Any, tmp_path: Path, cls: type) -> None:
    mesh = procs(1, env=SHORT)
    pid = mesh.spawn("first", Ends, str(tmp_path / "first")).pid.call_one().get(timeout=20)
    made = mesh.spawn("made", cls, str(tmp_path / "made"), "ignore")
    with pytest.raises(MonarchError, match=r"made.*__init__\(\) did not finish within 0.3 s .*MONARCH_STOP_DRAIN_S"):
        made.stop().get(timeout=20)
    blocks = mesh.spawn("blocks", cls, str(tmp_path / "said"))
    blocked = blocks.block.call_one("ignore")
    queued = blocks.pid.call_one()
    assert begun(tmp_path / "said")
    with pytest.raises(
        MonarchError, match=r"blocks\[gpus=0\].block\(\) did not finish .* keeps running until the procs"
    ):
        blocks.stop().get(timeout=20)
    for call in (blocked, queued):
        with pytest.raises(StoppedError):
            call.get(timeout=20)
    mesh.stop().get(timeout=20)
    assert pid not in processes()


def test_stop_of_procs_kills_code_that_ignores_interrupts(
    procs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    monkeypatch.setattr(monarch.actor, "unhandled_fault_hook", told.append)
    mesh = procs(1, env=SHORT)
    blocks = mesh.spawn("blocks", Ends, str(tmp_path / "blocks"))
    other = mesh.spawn("other", Ends, str(tmp_path / "other"))
    other.pid.call().get(timeout=20)
    blocks.block.call_one("ignore")
    assert begun(tmp_path / "blocks")
    mesh.stop().get(timeout=20)
    assert (tmp_path / "other").read_text() == "cleanup\n"
    assert wait_until(lambda: told) and told[0].mesh_name == "blocks"
    assert "block() did not finish within 0.3 s" in told[0].text and "its process was ended" in told[0].text


class CleansLong(Actor):
    @endpoint
    async def f(self) -> int:
        return 1

    async def __cleanup__(self, error: Exception | None) -> None:
        await asyncio.Event().wait()


class CleansBlocked(Actor):
    @endpoint
    def f(self) -> int:
        return 1

    def __cleanup__(self, error: Exception | None) -> None:
        threading.Event().wait()


@pytest.mark.parametrize("cls", [CleansLong, CleansBlocked])
def test_cleanup_that_does_not_end_is_reported(procs: Any, cls: type, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr(monarch.actor, "unhandled_fault_hook", told.append)
    mesh = procs(1, env=SHORT)
    long = mesh.spawn("long", cls)
    # An actor that has not begun has nothing to clean up.
    long.f.call().get(timeout=20)
    with pytest.raises(MonarchError, match=r"long\[gpus=0\].__cleanup__\(\) did not finish within 0.4 s"):
        long.stop().get(timeout=20)
    mesh.spawn("longer", cls).f.call().get(timeout=20)
    mesh.stop().get(timeout=20)
    assert wait_until(lambda: told) and told[0].mesh_name == "longer"
    assert "longer[gpus=0].__cleanup__() did not finish within 0.4 s" in told[0].text
