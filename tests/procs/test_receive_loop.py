"""Which thread receives: a waiting one, another waiting one, or the background; nothing is lost between them."""

from __future__ import annotations

import math
import random
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from leaks import wait_until
from monarch._wire.receiving.leadership import SYSTEM, TICK, Leadership
from monarch._wire.receiving.timers import Timers, until_next
from monarch.exceptions import DeadlockError
from receive_loops import GUARD, Background, Box, Rig, SilentAlarm


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    made.close()


def leads(rig: Rig, thread: threading.Thread | None = None) -> bool:
    ident = threading.get_ident() if thread is None else thread.ident
    return rig.receive_loop._lead.leader == ident


def background_leads(rig: Rig) -> bool:
    return leads(rig, rig.receive_loop._thread)


def waiting(rig: Rig) -> int:
    return rig.receive_loop._lead.waiting()


# Which thread handles messages


def test_waiting_thread_handles_its_answer(rig: Rig) -> None:
    for number in range(100):
        box = rig.box(number)
        rig.receive_loop.call_later(0.001, lambda number=number: rig.send(number)) if number % 10 == 0 else rig.send(
            number
        )
        assert rig.receive_loop.wait(box, GUARD)
    # The background may have handled some that came before the wait began, but not the awaited ones.
    ours = [rig.boxes[number].by == threading.get_ident() for number in range(0, 100, 10)]
    assert all(ours[1:])


def test_wait_that_is_already_done_reads_nothing(rig: Rig) -> None:
    box = rig.box(1)
    box.done = True
    assert rig.receive_loop.wait(box)
    assert rig.seen == []


def test_background_receives_while_nobody_waits(rig: Rig) -> None:
    rig.send("say")
    assert wait_until(lambda: rig.seen == [b"say"])
    assert rig.by == [rig.receive_loop._thread.ident]


def test_background_hands_over_and_takes_over_again(rig: Rig) -> None:
    for number in range(20):
        assert wait_until(lambda: background_leads(rig))
        box = rig.box(number)
        sender = Background(lambda number=number: wait_until(lambda: not background_leads(rig)) and rig.send(number))
        assert rig.receive_loop.wait(box, GUARD)
        sender.join()
        assert box.by == threading.get_ident()
        rig.send("say")
        assert wait_until(lambda: rig.seen[-1] == b"say")
        assert rig.by[-1] == rig.receive_loop._thread.ident


def test_background_wakes_ready_program_immediately(rig: Rig) -> None:
    box = rig.box(1)
    rig.send(1)
    rig.receive_loop.wait(box, GUARD)
    rig.receive_loop.background()
    assert wait_until(lambda: background_leads(rig))


def test_messages_are_handled_in_sending_order(rig: Rig) -> None:
    for number in range(3000):
        rig.send(f"say {number}")
        if number % 300 == 0:
            rig.receive_loop.wait(rig.box(1), 0.002)
    assert wait_until(lambda: len(rig.seen) == 3000)
    assert rig.seen == [f"say {number}".encode() for number in range(3000)]
    assert len({*rig.by}) > 1


# Several threads that wait


def test_another_thread_leads_when_leader_has_its_answer(rig: Rig) -> None:
    first, second = rig.box(1), rig.box(2)
    one = Background(lambda: rig.receive_loop.wait(first, GUARD))
    assert wait_until(lambda: leads(rig, one.thread))
    two = Background(lambda: rig.receive_loop.wait(second, GUARD))
    assert wait_until(lambda: waiting(rig) == 1)
    rig.send(1)
    assert one.join()
    assert wait_until(lambda: leads(rig, two.thread))
    rig.send(2)
    assert two.join()
    assert second.by == two.thread.ident


def test_leader_wakes_threads_whose_answer_came(rig: Rig) -> None:
    first = rig.box(0)
    leader = Background(lambda: rig.receive_loop.wait(first, GUARD))
    assert wait_until(lambda: leads(rig, leader.thread))
    boxes = [rig.box(number) for number in range(1, 6)]
    others = [Background(lambda box=box: rig.receive_loop.wait(box, GUARD)) for box in boxes]
    assert wait_until(lambda: waiting(rig) == 5)
    for number in (3, 1, 5, 2, 4):
        rig.send(number)
    for other in others:
        assert other.join()
    assert all(rig.boxes[number].by == leader.thread.ident for number in range(1, 6))
    rig.send(0)
    assert leader.join()


