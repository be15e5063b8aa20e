"""The tracer of one thread: where steps end, which breakpoints are met, and that nothing is traced without them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from monarch._actors.pausing.points import FUNCTION, LINE, RAISED, RankBreakpoints
from monarch._actors.pausing.tracing import FINISH, INTO, NEXT, OUT, UNTIL, StepState, StopReason, Tracer

CODE = """def inner(x):
    y = x + 1
    return y

def outer(n):
    start()
    a = inner(n)
    for i in range(3):
        a += i
    b = inner(a)
    return b

def gen():
    start()
    yield 1
    yield 2

def sums():
    total = 0
    for each in gen():
        total += each
    return total

def bad():
    start()
    raise ValueError

def caught():
    try:
        bad()
    except ValueError:
        done = 1
    return done

async def leaf(x):
    start()
    await asyncio.sleep(0)
    return x

async def trunk():
    got = await leaf(1)
    return got + 1

async def forest():
    both = await asyncio.gather(leaf(1))
    return both
"""


class Seat:
    """Runs code under a tracer, and lists where it stops."""

    def __init__(self) -> None:
        self.points = RankBreakpoints()
        self.stops: list[tuple[str, int, str]] = []
        self.steps: list[StepState] = []
        self.over = 0
        self.is_busy = True
        self.tracer = Tracer(self.points, self._reached, self._count, lambda: self.is_busy, lambda: 0)
        self.names: dict[str, Any] = {"start": self._start, "__name__": "mod", "asyncio": asyncio}
        exec(compile(CODE, "cell [1]", "exec"), self.names)

    def _count(self) -> None:
        self.over += 1

    def _start(self) -> None:
        if self.steps:
            self.tracer.begin(sys._getframe(1), self.steps.pop(0))

    def _reached(self, frame: FrameType, stop: StopReason) -> None:
        self.stops.append((frame.f_code.co_name, frame.f_lineno, stop.text))
        if self.steps:
            self.tracer.begin(frame, self.steps.pop(0))

    def run(self, call: Callable[[], Any], *steps: StepState) -> Any:
        """Run a function, with a step from ``start()`` on and from each stop."""
        self.steps = list(steps)
        self.tracer.settle(sys._getframe())
        return call()

    def places(self) -> list[tuple[str, int]]:
        """The functions and lines of the stops so far."""
        return [(name, line) for name, line, _ in self.stops]

    def set(self, *points: tuple[int, str, str, int, str], hits: str = "", message: str = "") -> None:
        """Set breakpoints."""
        self.points.take([(*each, hits, message) for each in points])


@pytest.fixture
def seat() -> Iterator[Seat]:
    before = sys.gettrace()
    sys.settrace(None)
    yield Seat()
    sys.settrace(before)


def test_next_goes_over_calls(seat: Seat) -> None:
    assert seat.run(lambda: seat.names["outer"](1), *[StepState(NEXT)] * 3) == 6
    assert seat.places() == [("outer", 7), ("outer", 8), ("outer", 9)]


def test_step_goes_into_calls_and_back(seat: Seat) -> None:
    seat.run(lambda: seat.names["outer"](1), *[StepState(INTO)] * 5)
    assert seat.places() == [("outer", 7), ("inner", 2), ("inner", 3), ("outer", 8), ("outer", 9)]


def test_until_leaves_a_loop(seat: Seat) -> None:
    seat.run(lambda: seat.names["outer"](1), StepState(UNTIL, 9), StepState(UNTIL))
    assert seat.places() == [("outer", 9), ("outer", 10)]


def test_finish_shows_the_value(seat: Seat) -> None:
    seat.run(lambda: seat.names["outer"](1), StepState(INTO), StepState(INTO), StepState(FINISH), StepState(NEXT))
    assert seat.stops == [("outer", 7, ""), ("inner", 2, ""), ("inner", 3, "returns 2"), ("outer", 8, "")]


def test_next_at_the_end_stops_in_the_caller(seat: Seat) -> None:
    def test() -> int:
        value = seat.names["outer"](1)
        return value + 1

    test.__code__ = test.__code__.replace(co_filename="cell [2]")
    seat.run(test, StepState(UNTIL, 11), StepState(NEXT))
    assert [name for name, _ in seat.places()] == ["outer", "test"]


def test_next_in_a_generator_stays_in_it(seat: Seat) -> None:
    assert seat.run(seat.names["sums"], *[StepState(NEXT)] * 3) == 3
    assert seat.places()[:2] == [("gen", 15), ("gen", 16)]


def test_next_at_the_end_of_a_coroutine_stops_at_its_await(seat: Seat) -> None:
    assert seat.run(lambda: asyncio.run(seat.names["trunk"]()), *[StepState(NEXT)] * 3) == 2
    assert seat.places() == [("leaf", 37), ("leaf", 38), ("trunk", 42)]


def test_finish_of_a_coroutine_is_not_at_its_await(seat: Seat) -> None:
    assert seat.run(lambda: asyncio.run(seat.names["trunk"]()), StepState(FINISH), StepState(NEXT)) == 2
    assert seat.stops == [("leaf", 38, "returns 1"), ("trunk", 42, "")]


def test_next_at_the_end_of_a_task_stops_in_the_next_one(seat: Seat) -> None:
    assert seat.run(lambda: asyncio.run(seat.names["forest"]()), *[StepState(NEXT)] * 3) == [1]
    assert seat.places() == [("leaf", 37), ("leaf", 38), ("forest", 46)]


def test_step_out_of_an_error_ends_where_it_is_caught(seat: Seat) -> None:
    assert seat.run(seat.names["caught"], StepState(NEXT), StepState(NEXT), StepState(NEXT)) == 1
    assert seat.places() == [("bad", 26), ("caught", 31), ("caught", 32)]


def test_step_ends_with_its_call(seat: Seat) -> None:
    seat.tracer.begin(sys._getframe(), StepState(FINISH))
    seat.is_busy = False
    seat.names["inner"](1)
    assert seat.over == 1 and sys.gettrace() is None


def test_interrupt_ends_a_step(seat: Seat) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    seat.names["inner"] = lambda x: interrupt()
    with pytest.raises(KeyboardInterrupt):
        seat.run(lambda: seat.names["outer"](1), StepState(NEXT), StepState(NEXT))
    assert seat.over == 1 and sys.gettrace() is None and seat.places() == [("outer", 7)]


def test_breakpoints_at_lines_functions_and_conditions(seat: Seat) -> None:
    seat.set((1, LINE, "cell [1]", 9, "i == 2"), (2, FUNCTION, "mod.inner", 0, ""), (3, LINE, "cell [2]", 7, ""))
    assert seat.run(lambda: seat.names["outer"](1)) == 6
    assert seat.stops == [("inner", 2, "breakpoint 2"), ("outer", 9, "breakpoint 1 if i == 2"),
                          ("inner", 2, "breakpoint 2")]  # fmt: skip
    seat.set()
    seat.names["outer"](1)
    assert sys.gettrace() is None and len(seat.stops) == 3


def test_each_breakpoint_of_a_place_has_its_condition(seat: Seat) -> None:
    seat.set(
        (1, FUNCTION, "mod.inner", 0, "x == 1"), (2, FUNCTION, "mod.inner", 0, "x == 7"),
        (3, LINE, "cell [1]", 3, "x == 1"), (4, LINE, "cell [1]", 3, "x == 7"),
    )  # fmt: skip
    seat.run(lambda: [seat.names["inner"](each) for each in (1, 2, 7)])
    assert seat.places() == [("inner", 2), ("inner", 3)] * 2


def test_condition_that_raises_stops(seat: Seat) -> None:
    seat.set((4, LINE, "cell [1]", 3, "missing > 1"))
    seat.run(lambda: seat.names["inner"](1))
    text = "breakpoint 4, whose condition raises NameError: name 'missing' is not defined"
    assert seat.stops == [("inner", 3, text)]


def test_other_functions_are_not_traced(seat: Seat) -> None:
    seat.set((1, LINE, "cell [1]", 2, "False"))
    frames: list[Any] = []
    seat.names["start"] = lambda: frames.append(sys._getframe(1).f_trace)
    seat.run(lambda: seat.names["outer"](1))
    assert frames == [None]


def test_running_function_gets_its_breakpoints(seat: Seat) -> None:
    def begin() -> None:
        seat.set((1, LINE, "cell [1]", 9, "i == 1"))
        seat.tracer.settle(sys._getframe(1))

    seat.names["start"] = begin
    assert seat.names["outer"](1) == 6
    assert seat.places() == [("outer", 9)]
    seat.set()
    seat.tracer.settle(sys._getframe())


def test_another_debugger_is_left_alone(seat: Seat) -> None:
    def other(*_: Any) -> None:
        return None

    sys.settrace(other)
    seat.set((1, LINE, "cell [1]", 2, ""))
    seat.run(lambda: seat.names["outer"](1))
    assert sys.gettrace() is other and not seat.stops
    sys.settrace(None)


TAKEN_BACK = """
import sys, threading
from monarch._actors.interrupts import ThreadInterrupts
left, end = threading.Event(), threading.Event()
def run():
    interrupts = ThreadInterrupts()
    interrupts.enter()
    lock = interrupts._lock
    with lock:
        interrupts.leave()
        # As from another thread, just before it has ended.
        interrupts._raised = True
        interrupts.leave()
    left.set()
    end.wait()
