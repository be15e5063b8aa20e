"""Flow control: both ends together, under any order of events and any schedule of threads."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from monarch._core import flow
from monarch._core.flow import PATIENCE, WINDOW, Finished, Window, finish_all, take_all
from monarch._node.peers.peer import LocalPeer

COSTS = st.sampled_from([1, 1, 1, 2, 3, 7, 25])
SMALL = 16
"""A window small enough that examples fill it."""


class Flow(RuleBasedStateMachine):
    """One sender and one receiver; messages arrive in order, are finished in any order, and reports in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.window, self.finished = Window(SMALL), Finished(SMALL)
        self.under_way: list[int] = []
        self.reports: list[int] = []
        self.sent = self.done = self.beyond = self.last = 0
        self.waiting = False

    @rule(cost=COSTS)
    def send(self, cost: int) -> None:
        room = self.window.has_room
        assert self.window.take(cost) == room
        self.waiting = not room
        if room:
            self.under_way.append(cost)
            self.sent += cost
            self.last = cost

    @precondition(lambda self: self.window.has_room)
    @rule(cost=COSTS)
    def take_and_give_back(self, cost: int) -> None:
        assert self.window.take(cost)
        full = not self.window.has_room
        assert self.window.give_back(cost) == full

    @precondition(lambda self: self.under_way)
    @rule(data=st.data(), answered=st.sampled_from(["at once", "later", "never"]))
    def finish(self, data: st.DataObject, answered: str) -> None:
        cost = self.under_way.pop(data.draw(st.integers(0, len(self.under_way) - 1)))
        self.done += cost
        if answered == "at once":
            self.reports.append(self.finished.report(cost))
        elif answered == "later":
            self.finished.add(cost)
            self.reports.append(self.finished.report())
        elif total := self.finished.due(cost):
            self.reports.append(total)

    @precondition(lambda self: self.reports)
    @rule(data=st.data())
    def hear(self, data: st.DataObject) -> None:
        had = self.window.has_room
        came = self.window.finished(self.reports.pop(data.draw(st.integers(0, len(self.reports) - 1))))
        assert came == (self.window.has_room and not had), "a sender that waits is told exactly when room comes"

    @precondition(lambda self: self.reports)
    @rule(data=st.data())
    def hear_in_one_thread(self, data: st.DataObject) -> None:
        had = self.window.has_room
        came = self.window.heard(self.reports.pop(data.draw(st.integers(0, len(self.reports) - 1))))
        assert came == (self.waiting and self.window.has_room and not had), "a refused sender is told when room comes"

    @precondition(lambda self: not self.window.has_room)
    @rule()
    def go_beyond(self) -> None:
        before = self.window.patience
        self.window.go_beyond()
        self.beyond += SMALL
        assert self.window.patience == 2 * before

    @invariant()
    def nothing_is_lost_or_made_up(self) -> None:
        assert self.window.sent == self.sent
        assert self.finished.total == self.done
        assert self.sent - self.done == sum(self.under_way)
        assert self.window.statistics().finished <= self.finished.reported <= self.done

    @invariant()
    def the_window_holds(self) -> None:
        # What go_beyond added, and of the last message all but its first unit.
        assert self.window.behind <= SMALL + self.beyond + max(0, self.last - 1)

    @invariant()
    def a_sender_never_starves(self) -> None:
        if not self.under_way and not self.reports:
            assert self.window.has_room
            assert self.window.behind < SMALL // 4

    def teardown(self) -> None:
        for cost in self.under_way:
            if total := self.finished.due(cost):
                self.reports.append(total)
        for total in self.reports:
            self.window.finished(total)
        assert self.window.has_room
        self.window.finished(self.finished.report())
        assert self.window.behind == 0


TestFlow = Flow.TestCase


