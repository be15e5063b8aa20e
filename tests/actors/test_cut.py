"""An interrupt of an async endpoint cuts the code of the user only: each call is answered, whenever it comes."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from leaks import wait_until
from monarch._actors.running import current
from monarch.actor import Actor, endpoint

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
    with pytest.raises(Exception, match="the call had begun and was cut short"):
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