thread = threading.Thread(target=run, daemon=True)
thread.start()
left.wait()
def traced():
    return 1
sys.settrace(lambda *_: None)
for _ in range(1000):
    traced()
sys.settrace(None)
end.set()
print("goes on")
"""


def test_tracing_goes_on_after_an_interrupt_was_taken_back() -> None:
    """Python 3.11 is caught in a loop there if it is left looking for an exception of another thread."""
    ran = subprocess.run([sys.executable, "-c", TAKEN_BACK], capture_output=True, text=True, timeout=60, check=False)
    assert ran.stdout == "goes on\n", ran.stderr


def test_out_stops_in_the_line_of_the_caller(seat: Seat) -> None:
    # start() begins the first step: into inner, out of it, and on.
    seat.run(lambda: seat.names["outer"](1), StepState(INTO), StepState(INTO), StepState(OUT), StepState(NEXT))
    assert seat.places() == [("outer", 7), ("inner", 2), ("outer", 8), ("outer", 9)]


def test_hits_say_which_times_count(seat: Seat) -> None:
    for hits, values in (("2", [1]), ("> 2", [2, 3]), ("% 2", [1, 3])):
        seat.stops = []
        seat.set((1, LINE, "cell [1]", 2, ""), hits=hits)
        seat.run(lambda: [seat.names["inner"](each) for each in range(4)])
        assert len(seat.stops) == len(values), hits


def test_hits_go_on_counting_beside_a_new_breakpoint(seat: Seat) -> None:
    first = (1, LINE, "cell [1]", 2, "", ">= 3", "")
    seat.points.take([first])
    seat.run(lambda: [seat.names["inner"](each) for each in range(2)])
    seat.points.take([first, (2, LINE, "cell [2]", 7, "", "", "")])
    seat.run(lambda: seat.names["inner"](2))
    assert seat.places() == [("inner", 2)]


def test_hits_that_are_no_number_are_refused(seat: Seat) -> None:
    with pytest.raises(ValueError, match="expected a number of hits"):
        seat.set((1, LINE, "cell [1]", 2, ""), hits="often")


def test_message_is_printed_instead_of_a_stop(seat: Seat, capsys: pytest.CaptureFixture[str]) -> None:
    seat.set((1, LINE, "cell [1]", 2, ""), message="x is {x}, {missing}")
    seat.run(lambda: seat.names["inner"](3))
    assert capsys.readouterr().out == "x is 3, <NameError: name 'missing' is not defined>\n"
    assert seat.stops == []


def test_errors_stop_where_they_are_raised(seat: Seat) -> None:
    seat.set((0, RAISED, "", 0, ""))
    assert seat.run(lambda: seat.names["caught"]()) == 1
    assert [(name, line) for name, line, _ in seat.stops] == [("bad", 26)]
    assert seat.stops[0][2] == "ValueError"