@pytest.fixture(params=["1us", "5ms", "opcodes"])
def schedule(request: Any) -> Iterator[str]:
    """How threads alternate: by the clock, or at any bytecode of flow.py."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.005 if request.param == "5ms" else 1e-6)
    yield request.param
    sys.setswitchinterval(before)


def at_any_opcode(frame: FrameType, event: str, _: Any) -> Any:
    """Return a trace function that sometimes lets another thread run between two bytecodes of flow.py."""
    if frame.f_code.co_filename != flow.__file__:
        return None
    frame.f_trace_opcodes = True
    if event == "opcode" and random.random() < 0.1:
        # Releases the GIL, which CPython itself does only at calls and jumps.
        time.sleep(0)
    return at_any_opcode


def together(schedule: str, work: Callable[[int, int], None], count: int = 4) -> int:
    """Run a function in several threads at once, raising any error; return how many rounds each has done."""
    begin = threading.Barrier(count)
    errors: list[BaseException] = []
    rounds = 300 if schedule == "opcodes" else 20_000

    def run(number: int) -> None:
        begin.wait(10)
        if schedule == "opcodes":
            sys.settrace(at_any_opcode)
        try:
            work(number, rounds)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    if errors:
        raise errors[0]
    return rounds


def test_finished_loses_no_count_in_four_threads(schedule: str) -> None:
    finished = Finished()
    told = [0] * 4

    def work(number: int, rounds: int) -> None:
        for turn in range(rounds):
            if turn % 3 == 0:
                told[number] = max(told[number], finished.report(1))
            elif turn % 3 == 1:
                finished.add(1)
            else:
                told[number] = max(told[number], finished.due(1))

    rounds = together(schedule, work)
    assert finished.statistics() == (4 * rounds, finished.reported)
    assert max(told) == finished.reported


def test_window_loses_no_count_in_four_threads(schedule: str) -> None:
    window = Window(1 << 40)

    def work(number: int, rounds: int) -> None:
        for turn in range(rounds):
            assert window.take(2)
            window.give_back(1)
            window.finished(turn)

    rounds = together(schedule, work)
    assert window.statistics()[:2] == (4 * rounds, rounds - 1)


def test_window_admits_one_message_into_last_room(schedule: str) -> None:
    for _ in range(20):
        window = Window(1)
        taken = [False] * 4

        def work(number: int, _: int, window: Window = window, taken: list[bool] = taken) -> None:
            taken[number] = window.take(5)

        together(schedule, work)
        assert taken.count(True) == 1 and window.sent == 5


def test_two_ends_lose_no_credit_between_eight_threads(schedule: str) -> None:
    """Four threads send through one window, four finish, and only reports make room."""
    window, finished = Window(64), Finished(64)
    messages, reports = threading.Semaphore(0), threading.Semaphore(0)

    def work(number: int, rounds: int) -> None:
        for _ in range(rounds // 4):
            if number < 4:
                while not window.take(1):
                    assert reports.acquire(timeout=20), "waits for room for ever"
                messages.release()
            else:
                assert messages.acquire(timeout=20)
                total = finished.due(1) if number % 2 else finished.report(1)
                if total and window.finished(total):
                    reports.release(4)

    count = 4 * (together(schedule, work, 8) // 4)
    window.finished(finished.report())
    assert window.statistics()[:2] == (count, count)


def test_opened_window_lets_everything_pass() -> None:
    window = Window(2)
    assert window.take(5) and not window.take(1)
    window.open()
    assert window.take(10**9)
    assert not window.finished(10**10), "nobody waits for the room of a receiver that is gone"


class Peer:
    """Has a window."""

    def __init__(self) -> None:
        self.window = Window(2)


def test_room_at_many_receivers_is_reserved_up_to_a_full_one() -> None:
    peers = [Peer() for _ in range(4)]
    assert take_all(peers, 1) == -1
    assert peers[2].window.take(1)
    assert take_all(peers, 1) == 2
    assert [peer.window.sent for peer in peers] == [2, 2, 2, 1]


def test_equal_reports_of_many_tell_those_that_wait() -> None:
    peers = [Peer() for _ in range(4)]
    for peer in peers:
        assert peer.window.take(2)
    assert not peers[1].window.take(1)
    assert finish_all(peers, 1) == [peers[1]]
    assert all(peer.window.statistics() == (2, 1, 3) and peer.window.behind == 1 for peer in peers)
    # An older report changes nothing, and the room is there for those that were not told.
    assert finish_all(peers, 0) == []
    assert take_all(peers, 1) == -1


def test_progress_restores_patience_of_sender() -> None:
    window = Window()
    window.go_beyond()
    window.go_beyond()
    assert (window.patience, window.limit) == (4 * PATIENCE, 3 * WINDOW)
    window.finished(1)
    assert (window.patience, window.limit) == (PATIENCE, 3 * WINDOW)


def test_reports_of_own_replies_may_come_from_several_threads(schedule: str) -> None:
    table: Any = SimpleNamespace(proc="h/p.0")
    peer = LocalPeer(table, "h/p.0")
    finished = Finished(1 << 40)

    def work(number: int, rounds: int) -> None:
        for _ in range(rounds):
            total = finished.report(1)
            peer.hears(total)
            assert peer.window.statistics().finished >= total

    rounds = together(schedule, work)
    assert peer.window.statistics().finished == 4 * rounds
