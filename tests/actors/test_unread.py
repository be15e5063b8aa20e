"""Errors of calls whose futures nobody reads are told, once."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from typing import Any

import pytest

from leaks import wait_until
from monarch._wire.receiving import aside
from monarch.actor import Actor, endpoint
from monarch.exceptions import ActorError, SupervisionError

SOON = 20.0


class Fails(Actor):
    @endpoint
    def fail(self, text: str) -> None:
        raise ValueError(text)

    @endpoint
    def wait(self) -> None:
        time.sleep(1000)

    @endpoint
    def exit(self) -> None:
        os._exit(3)


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Callable[[], str]:
    texts: list[str] = []

    def read() -> str:
        gc.collect()
        aside.flush(SOON)
        texts.append(capsys.readouterr().err)
        return "".join(texts)

    return read


def test_error_of_a_dropped_call_is_told(procs: Any, told: Callable[[], str]) -> None:
    actors = procs(2).spawn("fails", Fails)
    actors.fail.call("bad sample")
    assert wait_until(lambda: "dropped" in told())
    text = told()
    assert text.count("dropped without get()") == 1, text
    assert "monarch: fails.fail() failed on rank" in text and "ValueError: bad sample" in text
    assert "test_unread.py" in text


def test_error_that_is_read_is_not_told(procs: Any, told: Callable[[], str]) -> None:
    actors = procs(2).spawn("fails", Fails)
    with pytest.raises(ActorError, match="bad sample"):
        actors.fail.call("bad sample").get(timeout=SOON)
    assert isinstance(actors.fail.call("bad").exception(timeout=SOON), ActorError)
    for future in actors.fail.stream("bad"):
        with pytest.raises(ActorError):
            future.get(timeout=SOON)
    assert "dropped" not in told()


def test_kept_future_is_not_told(procs: Any, told: Callable[[], str]) -> None:
    futures = [procs(1).spawn("fails", Fails).fail.call("kept")]
    assert wait_until(lambda: futures[0].done)
    assert "dropped" not in told()
    futures.clear()
    assert "ValueError: kept" in told()


def test_death_that_ends_dropped_calls_is_told_once(procs: Any, told: Callable[[], str]) -> None:
    actors = procs(1).spawn("fails", Fails)
    actors.exit.call()
    for _ in range(2):
        actors.wait.call()
    assert wait_until(lambda: "dropped" in told())
    text = told()
    assert "failed: the process of rank 0" in text and text.count("dropped without get()") == 1, text


def test_death_that_one_call_has_raised_is_not_told(procs: Any, told: Callable[[], str]) -> None:
    actors = procs(1).spawn("fails", Fails)
    ends = actors.exit.call()
    actors.wait.call()
    with pytest.raises(SupervisionError):
        ends.get(timeout=SOON)
    assert "dropped" not in told()


def test_equal_errors_in_a_row_are_counted(procs: Any, told: Callable[[], str]) -> None:
    actors = procs(1).spawn("fails", Fails)
    for _ in range(40):
        actors.fail.call("again")
    assert wait_until(lambda: "(39 more times)" in told()), told()
    assert told().count("ValueError: again") == 2


@pytest.mark.parametrize("count", [1, 2, 3])
def test_few_equal_texts_are_all_shown(told: Callable[[], str], count: int) -> None:
    for _ in range(count):
        aside.tell("monarch: it failed\n  again")
    aside.tell("monarch: other")
    first = "monarch: it failed\n  again\n"
    more = ["", first, "monarch: it failed (2 more times)\n"][count - 1]
    assert told() == f"{first}{more}monarch: other\n"
