"""When a rank looks for something to send: often while calls take its time, and seldom else, then beside a call."""

from __future__ import annotations

import time
from typing import Any

import pytest

from monarch._node.current import current_node
from monarch._session.rank import looks
from monarch.actor import Actor, endpoint


class Called(Actor):
    @endpoint
    def shorten(self, answers: int) -> None:
        """Make a rank idle after a second instead of ten, and let so many answers in a row stand for a look."""
        looks._IDLE, looks._EARLY_S, looks._ANSWERS = 0.4, 0.2, answers
        self.looks: Any = getattr(current_node().output.watch, "__self__")  # noqa: B009
        self.found: list[tuple[bool, float]] = []
        look = self.looks.look

        def note() -> None:
            self.found.append((self.looks._busy(), self.looks._next - time.monotonic()))
            look()

        self.looks.look = note

    @endpoint
    def pause(self) -> float:
        return self.looks._pause

    @endpoint
    def work(self, seconds: float) -> None:
        time.sleep(seconds)

    @endpoint
    def taken(self) -> list[tuple[bool, float]]:
        """Return whether each look since the last time found a call, and how early it was."""
        found, self.found[:] = list(self.found), []
        return found


def idle_rank(procs: Any, answers: int = 0) -> Any:
    actor = procs(1).spawn("called", Called).slice(gpus=0)
    actor.shorten.call_one(answers).get(20)
    deadline = time.monotonic() + 20
    while actor.pause.call_one().get(20) < 0.4:
        assert time.monotonic() < deadline
        time.sleep(0.3)
    actor.taken.call_one().get(20)
    return actor


@pytest.mark.parametrize("seconds", [(0.15,), pytest.param((0.03, 0.07, 0.09), marks=pytest.mark.wide)])
def test_looks_find_calls_that_follow_each_other(procs: Any, seconds: tuple[float, ...]) -> None:
    actor = idle_rank(procs)
    until = time.monotonic() + 2
    while time.monotonic() < until:
        for each in seconds:
            actor.work.call_one(each).get(20)
    found = actor.taken.call_one().get(20)
    busy = [each for each, _ in found]
    assert len(busy) > 5 and sum(busy) > len(busy) / 2, found


def test_looks_of_an_idle_rank_come_with_calls(procs: Any) -> None:
    actor = idle_rank(procs)
    for _ in range(20):
        time.sleep(0.1)
        actor.work.call_one(0.0).get(20)
    early = [left for _, left in actor.taken.call_one().get(20)]
    # Beside other work, one may be due before a call comes.
    assert sum(left > 0 for left in early) > len(early) / 2, early


def test_answers_to_rare_calls_stand_for_looks(procs: Any) -> None:
    actor = idle_rank(procs, answers=3)
    for _ in range(30):
        time.sleep(0.1)
        actor.work.call_one(0.0).get(20)
    # One each 0.2 s would be 15; without any, the files and the tensors of the rank would not be looked at.
    assert 1 <= len(actor.taken.call_one().get(20)) <= 9
