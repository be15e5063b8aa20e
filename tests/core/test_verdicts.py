"""Verdicts: open from the first hold to the last release, each ended exactly once, under any schedule."""

from __future__ import annotations

import inspect
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from monarch._core.verdicts import Hold, Tally, Verdicts


class End:
    """The object that waits for a verdict."""

    def __init__(self) -> None:
        self.completed = 0


class Model(RuleBasedStateMachine):
    """Compares with a plain list of holds for each mesh."""

    holds: Bundle[tuple[str, Hold[End]]] = Bundle("holds")
    released: Bundle[Hold[End]] = Bundle("released")

    def __init__(self) -> None:
        super().__init__()
        self.ends: list[End] = []
        self.verdicts: Verdicts[End] = Verdicts(self.make)
        self.model: dict[str, list[Hold[End]]] = {}
        self.waiting: dict[str, End] = {}

    def make(self) -> End:
        self.ends.append(End())
        return self.ends[-1]

    @rule(target=holds, mesh=st.sampled_from("ab"))
    def hold(self, mesh: str) -> tuple[str, Hold[End]]:
        fresh = not self.model.get(mesh)
        hold = self.verdicts.hold(mesh, f"holder {len(self.ends)}")
        self.model.setdefault(mesh, []).append(hold)
        end = self.verdicts.open(mesh)
        assert end is not None and not end.completed
        assert fresh or end is self.waiting[mesh]
        self.waiting[mesh] = end
        return mesh, hold

    @rule(target=released, held=consumes(holds))
    def release(self, held: tuple[str, Hold[End]]) -> Hold[End]:
        mesh, hold = held
        self.model[mesh].remove(hold)
        end = self.verdicts.release(hold)
        assert (end is not None) == (not self.model[mesh])
        if end is not None:
            assert end is self.waiting[mesh]
            end.completed += 1
        return hold

    @rule(hold=released)
    def release_again(self, hold: Hold[End]) -> None:
        assert self.verdicts.release(hold) is None

    @invariant()
    def open_is_what_is_held(self) -> None:
        held = {mesh for mesh, holds in self.model.items() if holds}
        assert set(self.verdicts.meshes()) == held
        assert all(len(self.verdicts.holders(mesh)) == len(self.model.get(mesh, [])) for mesh in "ab")
        assert sum(1 for end in self.ends if not end.completed) == len(held)
        assert all(end.completed <= 1 for end in self.ends)


Model.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestModel = Model.TestCase


@pytest.fixture
def busy() -> Iterator[None]:
    """Make threads alternate as often as possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def give_way(frame: FrameType, event: str, _: Any) -> Any:
    """A trace function that lets another thread run before each line under test."""
    if frame.f_code.co_filename != inspect.getfile(Verdicts):
        return None
    if event == "line":
        time.sleep(0)
    return give_way


def together(count: int, work: Callable[[int], None]) -> None:
    """Runs a function in several threads at once; an error of one is raised."""
    gate, errors = threading.Barrier(count), list[BaseException]()

    def run(number: int) -> None:
        gate.wait(30)
        sys.settrace(give_way)
        try:
            work(number)
        except BaseException as error:
            errors.append(error)
        finally:
            sys.settrace(None)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    if errors:
        raise errors[0]


def test_verdicts_end_once_each_when_judges_race(busy: None) -> None:
    ends: list[End] = []

    def make() -> End:
        ends.append(End())
        return ends[-1]

    verdicts: Verdicts[End] = Verdicts(make)

    def judge(number: int) -> None:
        for turn in range(300):
            hold = verdicts.hold("m", f"judge {number}.{turn}")
            end = verdicts.open("m")
            # While this judge holds it, the verdict is open, and stays the same.
            assert end is not None and not end.completed
            assert f"judge {number}.{turn}" in verdicts.holders("m")
            assert verdicts.open("m") is end and not end.completed
            done = verdicts.release(hold)
            if done is not None:
                assert done is end
                done.completed += 1

    together(4, judge)
    assert verdicts.meshes() == [] and verdicts.open("m") is None
    assert [end for end in ends if end.completed != 1] == []


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=20))
def test_tally_reports_unhandled_ranks_once(events: list[tuple[int, bool]]) -> None:
    tally, first = Tally(range(3)), dict[int, bool]()
    reports: list[tuple[int, ...]] = []
    for rank, handled in events:
        report = tally.judged(rank, handled)
        if rank < 3:
            first.setdefault(rank, handled)
        reports.extend([report] if report else [])
    expected = tuple(rank for rank in sorted(first) if not first[rank])
    assert reports == ([expected] if len(first) == 3 and expected else [])


def test_tally_reports_once_when_verdicts_race(busy: None) -> None:
    rounds = [Tally(range(4)) for _ in range(1000)]
    reports: list[Counter[tuple[int, ...]]] = [Counter() for _ in rounds]

    def judge(number: int) -> None:
        for tally, found in zip(rounds, reports, strict=True):
            report = tally.judged(number, False)
            if report:
                found[report] += 1

    together(4, judge)
    assert all(found == {(0, 1, 2, 3): 1} for found in reports)
