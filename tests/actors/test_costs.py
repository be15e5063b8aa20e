"""The steps that a small call takes, which decide its CPU time when the caches are cold."""

from __future__ import annotations

import sys
import time
from typing import Any

from monarch.actor import Actor, endpoint

_MOST_IN_RANK = 19
"""Python functions that a rank may run for a message. There were 44; each takes 2 to 7 us when calls are rare."""

_MOST_IN_PROGRAM = 58
"""The same for a program that sends a message and reads its answer: 52. There were 71."""
_AFTER_A_DEATH = 10
"""More of them once a process of the session has died: each call then looks whether its receivers live."""


class Counter(Actor):
    """Counts the functions of Python that its thread runs."""

    def __init__(self) -> None:
        self.count = 0

    @endpoint
    def echo(self, value: int) -> int:
        return value

    @endpoint
    def begin(self) -> None:
        def count(_frame: Any, event: str, _arg: Any) -> None:
            self.count += event == "call"

        sys.setprofile(count)

    @endpoint
    def reset(self) -> int:
        counted, self.count = self.count, 0
        return counted

    @endpoint
    def end(self) -> None:
        sys.setprofile(None)


def _count(counter: Any) -> int:
    """Return how many functions a rank runs from one message to the next, if no timer is due meanwhile."""
    counter.reset.call_one().get(timeout=20)
    # So that the process is idle, as between the calls of a notebook.
    time.sleep(0.01)
    return counter.reset.call_one().get(timeout=20)


def test_rank_takes_few_steps_for_a_message(procs: Any) -> None:
    counter = procs(1).spawn("counter", Counter)
    counter.begin.call_one().get(timeout=20)
    counts = [_count(counter) for _ in range(20)]
    counter.end.call_one().get(timeout=20)
    assert min(counts) <= _MOST_IN_RANK, counts


def test_program_takes_few_steps_for_a_call(procs: Any) -> None:
    counter = procs(1).spawn("counter", Counter)
    count = 0

    def step(_frame: Any, event: str, _arg: Any) -> None:
        nonlocal count
        count += event == "call"

    counts: list[int] = []
    for number in range(60):
        count = 0
        sys.setprofile(step)
        try:
            counter.echo.call_one(number).get(timeout=20)
        finally:
            sys.setprofile(None)
        counts.append(count)
    # The first calls of each second are written to the log of the mesh; another thread may receive some answers.
    most = _MOST_IN_PROGRAM + (_AFTER_A_DEATH if counter._node.peers.deaths else 0)
    assert min(counts) <= most, counts


def test_printed_text_comes_before_the_answer_without_a_newline(procs: Any, capfd: Any) -> None:
    class Printer(Actor):
        @endpoint
        def show(self, number: int) -> None:
            print(f"part {number}", end=" ")

    printer = procs(1).spawn("printer", Printer)
    for number in range(5):
        printer.show.call_one(number).get(timeout=20)
        assert f"part {number}" in capfd.readouterr().out
