"""Calls at the limit of recursion: a message handled on a full stack would be lost to whoever waits for it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

from meshes import values
from monarch.actor import Actor, endpoint

DEEPEST = 130
"""Calls below the limit of recursion from which on calls are tried."""


class Echo(Actor):
    @endpoint
    def same(self, value: int) -> int:
        return value


def deep(calls: int, step: Callable[[], Any]) -> Any:
    return deep(calls - 1, step) if calls else step()


def depth() -> int:
    frame, count = sys._getframe(), 0
    while frame.f_back is not None:
        frame, count = frame.f_back, count + 1
    return count


def test_calls_at_the_limit_of_recursion_lose_no_message(procs: Callable[..., Any]) -> None:
    echo = procs(2).spawn("echo", Echo)
    assert values(echo.same.call(0)) == [0, 0]
    over = Event()

    def shallow() -> int:
        count = 0
        while not over.is_set():
            assert values(echo.same.call(count), timeout=20) == [count, count]
            count += 1
        return count

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(shallow)
        full = 0
        try:
            room = sys.getrecursionlimit() - depth()
            for below in range(DEEPEST, 0, -1):
                try:
                    assert deep(room - below, lambda below=below: values(echo.same.call(below), 20)) == [below, below]
                except RecursionError:
                    full += 1
        finally:
            over.set()
        assert full and other.result(60)
    assert values(echo.same.call(1)) == [1, 1]
