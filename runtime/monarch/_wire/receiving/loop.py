"""The receive loop: a waiting thread receives itself, and a background thread does while none waits.

A thread that waits for an answer leads: it reads the inbox and handles messages until its answer is there. So an answer
costs no hop between threads. While no thread leads for a tick, because the program computes or runs an endpoint, the
background thread does, and yields to the next one that waits. See leadership.py for who leads when.

The receiving thread never waits and never runs user code: what it would wait for could not arrive. A wait there is a
DeadlockError.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from threading import main_thread

import zmq

from monarch._python.threads import spawn_thread
from monarch._wire.deferred_signals import DeferredSignals, Handler
from monarch._wire.links import Inbox
from monarch._wire.receiving.aside import tell_recurring
from monarch._wire.receiving.leadership import SYSTEM, TICK, Leadership, Primitives, Turn, Waiter
from monarch._wire.receiving.slow_handlers import SlowHandlerWatch
from monarch._wire.receiving.timers import Timers
from monarch.exceptions import DeadlockError, StoppedError

__all__ = ["TICK", "ReceiveLoop", "Turn", "Waiter"]

_AT_ONCE_S = 1e-5
"""Seconds to receive and handle a message that had arrived before; a wait for one takes longer."""
_BURST_S = 2.5e-4
"""Seconds for which a thread whose wait is over still handles messages that have arrived."""
_LATE_MS = 2
"""Milliseconds that a timer may be late, to spare most messages a new timeout of the socket."""
_OVERSLEPT_S = 0.05
"""Seconds by which the end of a wait is late if this process did not run meanwhile."""
_GRACE_S = 0.2
"""Seconds to receive then, since what has arrived counts."""
_CLOSING = 30.0
"""Seconds to wait at the end for a thread that handles a message."""
_MAIN = main_thread().ident


class ReceiveLoop:
    """Reads an inbox in whichever thread waits, from ``start`` on.

    Args:
        inbox: its socket is read by one thread at a time, the leader.
        handle: called with each frame; it must not block, and raises only for bugs.
        primitives: the operating system's parts.
    """

    def __init__(self, inbox: Inbox, handle: Callable[[bytes], None], primitives: Primitives = SYSTEM) -> None:
        self._inbox = inbox
        self.on_lost: Callable[[BaseException], None] = tell_recurring
        """Called, in the leader, if there is no memory for a message, which is lost then. Set once."""
        self._recv = inbox.socket.recv
        self._watch = SlowHandlerWatch(handle, _run)
        self._handle, self._run = self._watch.handle, self._watch.run
        self._clock = primitives.clock
        self._ident = primitives.ident
        self._may_lead = primitives.may_lead
        self._timers = Timers(primitives.clock, primitives.mutex())
        self._lead = Leadership(primitives, inbox, self._timers)
        self.notify = self._lead.notify
        """Wakes the threads that wait for a waiter, which is done. From any thread."""
        # Leader only: the current timeout of the socket.
        self._limited = -1
        self.signals = DeferredSignals(self._on_signal)
        """The deferred signals of the main thread."""
        # Main thread only: its wait without the lead.
        self._main_turn: Turn | None = None
        self._disowned = ""
        """Why this process, a fork, does not receive; empty otherwise. Set while it has one thread."""
        self._thread = primitives.thread(self._background, "monarch-receive")

    def start(self) -> None:
        """Begin to receive; earlier messages have waited."""
        self._lead.leave()
        self._thread.start()

    # Waiting

    def wait(self, waiter: Waiter, timeout: float | None = None, report: Callable[[], None] | None = None) -> bool:
        """Wait until the waiter is done; False on timeout.

        Signal handlers run here between two messages; their exceptions, such as KeyboardInterrupt, are raised here, or
        reported if no user code waits.

        Raises:
            DeadlockError: this thread is receiving, so what it would wait for could not arrive.
        """
        if waiter.done:
            return True
        if self._disowned:
            self._check_owned(waiter)
        deadline = None if timeout is None else self._clock() + timeout
        if self._ident() != _MAIN:
            return self._wait(waiter, deadline, self._may_lead())
        # An exception from a handler between receiving and handling would lose the message, and between taking the lead
        # and leaving it the lead. So handlers are deferred until that is done. They are restored each time: a missing
        # one would be noticed by code that compares it with signal.default_int_handler, like asyncio.
        held = self.signals
        while True:
            if self._lead.leader == _MAIN:
                # Handlers are deferred already.
                raise _deadlock(waiter)
            held_handlers = held.begin(report is not None)
            try:
                # The stack of a rank that waits for its next message is almost empty.
                done = self._wait(waiter, deadline, report is not None or self._may_lead())
            finally:
                # Most messages to a rank end such a wait, so this is no call if there is nothing to restore or run.
                interrupted = bool(held_handlers or held.numbers) and held.end_and_run(held_handlers, report)
            # A handler may raise nothing; then the wait continues.
            if done or not interrupted or waiter.done or self._passed(deadline):
                return done or waiter.done

    def hold(self) -> list[tuple[int, Handler]] | None:
        """Defer signal handlers until ``let_go``, if this is the main thread; nothing may wait meanwhile."""
        held = self.signals
        return None if self._ident() != _MAIN or held.holds else held.begin()

    def let_go(self, held: list[tuple[int, Handler]] | None) -> None:
        """Run the handlers that ``hold`` has deferred, whose result this takes; their exceptions are raised here."""
        if held is not None:
            self.signals.end_and_run(held)

    def catch_up(self, patience: float, report: Callable[[], None]) -> None:
        """Handle the messages that have arrived, within a time.

        For a thread that has kept the GIL for long, and so kept the receiving thread from its work, before it begins
        what one of these messages may call off.

        Args:
            patience: the most seconds that this takes.
            report: called when a signal handler raises meanwhile.
        """
        self.wait(_Empty(self.receives_here, self._inbox), patience, report)

    def _on_signal(self) -> None:
        """Note a signal in the main thread, at any point of the code: end its wait, so that the handler runs."""
        turn = self._main_turn
        if turn is not None:
            turn.gate.open()
        if self._lead.leader == _MAIN:
            # The wake-up socket may be in use by the very code that was interrupted.
            with contextlib.suppress(RuntimeError):
                # If the system starts no thread, the next message ends the wait.
                spawn_thread("monarch-interrupt", self._inbox.wake)

    def _wait(self, waiter: Waiter, deadline: float | None, may_lead: bool) -> bool:
        """Wait without running signal handlers; return False early if one is deferred."""
        lead, ident = self._lead, self._ident()
        if lead.leader == ident or lead.is_interrupted():
            raise _deadlock(waiter)
        turn: Turn | None = None
        extended = False
        try:
            while True:
                if may_lead and lead.take(ident, waiter):
                    try:
                        self._receive(waiter, deadline)
                    finally:
                        lead.leave()
                elif turn is None:
                    turn = lead.turn(ident, waiter, may_lead)
                    if ident == _MAIN:
                        self._main_turn = turn
                    # The leader may have left before it could see this turn.
                    continue
                elif not waiter.done and not self._must_end(ident):
                    if may_lead:
                        lead.ask()
                    turn.gate.wait(None if deadline is None else max(0.0, deadline - self._clock()))
                if waiter.done:
                    return True
                if self._must_end(ident):
                    return waiter.done
                if deadline is not None and self._passed(deadline):
                    if extended or self._clock() < deadline + _OVERSLEPT_S:
                        return waiter.done
                    # This process was suspended, or kept from running: what it waits for may have come in time.
                    extended, deadline = True, self._clock() + _GRACE_S
        except BaseException:
            if lead.leader == ident:
                # Leaving it has failed, as at the limit of recursion. No call, which would fail too.
                lead.leader, lead.waiter, lead.background = 0, None, False
            raise
        finally:
            if turn is not None:
                if ident == _MAIN:
                    self._main_turn = None
                lead.withdraw(turn)

    def _must_end(self, ident: int) -> bool:
        return bool(self.signals.numbers) and ident == _MAIN

    def _passed(self, deadline: float | None) -> bool:
        return deadline is not None and self._clock() >= deadline

    def receives_here(self) -> bool:
        """Return whether this thread is receiving, so that it must not wait."""
        return self._lead.is_mine()

    def background(self) -> None:
        """Make the background thread lead now, for a caller that does not wait, such as an event loop."""
        self._check_owned()
        if not self._lead.leader:
            self._lead.hurry()

    # From other threads

    def post(self, action: Callable[[], None]) -> None:
        """Run something soon, in the leader."""
        if self._disowned:
            return
        self._timers.posted.append(action)
        self._inbox.wake()
        self.background()

    def run_in_order(self, action: Callable[[], None]) -> None:
        """Run something in the leader: at once if this is the leader and nothing posted comes before it, else soon.

        For what a message changes: who has the answer to a later message sees the change.
        """
        if self._lead.is_mine() and not self._timers.posted:
            self._run(action)
        else:
            self.post(action)

    def call_later(self, seconds: float, action: Callable[[], None], early: float = 0.0) -> None:
        """Run something after some seconds, in the leader.

        Args:
            seconds: until then.
            action: what to run.
            early: seconds by which it may run before that, as a wait begins or after a message: without a wake-up of
                its own.
        """
        if self._disowned:
            return
        first = self._timers.add(seconds, action, early)
        leader = self._lead.leader
        if not first or leader == self._ident():
            return
        if leader:
            self._inbox.wake()
        else:
            self._lead.wake_by(self._timers.first())

    def disown(self, why: str) -> None:
        """Receive nothing and touch no socket from now on: this process is a fork, which shares them.

        Args:
            why: the reason, for the errors of waits; what is done already may still be read.
        """
        self._disowned = why
        self._lead.renew()

    def _check_owned(self, waiter: Waiter | None = None) -> None:
        if self._disowned:
            what = getattr(waiter, "label", "") or "a message"
            raise StoppedError(f"{what} cannot be waited for here: {self._disowned}")

    def close(self) -> None:
        """End the background thread; afterwards nothing is received, and no other thread touches the inbox.

        Waiting threads continue to wait, for completions by other threads.

        Raises:
            DeadlockError: a thread has been handling one message for 30 s.
        """
        started = self._thread.ident is not None
        if not self._lead.close(started, _CLOSING):
            raise DeadlockError(
                f"the receiving thread has been handling one message for {_CLOSING:g} s, so its sockets cannot be "
                f"closed; set MONARCH_DEBUG=1 to see what it does"
            )
        if started and self._thread.ident != self._ident():
            self._thread.join()
        self._watch.end()

    # Leading

    def _receive(self, waiter: Waiter | None, deadline: float | None) -> None:
        """Receive and handle until the waiter is done or the deadline has passed; in the leader."""
        main = waiter is not None and self._ident() == _MAIN
        signals = self.signals.numbers
        if waiter is not None and (waiter.done or (main and signals)):
            # Before there was a leader to tell.
            return
        recv, handle, timers, lead, clock = self._recv, self._handle, self._timers, self._lead, self._clock
        in_vain = False
        until = math.inf
        while True:
            now = clock()
            if timers.entries:
                due, _, _, early = timers.entries[0]
                left = (due - now) * 1000
                if left <= 0 or (early and not in_vain and due - early <= now):
                    for action in timers.due(awake=left > 0):
                        self._run(action)
                    lead.timers_ran()
                    # Asleep, the background thread need not hand the lead over to a waiting thread.
                    if waiter.done if waiter is not None else not self._inbox.pending():
                        return
                    # A new timeout: one that is too short for the next timer would wake this thread in vain.
                    in_vain = True
                    continue
                # Usually the present timeout will do, so this is no call. One that is too short for the timer costs
                # something only if nothing comes before it, and a distant timer may be late.
                limited = self._limited
                if (
                    deadline is not None
                    or in_vain
                    or not (0 <= limited <= left + _LATE_MS or 100 <= 2 * limited <= 3 * left)
                ):
                    self._limit(deadline, in_vain)
            elif deadline is not None:
                self._limit(deadline)
            elif self._limited != -1:
                self._limited = -1
                self._inbox.limit(-1)
            try:
                frame = recv()
                in_vain = False
            except zmq.Again:
                frame = b""
                in_vain = True
            except MemoryError as error:
                frame = b""
                self.on_lost(error)
            if frame:
                try:
                    handle(frame)
                except MemoryError as error:
                    self.on_lost(error)
                except Exception as error:
                    # A message that fails must not stop those behind it.
                    tell_recurring(error)
            else:
                while timers.posted:
                    self._run(timers.posted.popleft())
            if waiter is None:
                if lead.asked:
                    return
            elif lead.closing or (main and signals) or (deadline is not None and self._passed(deadline)):
                return
            elif waiter.done:
                after = clock()
                if after - now > _AT_ONCE_S or after > until or not self._inbox.pending():
                    return
                # Messages come faster than they are handled. To receive the next ones now costs less than to take the
                # lead again for each.
                until = min(until, after + _BURST_S)

    def _limit(self, deadline: float | None, in_vain: bool = False) -> None:
        """Limit the next receive to the deadline and the first timer.

        Args:
            deadline: of the wait.
            in_vain: whether the last receive got nothing, so that a limit before that time would wake this thread
                for nothing.
        """
        try:
            until = self._timers.entries[0][0]
            if deadline is not None and deadline < until:
                until = deadline
        except IndexError:
            if deadline is None:
                return
            until = deadline
        left = max(0, int((until - self._clock()) * 1000) + 1)
        # Setting it costs more than a slightly late timer; a deadline is met.
        now = self._limited
        enough = now == left if in_vain else now <= left <= 2 * now
        if not (enough or (until != deadline and left >= 100 and left <= now and 2 * now <= 3 * left)):
            self._limited = left
            self._inbox.limit(left)

    def _background(self) -> None:
        lead = self._lead
        while lead.take_for_background():
            try:
                # An alarm may ring for nothing. This thread would then keep the lead, and the next one that waits would
                # have to ask for it.
                if lead.hurried or self._inbox.pending() or self._timers.first() <= self._clock():
                    self._receive(None, None)
            finally:
                lead.leave()


class _Empty:
    """Waits until nothing is left to receive, which only the leader can tell; stays done from then on."""

    def __init__(self, receives_here: Callable[[], bool], inbox: Inbox) -> None:
        self._receives_here = receives_here
        self._inbox = inbox
        self._was_empty = False
        """Written by the leader: the waiting thread looks again once it leads no more."""
        self.thread: Turn | None = None

    @property
    def done(self) -> bool:
        if not self._was_empty and self._receives_here() and not self._inbox.pending():
            self._was_empty = True
        return self._was_empty


def _run(action: Callable[[], None]) -> None:
    try:
        action()
    except Exception as error:
        tell_recurring(error)


def _deadlock(waiter: Waiter) -> DeadlockError:
    what = getattr(waiter, "label", "") or "a message"
    return DeadlockError(
        f"this thread is receiving the messages of this process, so it cannot wait for {what}: nothing would "
        f"arrive. Wait in another thread, await it in an event loop, or continue in a callback of add_done_callback"
    )