def test_several_threads_may_wait_for_one_answer(rig: Rig) -> None:
    first, shared = rig.box(0), rig.box(1)
    leader = Background(lambda: rig.receive_loop.wait(first))
    assert wait_until(lambda: leads(rig, leader.thread))
    others = [Background(lambda: rig.receive_loop.wait(shared)) for _ in range(4)]
    assert wait_until(lambda: waiting(rig) == 4)
    rig.send(1)
    for other in others:
        assert other.join()
    rig.send(0)
    assert leader.join()


def test_leader_wakes_on_completion_from_another_thread(rig: Rig) -> None:
    box = rig.box(1)
    leader = Background(lambda: rig.receive_loop.wait(box))
    assert wait_until(lambda: leads(rig, leader.thread))
    rig.fill(1)
    assert leader.join()


def test_new_leader_wakes_on_completion_from_another_thread(rig: Rig) -> None:
    first, second = rig.box(1), rig.box(2)
    one = Background(lambda: rig.receive_loop.wait(first))
    assert wait_until(lambda: leads(rig, one.thread))
    two = Background(lambda: rig.receive_loop.wait(second))
    assert wait_until(lambda: waiting(rig) == 1)
    rig.send(1)
    assert one.join()
    assert wait_until(lambda: leads(rig, two.thread))
    rig.fill(2)
    assert two.join()


def test_completion_as_wait_begins_is_not_missed(rig: Rig) -> None:
    """From another thread, at every moment of a wait that finds nobody leading."""
    router = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for number in range(3000):
            box = rig.box(number)
            other = threading.Thread(target=rig.fill, args=(number,))
            other.start()
            assert rig.receive_loop.wait(box, GUARD), f"lost the wake-up of wait {number}"
            other.join()
    finally:
        sys.setswitchinterval(router)


def test_leader_with_its_answer_does_not_receive(rig: Rig) -> None:
    """The answer comes between the check and the lead, when there is no thread to wake yet."""

    class Late(Box):
        looks = 0

        @property  # type: ignore[override]
        def done(self) -> bool:
            self.looks += 1
            return self.looks > 1

        @done.setter
        def done(self, value: bool) -> None:
            pass

    box = Late()
    waiter = Background(lambda: rig.receive_loop.wait(box))
    assert waiter.join()


# Timeouts


def test_timeout_is_met_and_wait_can_be_repeated(rig: Rig) -> None:
    box = rig.box(1)
    start = time.monotonic()
    assert not rig.receive_loop.wait(box, 0.05)
    assert time.monotonic() - start >= 0.05
    rig.send(1)
    assert rig.receive_loop.wait(box, GUARD)


def test_short_timeout_after_long_one_is_met(rig: Rig) -> None:
    """The socket's timeout is kept between waits where that saves a call, but never past a deadline."""
    rig.receive_loop.call_later(1000, lambda: None)

    def overrun(long: float, short: float) -> float:
        box = rig.box(1)
        threading.Timer(0.01, rig.send, (1,)).start()
        assert rig.receive_loop.wait(box, long)
        start = time.monotonic()
        assert not rig.receive_loop.wait(rig.box(2), short)
        return time.monotonic() - start - short

    for long, short in ((1.45, 1.0), (30.0, 0.3), (0.5, 0.4)):
        # A machine that is busy with other tests gets more tries.
        overruns = (overrun(long, short) for _ in range(4))
        assert any(0 <= each < 0.25 for each in overruns)


def test_thread_waiting_beside_leader_times_out(rig: Rig) -> None:
    first = rig.box(1)
    leader = Background(lambda: rig.receive_loop.wait(first, GUARD))
    assert wait_until(lambda: leads(rig, leader.thread))
    assert not rig.receive_loop.wait(rig.box(2), 0.03)
    assert waiting(rig) == 0
    rig.send(1)
    assert leader.join()


# Timers and posts


def test_timers_run_in_their_order_while_thread_waits(rig: Rig) -> None:
    ran: list[int] = []
    box = rig.box(1)
    for delay in (3, 1, 2):
        rig.receive_loop.call_later(delay / 100, lambda delay=delay: ran.append(delay))
    rig.receive_loop.call_later(0.05, lambda: rig.fill(1))
    assert rig.receive_loop.wait(box, GUARD)
    assert ran == [1, 2, 3]
    assert box.by == threading.get_ident()


