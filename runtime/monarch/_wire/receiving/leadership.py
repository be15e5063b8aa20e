"""Which thread receives: one of the waiting threads leads, and the others queue for their turn.

Rules, which tests/procs/test_receive_loop_model.py tries under many schedules:

- There is at most one leader. A thread leads only while it waits for something itself, or is the background thread.
- A thread whose stack has no room for the handling of messages does not lead, and waits until others have received.
- When a leader leaves, the first turn of a thread that may lead, and whose waiter is not done, is woken. A thread that
  ends its wait passes on a wake-up that it does not need. So no thread sleeps while nobody leads, except for the time
  that a woken thread takes to run.
- While nobody leads, the alarm rings for an arriving message and for a timer that is due. The background thread takes
  the lead then, if no other thread has for a tick: so it sleeps on while messages and answers alternate, and messages
  that come while the program computes are handled within a tick, or within four after a burst of messages. It leaves
  again when it has run a timer and nothing has come.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from monarch._python.frames import has_room
from monarch._python.threads import new_thread
from monarch._wire.receiving.alarm import Alarm
from monarch._wire.receiving.timers import Timers

TICK = 0.005
"""Seconds without a leader before the background thread leads, if there is something to receive."""
_BUSY = TICK / 2
"""Seconds between two leaves below which the inbox is not checked and watched: ringing now and then costs less."""
_BUSY_TICK = 4 * TICK
"""Seconds between those rings: the maximum time that a message waits while nobody leads."""


class Waiter(Protocol):
    """Something that a thread waits for. The thread that completes it then calls ``ReceiveLoop.notify``."""

    thread: Turn | None
    """The turns of the threads that wait for it, linked. Guarded by the mutex of the leadership."""

    @property
    def done(self) -> bool: ...


class Gate:
    """Blocks one thread until another opens it; opening it twice counts once. ``open`` is safe in a signal handler."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def wait(self, timeout: float | None) -> bool:
        """Wait until it is open or the time is up; return whether it was open. It is then closed again."""
        return self._lock.acquire(timeout=-1 if timeout is None else min(timeout, threading.TIMEOUT_MAX))

    def open(self) -> None:
        """Let the waiting thread through, or the next one."""
        try:
            self._lock.release()
        except RuntimeError:
            # It was open.
            pass


class Mail(Protocol):
    """The part of an inbox that this needs."""

    def fileno(self) -> int: ...
    def pending(self) -> object: ...
    def wake(self) -> None: ...


def _alarm(mail: Mail) -> Alarm:
    return Alarm(mail.fileno())


def _thread(work: Callable[[], None], name: str) -> threading.Thread:
    return new_thread(name, work)


@dataclass(frozen=True)
class Primitives:
    """The operating system, as the receive loop uses it; tests replace it with simulations."""

    mutex: Callable[[], Any] = threading.RLock
    gate: Callable[[], Any] = Gate
    alarm: Callable[[Any], Any] = _alarm
    clock: Callable[[], float] = time.monotonic
    ident: Callable[[], int] = threading.get_ident
    thread: Callable[[Callable[[], None], str], Any] = _thread
    """Create a thread without starting it."""
    may_lead: Callable[[], bool] = has_room
    """Whether the stack of this thread has room for the handling of messages."""


SYSTEM = Primitives()


class Turn:
    """One waiting thread; its gate opens when its waiter is done, and when it may lead."""

    __slots__ = ("gate", "ident", "may_lead", "next", "waiter")

    def __init__(self, ident: int, waiter: Waiter, gate: Any, may_lead: bool) -> None:
        self.ident = ident
        self.may_lead = may_lead
        self.waiter = waiter
        self.gate = gate
        self.next: Turn | None = None


