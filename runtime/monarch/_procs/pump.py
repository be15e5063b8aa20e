"""Who receives: the thread that waits does it itself, and a background thread does while nobody waits.

A thread that waits for an answer leads: it reads the inbox and handles what comes, until its answer is there. So an
answer costs no hop from one thread to another. While no thread leads for a tick, because the program computes or
runs an endpoint, the background thread does, and yields to the next one that waits.
"""

from __future__ import annotations

import _signal  # pyright: ignore[reportMissingImports]
import heapq
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable
from threading import Lock, Semaphore, Thread, get_ident, main_thread
from typing import Any, Protocol

import zmq

from monarch._wire.links import Inbox

TICK = 0.005
"""Seconds for which nobody may lead before the background thread does."""

_SLOW_TICK = 0.02
"""The same, once another thread was seen to lead for longer than a tick."""
_QUIET = 25
"""Slow ticks without a change of who leads, after which the background thread sleeps until it is kicked."""

_clock = time.monotonic
_MAIN = main_thread().ident


class Waiter(Protocol):
    """Something that a thread waits for. Whoever makes it done calls ``Pump.notify`` then."""

    thread: Turn | None

    @property
    def done(self) -> bool: ...


class Turn:
    """One waiting thread: released when what it waits for is done, or when it is its turn to lead."""

    __slots__ = ("ident", "semaphore", "waiter")

    def __init__(self, ident: int, waiter: Waiter) -> None:
        self.ident = ident
        self.waiter = waiter
        self.semaphore = Semaphore(0)


