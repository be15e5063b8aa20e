"""Runs the threads of a test one at a time, and changes between them at every line of the code under test.

The time is simulated: it goes on only when every thread waits. So a schedule depends on its seed alone, and what a
thread does after a wake-up that was lost is seen as a time that went on too early.
"""

from __future__ import annotations

import random
import sys
import threading
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import Any

import zmq

from monarch._wire.receiving.leadership import Primitives

INFINITE = float("inf")
GUARD = 20.0
"""Seconds of the real clock after which a schedule counts as hanging."""


class Ended(BaseException):
    """The schedule has failed: every thread ends."""


class Thread:
    """A thread that runs while the schedule lets it."""

    def __init__(self, schedule: Schedule, work: Callable[[], None], name: str) -> None:
        self._schedule = schedule
        self._work = work
        self.name = name
        self.ident: int | None = None
        self.go = threading.Semaphore(0)
        self.ready: Callable[[], bool] | None = None
        """Return the thing that it waits for; None while it can run."""
        self.until: Callable[[], float] = lambda: INFINITE
        self.over = False
        self._real = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self.ident = self._schedule.add(self)
        self._real.start()

    def join(self) -> None:
        self._schedule.block(lambda: self.over)

    def can_run(self, now: float) -> bool:
        return not self.over and (self.ready is None or self.ready() or self.until() <= now)

    def _run(self) -> None:
        self.go.acquire()
        sys.settrace(self._schedule.trace)
        try:
            self._work()
        except Ended:
            pass
        except BaseException as error:
            self._schedule.fail(error)
        finally:
            sys.settrace(None)
            self.over = True
            self._schedule.next()


class Schedule:
    """One order of steps of some threads.

    Args:
        seed: decides the order.
        files: ends of the names of the files whose lines are steps.
        check: called before the time goes on, when every thread waits; it raises what is wrong.
    """

    def __init__(self, seed: int, files: tuple[str, ...], check: Callable[[], None] = lambda: None) -> None:
        self.chance = random.Random(seed)
        self.now = 100.0
        self.check = check
        self.error: BaseException | None = None
        self.done = threading.Event()
        self._files = files
        self._switch = self.chance.choice((0.03, 0.1, 0.3))
        self._threads: list[Thread] = []
        self._running: Thread | None = None
        self._started = False

    # Threads

    def add(self, thread: Thread) -> int:
        self._threads.append(thread)
        return len(self._threads)

    def thread(self, work: Callable[[], None], name: str) -> Thread:
        return Thread(self, work, name)

    def ident(self) -> int:
        assert self._running is not None and self._running.ident is not None
        return self._running.ident

    def run(self) -> None:
        """Let the threads that were started run to their ends."""
        self.next()
        assert self.done.wait(GUARD), "the schedule hangs in the real time"
        if self.error is not None:
            raise self.error

    def fail(self, error: BaseException) -> None:
        self.error = self.error or error

    # Steps

    def trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.endswith(self._files):
            return None
        if event == "line":
            self.point()
        return self.trace

    def point(self) -> None:
        """Here another thread may go on."""
        if self.chance.random() < self._switch:
            self.block(None)

    def block(self, ready: Callable[[], bool] | None, until: Callable[[], float] = lambda: INFINITE) -> None:
        """Let others run until something is ready, or until a time has come."""
        mine = self._running
        assert mine is not None
        mine.ready, mine.until = ready, until
        self.next()
        mine.go.acquire()
        mine.ready = None
        if self.error is not None:
            raise Ended

    def next(self) -> None:
        """Choose who runs next, and let the time go on if nobody can."""
        while True:
            left = [thread for thread in self._threads if not thread.over]
            if not left:
                self.done.set()
                return
            if self.error is not None:
                self._running = left[0]
                break
            able = [thread for thread in left if thread.can_run(self.now)]
            if able:
                self._running = self.chance.choice(able)
                break
            try:
                self.check()
                times = min(thread.until() for thread in left)
                assert times < INFINITE, f"nobody can go on: {', '.join(thread.name for thread in left)} wait"
                self.now = times
            except BaseException as error:
                self.fail(error)
        self._running.go.release()


class Mutex:
    """A lock that its owner can take again."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._owner = self._depth = 0

    def __enter__(self) -> None:
        ident = self._schedule.ident()
        if self._owner != ident:
            self._schedule.block(lambda: not self._owner)
            self._owner = ident
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = 0

    def _is_owned(self) -> bool:
        return self._owner == self._schedule.ident()


class Gate:
    """As monarch._wire.receiving.leadership.Gate."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._is_open = False

    def open(self) -> None:
        self._is_open = True

    def wait(self, timeout: float | None) -> None:
        until = INFINITE if timeout is None else self._schedule.now + timeout
        self._schedule.block(lambda: self._is_open, lambda: until)
        self._is_open = False


class Inbox:
    """As monarch._wire.links.Inbox, with the habits of ZeroMQ: its descriptor becomes readable only when a message
    comes after the reader has found nothing.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self.socket = self
        self.frames: deque[tuple[bytes, float]] = deque()
        self.readable = False
        self._found_nothing = False
        self._timeout = -1
        self._reader = 0
        self.arrived = 0.0
        """When the frame that was received last had come."""

    def fileno(self) -> int:
        return 0

    def limit(self, milliseconds: int) -> None:
        self._timeout = milliseconds

    def wake(self) -> None:
        self.send(b"")

    def send(self, frame: bytes) -> None:
        self.frames.append((frame, self._schedule.now))
        if self._found_nothing:
            self._found_nothing, self.readable = False, True

    def pending(self) -> int:
        self._enter()
        self.readable = False
        self._found_nothing = not self.frames
        self._reader = 0
        return len(self.frames)

    def recv(self) -> bytes:
        self._enter()
        try:
            if not self.frames:
                self._found_nothing, self.readable = True, False
                until = INFINITE if self._timeout < 0 else self._schedule.now + self._timeout / 1000
                self._schedule.block(lambda: bool(self.frames), lambda: until)
                self.readable = False
            if not self.frames:
                raise zmq.Again
            frame, self.arrived = self.frames.popleft()
            return frame
        finally:
            self._reader = 0

    def _enter(self) -> None:
        assert not self._reader, f"threads {self._reader} and {self._schedule.ident()} use the socket at once"
        self._reader = self._schedule.ident()


class Alarm:
    """As monarch._wire.receiving.alarm.Alarm."""

    def __init__(self, schedule: Schedule, inbox: Inbox) -> None:
        self._schedule = schedule
        self._inbox = inbox
        self._at = INFINITE
        self._watches = False
        self.closed = False

    def set(self, seconds: float) -> None:
        assert not self.closed
        self._at = self._schedule.now + seconds

    def watch(self) -> None:
        assert not self.closed
        self._watches = True

    def unwatch(self) -> None:
        self._watches = False

    def wait(self) -> tuple[bool, bool]:
        self._schedule.block(lambda: self._watches and self._inbox.readable, lambda: self._at)
        watched, timed = self._watches and self._inbox.readable, self._at <= self._schedule.now
        if timed:
            self._at = INFINITE
        if watched:
            self._watches = False
        # What has happened is seen by the thread a while later.
        self._schedule.point()
        return timed, watched

    def close(self) -> None:
        self.closed = True


def primitives(schedule: Schedule) -> Primitives:
    """The surroundings of a receive loop, simulated."""
    return Primitives(
        mutex=lambda: Mutex(schedule),
        gate=lambda: Gate(schedule),
        alarm=lambda mail: Alarm(schedule, mail),
        clock=lambda: schedule.now,
        ident=schedule.ident,
        thread=schedule.thread,
    )