def test_timer_that_may_be_early_runs_with_a_message(rig: Rig) -> None:
    ran: list[str] = []
    rig.receive_loop.call_later(GUARD, lambda: ran.append("early"), early=GUARD - 0.1)
    rig.receive_loop.call_later(GUARD, lambda: ran.append("exact"))
    assert not rig.receive_loop.wait(rig.box(1), 0.15)
    assert not ran, "a timeout is no reason to run it"
    rig.send("message")
    assert not rig.receive_loop.wait(rig.box(2), 0.05)
    assert ran == ["early"]


def test_timers_run_while_nobody_waits(rig: Rig) -> None:
    ran: list[int] = []
    rig.receive_loop.call_later(0.02, lambda: ran.append(threading.get_ident()))
    assert wait_until(lambda: ran == [rig.receive_loop._thread.ident])


def test_background_releases_lead_after_timer(rig: Rig) -> None:
    ran: list[int] = []
    rig.send("message that makes the background lead")
    assert wait_until(lambda: len(rig.seen) == 1)
    rig.receive_loop.call_later(0.01, lambda: ran.append(threading.get_ident()))
    assert wait_until(lambda: len(ran) == 1 and rig.receive_loop._lead.leader == 0), (
        "it would have to hand the lead over"
    )
    rig.send("message that nobody awaits")
    assert wait_until(lambda: len(rig.seen) == 2)
    assert rig.by[-1] == ran[0] == rig.receive_loop._thread.ident


def test_background_leaves_the_lead_after_a_needless_alarm(rig: Rig) -> None:
    lead, left = rig.receive_loop._lead, list[int]()
    leave = lead.leave

    def note() -> None:
        leave()
        left.append(threading.get_ident())

    assert not rig.receive_loop.wait(rig.box(0), 0.01), "takes the lead from the background thread"
    lead.leave = note
    lead.wake_by(time.monotonic())
    assert wait_until(lambda: left == [rig.receive_loop._thread.ident]), "the next wait would have to ask for the lead"
    assert lead.leader == 0
    rig.receive_loop.background()
    assert wait_until(lambda: background_leads(rig)), "an event loop that awaits has nobody else who receives"


def test_early_timer_that_ends_a_wait_silences_its_alarm(rig: Rig) -> None:
    box = rig.box(1)
    assert not rig.receive_loop.wait(rig.box(0), 0.01), "takes the lead from the background thread"
    rig.receive_loop.call_later(GUARD, lambda: rig.fill(1), early=GUARD)
    lead = rig.receive_loop._lead
    assert wait_until(lambda: time.monotonic() > lead._left + TICK), "after a shorter pause it is set in any case"
    assert lead._alarm_at < math.inf
    assert rig.receive_loop.wait(box, GUARD / 2)
    assert lead._alarm_at == math.inf


def test_alarm_is_quiet_about_timers_that_leader_runs(rig: Rig) -> None:
    alarm = SilentAlarm()
    timers = Timers(time.monotonic, threading.RLock())
    lead = Leadership(replace(SYSTEM, alarm=lambda _: alarm), rig.inbox, timers)
    rig.close_loop()
    timers.add(0.0, lambda: None)
    assert lead.take(1, rig.box(1))
    lead.leave()
    assert len(alarm.seconds) == 1 and alarm.seconds[0] < 1
    assert lead.take(1, rig.box(1))
    lead.timers_ran()
    lead.timers_ran()
    assert alarm.seconds[1:] == [math.inf], "it would wake a thread that has nothing to do"
    lead.leave()
    assert len(alarm.seconds) == 3 and alarm.seconds[2] < 1


def test_leader_that_runs_timers_leaves_the_alarm_of_close(rig: Rig) -> None:
    alarm = SilentAlarm()
    lead = Leadership(replace(SYSTEM, alarm=lambda _: alarm), rig.inbox, Timers(time.monotonic, threading.RLock()))
    rig.close_loop()
    leader = threading.get_ident() + 1
    assert lead.take(leader, rig.box(1))
    assert not lead.close(True, 0)
    assert alarm.seconds == [0.0]
    lead.timers_ran()
    assert alarm.seconds == [0.0], "the background thread would never end"