class Pump:
    """Reads an inbox in whichever thread waits, from ``start`` on.

    Args:
        inbox: where from; its socket is read by one thread at a time, the leader.
        handle: gets each frame; it does not block and raises nothing but bugs.
    """

    def __init__(self, inbox: Inbox, handle: Callable[[bytes], None]) -> None:
        self._inbox = inbox
        self._recv = inbox.socket.recv
        self._handle = handle
        self._lead = Lock()
        self._leader = 0
        self._background_leads = False
        self._seq = 0
        self._asked = False
        self._others: deque[Turn] = deque()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._timer_count = 0
        self._timer_lock = Lock()
        self._posted: deque[Callable[[], None]] = deque()
        self._closing = False
        self._interrupted = False
        self._main_turn: Turn | None = None
        self._limited = -1
        self._sleeping = False
        self._urgent = False
        self._kick = Semaphore(0)
        self._thread = Thread(target=self._background, name="monarch-pump", daemon=True)

    def start(self) -> None:
        """Begins to receive; what came before has waited."""
        self._thread.start()

    # Waiting

    def wait(self, waiter: Waiter, timeout: float | None = None) -> bool:
        """Waits until the waiter is done; False if the time ran out first.

        A Ctrl-C is raised here between two messages.
        """
        if waiter.done:
            return True
        deadline = None if timeout is None else _clock() + timeout
        if get_ident() != _MAIN:
            return self.wait_unheld(waiter, deadline)
        # A Ctrl-C between receiving and handling would lose the message, and one in between taking the lead and
        # leaving it would lose the lead; so it is held until that is done.
        old = _signal.getsignal(signal.SIGINT)
        if not callable(old):
            return self.wait_unheld(waiter, deadline)
        while True:
            try:
                _signal.signal(signal.SIGINT, self._on_interrupt)
                done = self.wait_unheld(waiter, deadline)
            finally:
                _signal.signal(signal.SIGINT, old)
                interrupted, self._interrupted = self._interrupted, False
                if interrupted:
                    old(signal.SIGINT, sys._getframe())  # pyright: ignore[reportPrivateUsage]
            # A handler of the program's own may raise nothing; then it goes on.
            if done or not interrupted or waiter.done or (deadline is not None and _clock() >= deadline):
                return waiter.done

    def _on_interrupt(self, _number: int, _frame: Any) -> None:
        self._interrupted = True
        # What wakes it may be in use by the very code that was interrupted.
        Thread(target=self._wake_main, name="monarch-interrupt", daemon=True).start()

    def _wake_main(self) -> None:
        turn = self._main_turn
        if turn is not None:
            turn.semaphore.release()
        self._inbox.wake()

    def wait_unheld(self, waiter: Waiter, deadline: float | None = None) -> bool:
        """The same for where no Ctrl-C is raised; ends early with False if ``wait`` holds one."""
        turn: Turn | None = None
        while True:
            if self._take_lead():
                try:
                    if self._receive(waiter, deadline):
                        return True
                finally:
                    self._leave()
                if self._interrupted and get_ident() == _MAIN:
                    return False
            elif waiter.done:
                return True
            else:
                if turn is None:
                    turn = Turn(get_ident(), waiter)
                    if turn.ident == _MAIN:
                        self._main_turn = turn
                waiter.thread = turn
                self._others.append(turn)
                try:
                    # The leader may have left before it could see this turn.
                    if not self._lead.locked() and not self._closing:
                        self._pass_on()
                    if not waiter.done and not (self._interrupted and turn.ident == _MAIN):
                        left = None if deadline is None else max(0.0, deadline - _clock())
                        turn.semaphore.acquire(timeout=left)
                except BaseException:
                    # A signal's handler raised.
                    self._give_up(turn)
                    raise
                if self._interrupted and turn.ident == _MAIN:
                    self._give_up(turn)
                    return False
                if waiter.done or (deadline is not None and _clock() >= deadline):
                    self._give_up(turn)
                else:
                    try:
                        self._others.remove(turn)
                    except ValueError:
                        # It is this thread's turn to lead.
                        pass
            if deadline is not None and _clock() >= deadline:
                return waiter.done

    def notify(self, waiter: Waiter) -> None:
        """Tells the thread that waits for it that the waiter is done."""
        turn = waiter.thread
        if turn is not None:
            turn.semaphore.release()
            for other in list(self._others):
                if other.waiter is waiter and other is not turn:
                    other.semaphore.release()
        # The leader sees it after the message at hand; from another thread it must be told.
        if self._leader and self._leader != get_ident() and not self._closing:
            self._inbox.wake()

    def background(self) -> None:
        """Has the background thread lead now, for one that does not wait itself, such as an event loop."""
        if not self._lead.locked():
            self._urgent = True
            self._kick.release()

    # From other threads

    def post(self, action: Callable[[], None]) -> None:
        """Has the leader run something soon."""
        self._posted.append(action)
        self._wake_leader()

    def call_later(self, seconds: float, action: Callable[[], None]) -> None:
        """Has the leader run something after some seconds."""
        with self._timer_lock:
            self._timer_count += 1
            when = _clock() + seconds
            heapq.heappush(self._timers, (when, self._timer_count, action))
            first = self._timers[0][0] == when
        if first and self._leader != get_ident():
            self._wake_leader()

    def _wake_leader(self) -> None:
        self._inbox.wake()
        self.background()

    def close(self) -> None:
        """Ends the background thread; afterwards nothing is received, and no other thread touches the inbox.

        Threads that wait go on to, for what other threads complete.
        """
        self._closing = True
        self._asked = True
        if self._leader != get_ident():
            self._inbox.wake()
            self._kick.release()
            # The leader leaves when it is woken; nobody leads again.
            self._lead.acquire()
        if self._thread.ident not in (None, get_ident()):
            self._kick.release()
            self._thread.join()

    # Leading

    def _take_lead(self) -> bool:
        while not self._lead.acquire(False):
            if self._closing or not self._background_leads:
                return False
            self._asked = True
            self._inbox.wake()
            if self._lead.acquire(timeout=0.01):
                break
        if self._closing:
            # The wake-up of close() may have been received before: nobody may wait for another.
            self._lead.release()
            return False
        self._leader = get_ident()
        return True

    def _leave(self) -> None:
        self._leader = 0
        self._seq += 1
        self._lead.release()
        if self._others and not self._closing:
            self._pass_on()
        if self._sleeping:
            self._sleeping = False
            self._kick.release()

    def _give_up(self, turn: Turn) -> None:
        """A thread waits no more; if it was its turn to lead, it is the next one's."""
        try:
            self._others.remove(turn)
        except ValueError:
            if self._others and not self._lead.locked() and not self._closing:
                self._pass_on()

    def _pass_on(self) -> None:
        try:
            self._others.popleft().semaphore.release()
        except IndexError:
            pass

    def _receive(self, waiter: Waiter | None, deadline: float | None) -> bool:
        """Receives and handles until the waiter is done or the deadline has passed; in the leader.

        Returns whether the waiter is done.
        """
        if waiter is not None and waiter.done:
            # Before there was a leader to be told.
            return True
        recv, handle = self._recv, self._handle
        while True:
            if self._timers:
                left = (self._timers[0][0] - _clock()) * 1000
                if left <= 0:
                    self._run_timers()
                    if waiter is not None and waiter.done:
                        return True
                    continue
                # Mostly a timer far away: nothing to set then, and no call.
                if deadline is not None or not 100 <= left <= 2 * self._limited <= 3 * left:
                    self._limit(deadline)
            elif deadline is not None:
                self._limit(deadline)
            elif self._limited != -1:
                self._limited = -1
                self._inbox.socket.set(zmq.RCVTIMEO, -1)
            try:
                frame = recv()
            except zmq.Again:
                frame = b""
            if frame:
                try:
                    handle(frame)
                except Exception:
                    # A message that cannot be handled must not stop those behind it.
                    traceback.print_exc()
            else:
                while self._posted:
                    self._run(self._posted.popleft())
            if waiter is None:
                if self._asked:
                    return False
            elif waiter.done:
                return True
            elif self._interrupted or self._closing or (deadline is not None and _clock() >= deadline):
                return False

    def _limit(self, deadline: float | None) -> None:
        """Has the next receive end in time for the deadline and the first timer."""
        try:
            until = self._timers[0][0]
            if deadline is not None and deadline < until:
                until = deadline
        except IndexError:
            if deadline is None:
                return
            until = deadline
        left = max(0, int((until - _clock()) * 1000) + 1)
        # Setting it costs more than a timer that is somewhat late; a deadline is met.
        now = self._limited
        if not (left <= 2 * now and (now <= left or (until != deadline and left >= 100 and 2 * now <= 3 * left))):
            self._limited = left
            self._inbox.socket.set(zmq.RCVTIMEO, left)

    def _run_timers(self) -> None:
        now = _clock()
        while True:
            with self._timer_lock:
                if not self._timers or self._timers[0][0] > now:
                    return
                action = heapq.heappop(self._timers)[2]
            self._run(action)

    def _run(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception:
            traceback.print_exc()

    def _background(self) -> None:
        while not self._closing:
            self._sleeping = True
            # One that leaves after this kicks; one that left before is seen here.
            if self._lead.locked():
                self._kick.acquire()
            self._sleeping = False
            tick, quiet = TICK, 0
            while not self._closing:
                seq = self._seq
                if not self._urgent:
                    self._kick.acquire(timeout=tick)
                if not self._urgent and self._seq != seq:
                    quiet = 0
                    continue
                self._urgent = False
                if not self._lead.acquire(False):
                    # Somebody leads for longer than a tick. It would have to kick at each message if this slept now.
                    tick, quiet = _SLOW_TICK, quiet + 1
                    if quiet > _QUIET:
                        break
                    continue
                self._asked = self._closing
                self._background_leads = True
                self._leader = get_ident()
                try:
                    if not self._closing:
                        self._receive(None, None)
                finally:
                    self._background_leads = False
                    self._leave()
