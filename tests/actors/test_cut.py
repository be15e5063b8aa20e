"""An interrupt of an async endpoint cuts the code of the user only: each call is answered, whenever it comes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from leaks import wait_until
from monarch._actors import interrupting
from monarch._actors.running import current
from monarch._actors.table import actors_of
from monarch._meshes.actors.ask import ask
from monarch._node.current import current_node
from monarch.actor import Actor, endpoint, this_proc
from monarch.exceptions import ActorError, MonarchError, StoppedError

SHORT = {"MONARCH_STOP_DRAIN_S": "0.3", "MONARCH_STOP_CANCEL_S": "0.3"}


class Cut(Actor):
    @endpoint
    async def arm(self, name: str) -> None:
        """Interrupt the task that runs as a function of the mailbox or its turns begins, as at a Stop."""
        here = current.get()
        assert here is not None
        executor: Any = here[0].executor

        def profile(frame: Any, event: str, _: Any) -> None:
            if event == "call" and frame.f_code.co_name == name and "/_actors/" in frame.f_code.co_filename:
                sys.setprofile(None)
                executor.unwanted = {asyncio.current_task(executor.loop)}
                signal.raise_signal(signal.SIGINT)

        sys.setprofile(profile)

    @endpoint
    async def add(self, number: int) -> int:
        return number + 1

    @endpoint
    async def write(self, path: str) -> None:
        with open(path, "a") as file:
            file.write("x")

    @endpoint
    async def block(self, path: str) -> None:
        Path(path).touch()
        time.sleep(600)


@pytest.mark.parametrize("name", ["_unqueue", "_method", "_answer", "finished"])
def test_interrupt_between_calls_loses_none(procs: Any, name: str) -> None:
    actor = procs(1).spawn("cut", Cut)
    # Calls that wait for their turn as the interrupt comes.
    answers = [actor.arm.call_one(name), *[actor.add.call_one(number) for number in range(10)]]
    answers[0].get(20)
    assert [each.get(20) for each in answers[1:]] == list(range(1, 11))


def test_code_of_the_user_is_still_interrupted(procs: Any, tmp_path: Path) -> None:
    actor = procs(1, env=SHORT).spawn("cut", Cut)
    blocked = actor.block.call_one(str(tmp_path / "here"))
    assert wait_until((tmp_path / "here").exists)
    actor.stop().get(30)
    with pytest.raises(Exception, match="the call was interrupted while it ran"):
        blocked.get(20)


class Floods(Actor):
    @endpoint
    def flood(self, other: Any, path: str, count: int) -> tuple[int, int]:
        errors = [each.exception() for each in [other.write.call_one(path) for _ in range(count)]]
        return errors.count(None), len(errors)


@pytest.mark.slow
def test_stop_behind_many_calls_answers_each(procs: Any, tmp_path: Path) -> None:
    """The loop handles and refuses them, so it does not ignore the interrupts, though it takes long."""
    floods = procs(1).spawn("floods", Floods)
    for turn in range(8):
        path = tmp_path / str(turn)
        mesh = procs(1, env=SHORT)
        target = mesh.spawn("target", Cut)
        done = floods.flood.call_one(target, str(path), 2000)
        assert wait_until(lambda path=path: path.exists() and path.stat().st_size > 100)
        target.stop().get(60)
        answered, count = done.get(60)
        assert count == 2000 and answered <= path.stat().st_size
        mesh.stop().get(30)


class Moments:
    """The steps of two threads that a test has in one order."""

    def __init__(self) -> None:
        self.begun, self.ends, self.passed, self.raised = (threading.Event() for _ in range(4))

    def await_end(self, name: str) -> int:
        """Block the endpoint until it may end, and its thread again as a function of the mailbox begins."""
        self.begun.set()
        assert self.ends.wait(20)

        def profile(frame: Any, event: str, _: Any) -> None:
            if event == "call" and frame.f_code.co_name == name and "/_actors/" in frame.f_code.co_filename:
                sys.setprofile(None)
                self.passed.set()
                assert self.raised.wait(20)

        sys.setprofile(profile)
        return 1

    def interrupt_late(self, executor: Any) -> None:
        """Interrupt an executor; between the decision to do so and the interrupt, the endpoint ends."""

        def profile(frame: Any, event: str, _: Any) -> None:
            code = frame.f_code
            if event == "call" and code.co_name == "interrupt" and code.co_filename.endswith("/interrupts.py"):
                sys.setprofile(None)
                self.ends.set()
                assert self.passed.wait(20)

        assert self.begun.wait(20)
        sys.setprofile(profile)
        try:
            executor.interrupt_now()
        finally:
            sys.setprofile(None)
            self.raised.set()


moments = Moments()


class Late(Actor):
    @endpoint
    def end(self) -> int:
        return moments.await_end("_answer")


class LateAsync(Actor):
    @endpoint
    async def end(self) -> int:
        return moments.await_end("_answer")

    @endpoint(concurrent=True)
    async def pause(self) -> int:
        moments.await_end("_unqueue")
        await asyncio.sleep(0)
        return 1

    @endpoint(concurrent=True)
    async def follow(self) -> int:
        return 2


@pytest.mark.parametrize(("cls", "name"), [(Late, "end"), (LateAsync, "end"), (LateAsync, "pause")])
def test_late_interrupt_loses_no_answer(host: Any, monkeypatch: pytest.MonkeyPatch, cls: type, name: str) -> None:
    monkeypatch.setattr(sys.modules[__name__], "moments", Moments())
    actor = this_proc().spawn("late", cls)
    ending = getattr(actor, name).call_one()
    assert moments.begun.wait(20)
    # It begins as the first one pauses.
    following = actor.follow.call_one() if name == "pause" else None
    mailbox = actors_of(current_node()).here[actor._key]
    assert following is None or wait_until(lambda: len(mailbox.queue) == 1)
    moments.interrupt_late(mailbox.executor)
    assert ending.get(20) == 1
    assert following is None or following.get(20) == 2
    actor.stop().get(20)


class Opens:
    """An argument that blocks as it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __setstate__(self, state: dict[str, Any]) -> None:
        Path(state["path"]).touch()
        time.sleep(600)