def test_close_while_timers_run_ends_the_background(rig: Rig) -> None:
    """It leads, runs a timer and leaves: the alarm that the close has set must not be silenced for that."""
    lead = Leadership(SYSTEM, rig.inbox, Timers(time.monotonic, threading.RLock()))
    rig.close_loop()
    leading, closing = threading.Event(), threading.Event()

    def background() -> bool:
        assert lead.take_for_background()
        leading.set()
        assert closing.wait(GUARD)
        lead.timers_ran()
        lead.leave()
        return lead.take_for_background()

    lead.hurry()
    thread = Background(background)
    assert leading.wait(GUARD)
    # Not patient: the leader stays until it is told.
    assert not lead.close(True, 0.0)
    closing.set()
    assert thread.join() is False


def test_timer_set_from_another_thread_wakes_leader(rig: Rig) -> None:
    box = rig.box(1)
    rig.receive_loop.call_later(1000, lambda: None)
    leader = Background(lambda: rig.receive_loop.wait(box))
    assert wait_until(lambda: leads(rig, leader.thread))
    rig.receive_loop.call_later(0.01, lambda: rig.fill(1))
    assert leader.join()


def test_posts_of_many_threads_run_once_in_order(rig: Rig) -> None:
    ran: list[tuple[int, int]] = []
    box = rig.box(1)

    def post(thread: int) -> None:
        for number in range(200):
            rig.receive_loop.post(lambda number=number: ran.append((thread, number)))

    threads = [Background(lambda thread=thread: post(thread)) for thread in range(5)]
    waiter = Background(lambda: rig.receive_loop.wait(box, GUARD))
    for thread in threads:
        thread.join()
    assert wait_until(lambda: len(ran) == 1000)
    for thread in range(5):
        assert [number for who, number in ran if who == thread] == list(range(200))
    rig.send(1)
    assert waiter.join()


def test_change_by_a_message_is_made_before_the_next_one(rig: Rig) -> None:
    ran: list[tuple[str, int]] = []
    by_then: list[int] = []

    def note(what: str) -> None:
        ran.append((what, threading.get_ident()))

    def change(frame: bytes) -> None:
        by_then.append(len(ran))
        if frame == b"posts":
            rig.receive_loop.post(lambda: note("posted"))
        if not frame.isdigit():
            rig.receive_loop.run_in_order(lambda: note(frame.decode()))

    rig.on_frame = change
    box = rig.box(1)
    for each in ("first", "second", "posts", 1):
        rig.send(each)
    assert rig.receive_loop.wait(box, GUARD)
    rig.receive_loop.run_in_order(lambda: note("from a thread"))
    assert wait_until(lambda: len(ran) == 5)
    # What was posted before is made before, and so both come later.
    assert by_then[:3] == [0, 1, 2]
    assert [what for what, _ in ran] == ["first", "second", "posted", "posts", "from a thread"]
    assert ran[-1][1] != threading.get_ident()


