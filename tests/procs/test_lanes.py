"""Lanes: actions in order, and successors of threads that are stuck."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from leaks import wait_until
from monarch._node.services import lanes
from monarch._node.services.lanes import Lanes, StuckError

GUARD = 30.0


@pytest.fixture
def stick(monkeypatch: pytest.MonkeyPatch) -> Callable[[Lanes, int], tuple[threading.Event, threading.Event]]:
    """Return a function that posts an action which is stuck until an event is set."""
    monkeypatch.setattr(lanes, "STUCK_S", 0.0)

    def post(target: Lanes, threads: int) -> tuple[threading.Event, threading.Event]:
        begun, go = threading.Event(), threading.Event()

        def stuck_action() -> None:
            begun.set()
            go.wait(GUARD)

        target.post("look", stuck_action, threads)
        return begun, go

    return post


Stick = Callable[[Lanes, int], tuple[threading.Event, threading.Event]]


def test_later_action_overtakes_a_stuck_one(stick: Stick) -> None:
    target, done = Lanes(), threading.Event()
    begun, go = stick(target, 3)
    assert begun.wait(GUARD)
    target.post("look", done.set, 3)
    assert done.wait(GUARD) and not target.is_idle("look")
    go.set()


def test_lane_of_one_thread_keeps_its_order(stick: Stick) -> None:
    target, done = Lanes(), threading.Event()
    begun, go = stick(target, 1)
    assert begun.wait(GUARD)
    target.post("look", done.set)
    assert not done.is_set()
    go.set()
    assert done.wait(GUARD)


def test_lane_with_all_threads_stuck_names_lane_time_and_line(stick: Stick) -> None:
    target, done = Lanes(), threading.Event()
    gates = []
    for _ in range(3):
        begun, go = stick(target, 3)
        assert begun.wait(GUARD)
        gates.append(go)
    with pytest.raises(StuckError, match=r"look is stuck: its 3 threads .* oldest for \d+ s at .*:\d+ in \w+"):
        target.post("look", done.set, 3)
    assert not done.is_set()
    before = set(threading.enumerate())
    for go in gates:
        go.set()
    for thread in before:
        if thread.name == "monarch-look":
            thread.join(GUARD)
    target.post("look", done.set, 3)
    assert done.wait(GUARD)


def _ran_in(target: Lanes, linger_s: float) -> threading.Thread:
    """Run an action in a lane, and return its thread."""
    found, done = list[threading.Thread](), threading.Event()

    def look() -> None:
        found.append(threading.current_thread())
        done.set()

    target.post("look", look, linger_s=linger_s)
    assert done.wait(GUARD) and wait_until(lambda: target.is_idle("look"))
    return found[0]


def test_thread_of_a_lane_ends_without_more_work() -> None:
    target, before = Lanes(), None
    for _ in range(2):
        thread = _ran_in(target, lanes._LINGER_S)
        thread.join(GUARD)
        assert not thread.is_alive() and thread is not before
        before = thread


def test_thread_of_a_lane_lingers_as_long_as_told() -> None:
    target = Lanes()
    thread = _ran_in(target, 3.0)
    # Longer than a lane lingers otherwise.
    thread.join(0.7)
    assert _ran_in(target, 3.0) is thread
    thread.join(GUARD)
    assert not thread.is_alive()
