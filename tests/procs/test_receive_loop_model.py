"""Leadership, wake-ups and deadlines of the receive loop, under many schedules of its real code."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from monarch._wire.receiving.leadership import TICK, Primitives, Turn
from monarch._wire.receiving.loop import ReceiveLoop
from monarch.exceptions import DeadlockError
from schedules import INFINITE, Inbox, Schedule, primitives

FILES = ("_wire/receiving/loop.py", "_wire/receiving/leadership.py", "_wire/receiving/timers.py")
LATE = 0.0011
"""Seconds by which a deadline may be missed: the socket counts in milliseconds."""
CHUNKS, EACH = 8, 60


class Box:
    """Something to wait for."""

    def __init__(self) -> None:
        self.done = False
        self.thread: Turn | None = None


class Model:
    """A receive loop with simulated threads, and what must hold of it."""

    def __init__(self, seed: int) -> None:
        self.schedule = Schedule(seed, FILES, self.check)
        self.inbox = Inbox(self.schedule)
        self.receive_loop = ReceiveLoop(self.inbox, self.handle, self._primitives())  # type: ignore[arg-type]
        self.boxes: list[Box] = []
        self.waits: dict[int, tuple[Box, float]] = {}
        self.deep: set[int] = set()
        """Threads without room on their stack for the handling of messages."""
        self.sent = self.handled = 0
        self.working = 0
        self.nested = 0

    def _primitives(self) -> Primitives:
        may_lead = lambda: self.schedule.ident() not in self.deep  # noqa: E731
        return replace(primitives(self.schedule), may_lead=may_lead)

    def thread(self, name: str, work: Callable[[], None]) -> None:
        self.working += 1

        def run() -> None:
            work()
            self.working -= 1

        self.schedule.thread(run, name).start()

    # Behavior of the threads

    def handle(self, frame: bytes) -> None:
        assert self.schedule.ident() not in self.deep, "a thread without room on its stack handles messages"
        number, box = map(int, frame.split())
        assert number == self.handled, "a message was lost, or came twice, or out of order"
        self.handled += 1
        late = self.schedule.now - self.inbox.arrived
        assert late <= 4 * TICK + LATE, f"a message waited for {late * 1e3:.1f} ms"
        if box < 0:
            with pytest.raises(DeadlockError, match="is receiving the messages"):
                self.receive_loop.wait(Box(), random.Random(number).choice((None, 0.0, 5.0)))
            self.nested += 1
        else:
            self.fill(box)

    def fill(self, box: int) -> None:
        self.boxes[box].done = True
        self.schedule.point()
        self.receive_loop.notify(self.boxes[box])

    def send(self, box: int) -> None:
        self.inbox.send(b"%d %d" % (self.sent, box))
        self.sent += 1

    def sleep(self, seconds: float) -> None:
        until = self.schedule.now + seconds
        self.schedule.block(lambda: False, lambda: until)

    def box(self) -> int:
        self.boxes.append(Box())
        return len(self.boxes) - 1

    def wait(self, number: int, timeout: float | None) -> bool:
        box, ident = self.boxes[number], self.schedule.ident()
        deadline = INFINITE if timeout is None else self.schedule.now + timeout
        self.waits[ident] = box, deadline
        done = self.receive_loop.wait(box, timeout)
        del self.waits[ident]
        assert done or self.schedule.now >= deadline, "a wait ended before its time"
        assert self.schedule.now <= deadline + LATE, "a wait ended after its time"
        return done

    # What must hold whenever every thread waits

    def check(self) -> None:
        for box, deadline in self.waits.values():
            assert not box.done, "a wake-up was lost: what a thread waits for is done, and it sleeps on"
            assert self.schedule.now <= deadline + LATE, "a thread sleeps on after its deadline"
        lead = self.receive_loop._lead
        if self.waits.keys() - self.deep and not lead.closing:
            assert lead.leader, "threads wait, and nobody receives"
            assert not lead.background, "the background thread keeps the lead while a thread waits"


def work(model: Model, kinds: list[str]) -> None:
    """One thread: completes what it waits for in one way or another."""
    chance = model.schedule.chance
    for kind in kinds:
        number = model.box()
        pause = chance.choice((0.0, 0.0004, TICK / 2, TICK, 3 * TICK))
        if kind == "message":
            model.send(number)
        elif kind == "late message":
            model.receive_loop.call_later(pause, lambda number=number: model.send(number))
        elif kind == "thread":
            model.thread(f"fills {number}", lambda number=number, pause=pause: fill(model, number, pause))
        elif kind == "timer":
            model.receive_loop.call_later(pause, lambda number=number: model.fill(number))
        elif kind == "post":
            model.receive_loop.post(lambda number=number: model.fill(number))
        elif kind == "nested":
            model.send(-1)
            model.send(number)
        elif kind == "shared":
            # Another thread waits for the same.
            model.thread(f"shares {number}", lambda number=number: wait_shared(model, number))
            model.send(number)
        elif kind == "background":
            model.receive_loop.background()
            model.send(number)
        if kind == "nothing":
            assert not model.wait(number, pause)
        elif kind == "compute":
            before = model.box()
            model.send(before)
            model.send(number)
            # This may end before the second message is received.
            assert model.wait(before, None)
            model.sleep(5 * TICK)
            # The background thread has received it meanwhile.
            assert model.boxes[number].done
        elif kind == "asleep":
            # No thread waits, and there was nothing to receive when the last leader left.
            assert not model.wait(model.box(), TICK)
            model.sleep(TICK)
            model.send(number)
            model.sleep(5 * TICK)
            assert model.boxes[number].done
        elif kind == "deep":
            ident = model.schedule.ident()
            model.deep.add(ident)
            model.send(number)
            assert model.wait(number, chance.choice((None, 8 * TICK)))
            model.deep.remove(ident)
        elif chance.random() < 0.3:
            while not model.wait(number, chance.choice((0.0, 0.0002, TICK))):
                pass
        else:
            assert model.wait(number, None)


def fill(model: Model, number: int, pause: float) -> None:
    if pause:
        model.sleep(pause)
    model.fill(number)


def wait_shared(model: Model, number: int) -> None:
    assert model.wait(number, None)


def close(model: Model) -> None:
    """When all others have ended, nothing is left behind."""
    model.schedule.block(lambda: model.working == 1)
    model.receive_loop.close()
    lead = model.receive_loop._lead
    assert not lead.leader and not lead.waiting()
    assert all(box.thread is None for box in model.boxes)


KINDS = [
    "message",
    "late message",
    "thread",
    "timer",
    "post",
    "nothing",
    "compute",
    "nested",
    "shared",
    "background",
    "asleep",
    "deep",
]


def try_seed(seed: int) -> int:
    model = Model(seed)
    chance = random.Random(seed)

    def begin() -> None:
        model.receive_loop.start()
        for number in range(chance.choice((1, 2, 3))):
            kinds = chance.choices(KINDS, k=3)
            model.thread(f"works {number}", lambda kinds=kinds: work(model, kinds))
        model.thread("closes", lambda: close(model))

    model.schedule.thread(begin, "starts").start()
    try:
        model.schedule.run()
    except BaseException as error:
        raise AssertionError(f"schedule {seed}: {error}") from error
    assert model.handled == model.sent
    return model.nested


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_no_wakeup_is_lost_under_any_schedule(chunk: int) -> None:
    nested = sum(try_seed(seed) for seed in range(chunk * EACH, (chunk + 1) * EACH))
    assert nested, "no handler of these schedules has tried to wait"


def test_close_ends_while_thread_waits_under_any_schedule() -> None:
    for seed in range(150):
        model = Model(seed)

        def waits(model: Model = model) -> None:
            # Nobody completes it, so it waits until its timeout; the receive loop is closed meanwhile.
            assert not model.wait(model.box(), 5 * TICK)

        def closes(model: Model = model, waits: Callable[[], None] = waits) -> None:
            model.receive_loop.start()
            for _ in range(2):
                model.schedule.thread(waits, "waits").start()
            model.sleep(model.schedule.chance.choice((0.0, TICK / 2, 2 * TICK)))
            model.receive_loop.close()
            assert not model.receive_loop._lead.leader

        model.schedule.thread(closes, "closes").start()
        model.schedule.run()