def test_raising_handler_does_not_stop_later_messages(rig: Rig, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(frame: bytes = b"bad") -> None:
        if frame == b"bad":
            raise ValueError("on purpose")

    rig.on_frame = fail
    box = rig.box(1)
    rig.receive_loop.post(fail)
    rig.receive_loop.call_later(0, fail)
    rig.send("bad")
    rig.send(1)
    assert rig.receive_loop.wait(box, GUARD)
    assert wait_until(lambda: not rig.receive_loop._timers.posted and not rig.receive_loop._timers.entries)
    assert wait_until(lambda: capsys.readouterr().err.count("on purpose") >= 1)


def test_wait_in_receiving_thread_is_error(rig: Rig) -> None:
    errors: list[BaseException] = []

    def waits(_: bytes = b"") -> None:
        for timeout in (None, 0.0, GUARD):
            try:
                rig.receive_loop.wait(Box(), timeout)
            except DeadlockError as error:
                errors.append(error)

    rig.on_frame = waits
    box = rig.box(1)
    rig.receive_loop.post(waits)
    rig.receive_loop.call_later(0, waits)
    rig.send(1)
    assert rig.receive_loop.wait(box, GUARD)
    assert wait_until(lambda: len(errors) == 9)
    assert rig.receive_loop.wait(rig.box(2), 0.01) is False


def test_slow_handler_is_reported_in_debug_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MONARCH_DEBUG", "1")
    rig = Rig(tmp_path)
    said: list[str] = []
    # Not as one string: the printed text has lines of this source.
    busy = " ".join(("busy", "for", "over", "50", "ms"))

    def takes_long(frame: bytes) -> None:
        if frame == b"1":
            assert wait_until(lambda: said.append(capfd.readouterr().err) or busy in "".join(said))

    rig.on_frame = takes_long
    box = rig.box(1)
    rig.send(1)
    assert rig.receive_loop.wait(box, GUARD)
    assert "busy for over 50 ms with a message of 1 bytes" in "".join(said)
    rig.close()


# The end


def test_close_keeps_waits_for_other_threads(rig: Rig) -> None:
    boxes = [rig.box(number) for number in range(4)]
    waiters = [Background(lambda box=box: rig.receive_loop.wait(box)) for box in boxes]
    assert wait_until(lambda: waiting(rig) == 3 and any(leads(rig, waiter.thread) for waiter in waiters))
    closing = Background(rig.receive_loop.close)
    closing.join()
    assert not rig.receive_loop._thread.is_alive()
    assert all(waiter.thread.is_alive() for waiter in waiters)
    for number in range(4):
        rig.fill(number)
    for waiter in waiters:
        assert waiter.join()


def test_close_works_while_nobody_waits(rig: Rig) -> None:
    Background(rig.receive_loop.close).join()
    assert not rig.receive_loop._thread.is_alive()
    rig.receive_loop.post(lambda: None)
    rig.receive_loop.call_later(0, lambda: None)


def test_close_works_from_the_leader(rig: Rig) -> None:
    box = rig.box(1)

    def close(frame: bytes) -> None:
        if frame == b"1":
            rig.receive_loop.close()

    rig.on_frame = close
    waiter = Background(lambda: rig.receive_loop.wait(box))
    assert wait_until(lambda: leads(rig, waiter.thread))
    rig.send(1)
    assert waiter.join()


# All at once


@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_lost_and_nobody_hangs_under_stress(tmp_path: Path, seed: int) -> None:
    """Eight threads wait with and without timeouts, post, set timers and complete what others wait for."""
    rig = Rig(tmp_path)
    echo = Background(lambda: None)
    router = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    rounds = 250
    posted: list[tuple[int, int]] = []

    def note(thread: int, step: int, number: int) -> None:
        posted.append((thread, step))
        rig.fill(number)

    def work(thread: int) -> None:
        chance = random.Random(seed * 100 + thread)
        for step in range(rounds):
            number = thread * rounds + step
            box = rig.boxes[number]
            way = chance.randrange(6)
            if way == 0:
                rig.receive_loop.call_later(chance.random() * 0.003, lambda number=number: rig.send(number))
            elif way == 1:
                rig.receive_loop.post(partial(note, thread, step, number))
            elif way == 2:
                threading.Thread(target=rig.fill, args=(number,)).start()
            elif way == 3:
                rig.receive_loop.call_later(chance.random() * 0.003, lambda number=number: rig.fill(number))
            else:
                rig.send(number)
            if chance.random() < 0.3:
                while not rig.receive_loop.wait(box, chance.random() * 0.002):
                    assert time.monotonic() < end, f"thread {thread} hangs in step {step}, way {way}"
            else:
                assert rig.receive_loop.wait(box, GUARD), f"thread {thread} hangs in step {step}, way {way}"
            if chance.random() < 0.02:
                time.sleep(0.008)

    for number in range(8 * rounds):
        rig.box(number)
    end = time.monotonic() + 60
    try:
        threads = [Background(lambda thread=thread: work(thread)) for thread in range(8)]
        for thread in threads:
            thread.thread.join(60)
        for thread in threads:
            thread.join()
        echo.join()
        assert all(box.done for box in rig.boxes.values())
        assert len(rig.seen) == len({*rig.seen})
        for thread in range(8):
            steps = [step for who, step in posted if who == thread]
            assert steps == sorted(steps)
        assert waiting(rig) == 0
    finally:
        sys.setswitchinterval(router)
        rig.close()


def test_periodic_timers_meet_in_one_wake_up() -> None:
    nows = [0.0, 0.25, 1.0, 17.3, 12345.999]
    for period in (1.0, 0.3):
        for now in nows:
            for early in (0.0, 0.4 * period):
                left = until_next(period, now, early)
                assert early < left <= early + period, "it would run at once, as early as it may"
                assert (now + left) / period == pytest.approx(round((now + left) / period))