class Packs:
    """A value that blocks as it is pickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __getstate__(self) -> dict[str, Any]:
        Path(self.path).touch()
        time.sleep(600)
        return {}


class Ends:
    """An object that blocks as it is deleted on a rank."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __del__(self) -> None:
        if "MONARCH_STOP_CANCEL_S" in os.environ:
            Path(self.path).touch()
            time.sleep(600)


class FailsSlowly(Exception):
    def __str__(self) -> str:
        Path(self.args[0]).touch()
        time.sleep(600)
        return ""


class Takes(Actor):
    def __init__(self, path: str, *rest: Any) -> None:
        self.path = Path(path)

    @endpoint
    def hold(self, path: str) -> None:
        self.held = Ends(path)

    @endpoint
    def pack(self, path: str) -> Packs:
        return Packs(path)

    @endpoint
    def fail(self, path: str) -> None:
        raise FailsSlowly(path)

    @endpoint
    def take(self, opened: Any, data: bytes) -> None: ...

    def __cleanup__(self, error: Exception | None) -> None:
        self.path.touch()


class TakesAsync(Takes):
    @endpoint
    async def wake(self) -> int:
        return 1


@pytest.mark.parametrize("size", [0, 1 << 20])
@pytest.mark.parametrize("cls", [Takes, TakesAsync])
@pytest.mark.parametrize("place", ["main", "thread"])
def test_unpickling_of_arguments_is_interrupted(procs: Any, tmp_path: Path, cls: type, place: str, size: int) -> None:
    mesh = procs(1, env=SHORT)
    if place == "thread":
        mesh.spawn("first", Cut)
    actor = mesh.spawn("takes", cls, str(tmp_path / "cleaned"))
    call = actor.take.call_one(Opens(str(tmp_path / "first")), bytes(size))
    assert wait_until((tmp_path / "first").exists)
    assert ask(actor, interrupting.interrupt, actor._key, current_node().proc, call.port).get(20) == {0: True}
    with pytest.raises(ActorError, match="KeyboardInterrupt"):
        call.get(20)
    call = actor.take.call_one(Opens(str(tmp_path / "second")), bytes(size))
    assert wait_until((tmp_path / "second").exists)
    actor.stop().get(30)
    with pytest.raises(StoppedError, match="the call was interrupted while it ran"):
        call.get(20)
    assert (tmp_path / "cleaned").exists()


@pytest.mark.parametrize("cls", [Takes, TakesAsync])
@pytest.mark.parametrize("how", ["pack", "fail", "take"])
def test_stop_interrupts_code_of_values_and_errors(procs: Any, tmp_path: Path, cls: type, how: str) -> None:
    begun = tmp_path / "begun"
    actor = procs(1, env=SHORT).spawn("takes", cls, str(tmp_path / "cleaned"))
    call = actor.take.call_one(Ends(str(begun)), b"") if how == "take" else getattr(actor, how).call_one(str(begun))
    assert wait_until(begun.exists)
    actor.stop().get(30)
    assert (tmp_path / "cleaned").exists()
    if how == "take":
        # Python reports what a __del__ raises, and continues.
        assert call.get(20) is None
    else:
        ended = r"interrupted while it ran|its str\(\) raised KeyboardInterrupt"
        with pytest.raises((StoppedError, ActorError), match=ended):
            call.get(20)


@pytest.mark.parametrize("size", [0, 1 << 20])
@pytest.mark.parametrize("cls", [Takes, TakesAsync])
def test_stop_interrupts_unpickling_for_a_constructor(procs: Any, tmp_path: Path, cls: type, size: int) -> None:
    begun = tmp_path / "begun"
    actor = procs(1, env=SHORT).spawn("takes", cls, str(tmp_path / "cleaned"), Opens(str(begun)), bytes(size))
    assert wait_until(begun.exists)
    actor.stop().get(30)
    with pytest.raises(StoppedError, match="was stopped before it was created"):
        actor.initialized.get(20)