class Leadership:
    """The leader, and the threads that wait for the lead."""

    def __init__(self, primitives: Primitives, mail: Mail, timers: Timers) -> None:
        self._primitives = primitives
        self._ident = primitives.ident
        self._clock = primitives.clock
        self._gate = primitives.gate
        self._mail = mail
        self._timers = timers
        # Held for a few steps only, never over other code. Reentrant, because a garbage collection may run a __del__ at
        # any step, which may call in here.
        self._mutex = primitives.mutex()
        self.is_interrupted: Callable[[], bool] = self._mutex._is_owned
        """Whether this thread was interrupted in here."""
        # Guarded by the mutex; ``leader`` and ``waiter`` are also read without it, as hints.
        self.leader = 0
        self.waiter: Waiter | None = None
        """The leader's waiter; None for the background thread."""
        self.background = False
        """Whether the background thread leads."""
        self.asked = False
        """Whether the background thread must leave the lead to a waiting thread."""
        self.closing = False
        self._urgent = False
        self.hurried = False
        """Whether the background thread leads because somebody wants it to, and not for a message. Leader only."""
        self._turns: deque[Turn] = deque()
        self._alarm = primitives.alarm(mail)
        self._alarm_at = math.inf
        """When the alarm rings by itself."""
        self._watched = False
        """Whether it rings for a message."""
        self._left = 0.0
        self._over = primitives.gate()
        """Opens when the last leader has left after ``close``."""

    def renew(self) -> None:
        """Forget the threads of the process that this one is a fork of; one of them may have held the mutex."""
        self._mutex = self._primitives.mutex()
        self.is_interrupted = self._mutex._is_owned
        self.leader, self.waiter, self.background = 0, None, False
        self._turns.clear()

    def is_mine(self) -> bool:
        """Return whether this thread leads, or was interrupted in here: then nobody receives what it would wait for."""
        return self.leader == self._ident() or self.is_interrupted()

    def waiting(self) -> int:
        """Return how many threads wait for the lead or to be woken."""
        with self._mutex:
            return sum(turn.ident != self.leader for turn in self._turns)

    def take(self, ident: int, waiter: Waiter) -> bool:
        """Take the lead, if nobody has it."""
        with self._mutex:
            if self.leader or self.closing:
                return False
            self.leader = ident
            self.waiter = waiter
            if self._watched:
                self._watched = False
                self._alarm.unwatch()
            return True

    def turn(self, ident: int, waiter: Waiter, may_lead: bool) -> Turn:
        """Return a turn for a thread that could not, or may not, take the lead; ``withdraw`` ends it."""
        turn = Turn(ident, waiter, self._gate(), may_lead)
        with self._mutex:
            turn.next = waiter.thread
            waiter.thread = turn
            self._turns.append(turn)
        return turn

    def ask(self) -> None:
        """Make the background thread leave the lead, if it has it."""
        with self._mutex:
            asks = self.background and not self.closing
            if asks:
                self.asked = True
        if asks:
            self._mail.wake()

    def withdraw(self, turn: Turn) -> None:
        """End a thread's wait; its wake-up may have been meant for another one."""
        with self._mutex:
            self._turns.remove(turn)
            before: Turn | None = None
            each = turn.waiter.thread
            while each is not None and each is not turn:
                before, each = each, each.next
            if before is None:
                turn.waiter.thread = turn.next
            elif each is not None:
                before.next = turn.next
            if not self.leader or self.background:
                self._pass_on()

    def leave(self) -> None:
        """Pass the lead on to the next thread."""
        now = self._clock()
        busy = now - self._left < _BUSY and not self.background
        if busy:
            with self._mutex:
                # The usual case: the alarm is set for a time that is early enough.
                if now + _BUSY_TICK >= self._alarm_at and not self.closing:
                    self._left = now
                    self.leader, self.waiter = 0, None
                    if self._turns:
                        self._pass_on()
                    return
        # Only the leader may check the inbox. A message that comes after this is seen by the alarm.
        quiet = not (busy or self.closing or self._mail.pending())
        with self._mutex:
            if self.closing:
                self.leader, self.waiter, self.background = 0, None, False
                self._over.open()
                return
            if not self.background or self.asked:
                # The thread that has asked for the lead has a tick to take it.
                self._left = now
            if quiet:
                # Only the leader removes timers.
                timers = self._timers.entries
                when = timers[0][0] + TICK if timers else math.inf
            else:
                when = now + (_BUSY_TICK if busy else TICK)
            if when < self._alarm_at:
                self._wake_by(when, now)
            if quiet and not self._watched:
                self._watched = True
                self._alarm.watch()
            self.leader, self.waiter, self.background = 0, None, False
            if self._turns:
                self._pass_on()

    def _wake_by(self, when: float, now: float) -> None:
        if when < self._alarm_at:
            self._alarm_at = when
            self._alarm.set(max(0.0, when - now))

    def timers_ran(self) -> None:
        """Note that the leader has run the alarm's work; the next ``leave`` sets it again."""
        with self._mutex:
            # At the end it rings for the background thread, which would sleep forever.
            if self._alarm_at < math.inf and not self.closing:
                self._alarm_at = math.inf
                self._alarm.set(math.inf)

    def _pass_on(self) -> None:
        for turn in self._turns:
            if turn.may_lead and not turn.waiter.done:
                turn.gate.open()
                return

    def notify(self, waiter: Waiter) -> None:
        """Wake the threads that wait for something that is now done."""
        if waiter.thread is not None:
            with self._mutex:
                turn = waiter.thread
                while turn is not None:
                    turn.gate.open()
                    turn = turn.next
        # The leader checks after each message; another thread must be told.
        leader = self.leader
        if leader and leader != self._ident():
            waited = self.waiter
            if waited is not None and waited.done and not self.closing:
                self._mail.wake()

    # The background thread

    def wake_by(self, when: float) -> None:
        """Make the background thread lead at a time of the clock, or soon after it, unless another thread does."""
        with self._mutex:
            if not self.leader and not self.closing:
                self._wake_by(when, self._clock())

    def hurry(self) -> None:
        """Make the background thread lead now, if nobody leads."""
        with self._mutex:
            if not self.leader and not self.closing:
                self._urgent = True
                self._wake_by(-math.inf, 0.0)

    def take_for_background(self) -> bool:
        """In the background thread: wait until there is something that nobody has received for a tick, and take the
        lead; False at the end.
        """
        while True:
            timed, watched = self._alarm.wait()
            with self._mutex:
                if timed:
                    self._alarm_at = math.inf
                if watched:
                    self._watched = False
                if self.closing:
                    self._alarm.close()
                    return False
                if self.leader:
                    continue
                now = self._clock()
                if not self._urgent and self._left + TICK > now:
                    self._wake_by(self._left + TICK, now)
                    continue
                self.hurried = self._urgent
                self._urgent = self.asked = False
                self.leader = self._ident()
                self.background = True
                return True

    # Ending

    def close(self, started: bool, patience: float) -> bool:
        """Let nobody lead any more; False if the leader has not left within some seconds."""
        with self._mutex:
            if self.closing:
                return True
            self.closing = self.asked = True
            leader = self.leader
            if started:
                self._wake_by(-math.inf, 0.0)
            else:
                self._alarm.close()
        if leader and leader != self._ident():
            self._mail.wake()
            self._over.wait(patience)
            return not self.leader
        return True