@pytest.mark.parametrize("cls", [Takes, TakesAsync])
@pytest.mark.parametrize("place", ["main", "thread"])
def test_stop_interrupts_the_release_of_an_actor(procs: Any, tmp_path: Path, cls: type, place: str) -> None:
    mesh = procs(1, env=SHORT | {"MONARCH_STOP_CLEANUP_S": "0.4"})
    if place == "thread":
        mesh.spawn("first", Cut)
    actor = mesh.spawn("takes", cls, str(tmp_path / "cleaned"))
    actor.hold.call_one(str(tmp_path / "begun")).get(20)
    actor.stop().get(30)
    assert (tmp_path / "begun").exists() and (tmp_path / "cleaned").exists()


class Blocks(Actor):
    """Blocks its event loop once for each call or task."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self.tasks: list[asyncio.Task[None]] = []

    def note(self, text: str) -> None:
        with self.path.open("a") as file:
            file.write(f"{text}\n")

    @endpoint(concurrent=True)
    async def block(self, number: int) -> None:
        self.note(f"begun {number}")
        time.sleep(600)

    @endpoint(concurrent=True)
    async def block_at_cancel(self, number: int) -> None:
        self.note(f"begun {number}")
        try:
            await asyncio.Event().wait()
        finally:
            self.note(f"blocks {number}")
            time.sleep(600)

    @endpoint
    async def block_in_tasks(self, count: int) -> None:
        async def block(number: int) -> None:
            self.note(f"blocks {number}")
            time.sleep(600)

        self.tasks = [asyncio.create_task(block(number)) for number in range(count)]

    @endpoint(concurrent=True)
    async def wait(self) -> None:
        await asyncio.Event().wait()

    @endpoint
    async def wait_beside_stubborn_task(self, path: str) -> None:
        async def insist() -> None:
            self.note("blocks")
            while not Path(path).exists():
                with contextlib.suppress(KeyboardInterrupt):
                    time.sleep(0.01)

        self.tasks = [asyncio.create_task(insist())]
        await asyncio.Event().wait()

    async def __cleanup__(self, error: Exception | None) -> None:
        self.note("cleanup")


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def test_calls_that_wait_behind_a_blocked_loop_are_refused(procs: Any, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    actor = procs(1, env=SHORT).spawn("blocks", Blocks, str(notes))
    calls = [actor.block.call_one(number) for number in range(5)]
    assert wait_until(lambda: lines(notes))
    actor.stop().get(30)
    assert lines(notes) == ["begun 0", "cleanup"]
    with pytest.raises(StoppedError, match="the call was interrupted while it ran"):
        calls[0].get(20)
    for call in calls[1:]:
        with pytest.raises(StoppedError, match="the call did not begin"):
            call.get(20)


def test_calls_that_block_one_after_another_ignore_nothing(procs: Any, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    actor = procs(1, env=SHORT).spawn("blocks", Blocks, str(notes))
    calls = [actor.block_at_cancel.call_one(number) for number in range(3)]
    assert wait_until(lambda: len(lines(notes)) == 3)
    actor.stop().get(30)
    assert [line.split()[0] for line in lines(notes)] == ["begun"] * 3 + ["blocks"] * 3 + ["cleanup"]
    for call in calls:
        with pytest.raises(StoppedError):
            call.get(20)


def test_tasks_that_block_one_after_another_ignore_nothing(procs: Any, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    actor = procs(1, env=SHORT).spawn("blocks", Blocks, str(notes))
    actor.block_in_tasks.call_one(3).get(20)
    assert wait_until(lambda: lines(notes))
    actor.stop().get(30)
    assert lines(notes) == ["blocks 0", "blocks 1", "blocks 2", "cleanup"]


@pytest.mark.slow
def test_stop_that_interrupts_many_calls_has_a_bound(procs: Any, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    actor = procs(1, env=SHORT).spawn("blocks", Blocks, str(notes))
    calls = [actor.block_at_cancel.call_one(number) for number in range(40)]
    assert wait_until(lambda: len(lines(notes)) == 40)
    with pytest.raises(MonarchError, match=r"block_at_cancel\(\) did not finish within 0.3 s of the stop") as caught:
        actor.stop().get(60)
    assert "ignored" not in str(caught.value)
    for call in calls:
        with pytest.raises(StoppedError):
            call.get(20)
    # The last ones block still.
    assert len(lines(notes)) < 80


def test_given_up_actor_answers_calls_that_await(procs: Any, tmp_path: Path) -> None:
    notes, go = tmp_path / "notes", tmp_path / "go"
    actor = procs(1, env=SHORT).spawn("blocks", Blocks, str(notes))
    calls = [actor.wait.call_one(), actor.wait.call_one(), actor.wait_beside_stubborn_task.call_one(str(go))]
    assert wait_until(lambda: lines(notes))
    # The call with the turn does not block the actor.
    with pytest.raises(MonarchError, match=r"a background task or callback of blocks.*ignored two interrupts"):
        actor.stop().get(30)
    for call in calls:
        with pytest.raises(StoppedError, match="its code is still running"):
            call.get(20)
    go.touch()
