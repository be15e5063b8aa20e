"""The gate at which the main thread of a rank is held while it is paused.

A signal makes Python run a handler between two lines of the main thread, and the handler waits. So code continues
exactly where it was, a sleep or a lock included, and code that is never paused costs nothing. C code runs until it
returns.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import Any

from monarch._actors.interruptible import sleep
from monarch._actors.interrupts import new_interrupt
from monarch._actors.pausing.actor_threads import ActorThreads
from monarch._actors.pausing.next_line import at_next_line
from monarch._actors.pausing.points import UNCAUGHT, Packed, RankBreakpoints
from monarch._actors.pausing.tracing import ERROR, StepState, StopReason, Tracer, describe
from monarch._core.places import is_ours, is_users
from monarch._node.services.registry import declared
from monarch._python.frames import caller, frame_of
from monarch._python.locks import is_owned
from monarch._python.thread_trace import Traceable
from monarch._wire.deferred_signals import harmless_idle
from monarch._wire.receiving.leadership import Gate

PAUSE = signal.SIGRTMIN + 8
_AGAIN = 0.05
"""Seconds between two signals while somebody waits for the thread to pause."""
_LOOK = 0.1
"""Seconds between two looks whether the pause is still wanted, in case the gate was opened for something else."""
Work = Callable[["FrameType | None"], None]


@declared("telling.tell_stopped")
def tell_stopped(stop: StopReason, frame: FrameType) -> None:
    """Tell the program that controls this rank that the rank has stopped by itself."""
    raise NotImplementedError


@declared("telling.tell_left")
def tell_left(step: bool) -> None:
    """Tell it that the rank continues: for a step, or for good."""
    raise NotImplementedError


@declared("telling.tell_paused")
def tell_paused(frame: FrameType, parked: bool) -> None:
    """Tell that program that the rank is paused, by somebody or while another rank is at a breakpoint."""
    raise NotImplementedError


@declared("telling.tell_resumed")
def tell_resumed() -> None:
    """Tell it that the rank continues from there."""
    raise NotImplementedError


class PauseGate:
    """Pauses the main thread of this process, and resumes it."""

    def __init__(self) -> None:
        # Written by any thread, as a whole.
        self.asked = False
        """Whether the main thread is to pause."""
        self.wanted = False
        """Whether there may be something to do at the beginning of a call: ``enter`` looks."""
        self.parked = False
        """Whether it is paused only as long as another rank is at a breakpoint."""
        self.step: StepState | None = None
        """The step that it takes when it is resumed."""
        self.ends = False
        """Whether the process ends: code that is paused is aborted, not resumed. Set once."""
        # Written by the receiving thread.
        self._canceled = 0
        """How often steps have been canceled."""
        # Written by the main thread.
        self.frame: FrameType | None = None
        """The frame in which it is paused; None while it runs."""
        self.since = 0.0
        """When it was paused, in seconds since the epoch."""
        self.resumed = -math.inf
        """When it was last resumed, in seconds of the monotonic clock."""
        self.stop: StopReason | None = None
        """Why it has stopped by itself, at a breakpoint or after a step; None for a pause."""
        self.at_entry: list[Callable[[], object]] = []
        """Called at the beginning of a call. Set up before there is any."""
        self.at_once: set[Callable[..., Any]] = set()
        """Methods whose calls do not pause at their beginning: the next call that a person has made does. Likewise."""
        self._stands = False
        """Whether the program that controls this rank counts it as stopped, or as in a step. The receiving thread takes
        it back."""
        self._told = False
        """Whether it counts it as paused."""
        self.points = RankBreakpoints()
        """The breakpoints of this process."""
        self.busy: Callable[[], bool] = lambda: False
        """Whether any actor runs a call. Set before there is any, and at the end."""
        self.leads: Callable[[], bool] = lambda: False
        """Whether this thread receives the messages of the process, so that it must not wait. Set likewise."""
        self._tracers = threading.local()
        self._holder = 0
        """The thread that is held."""
        self._one = threading.RLock()
        """Locked by the thread that is held: one at a time, so that a rank is in one place. It knows its thread,
        whenever an interrupt comes."""
        self.in_call: Callable[[], bool] = lambda: False
        """Whether the main thread runs a call. Set once, before there is any."""
        self.has_call: Callable[[], bool] = lambda: False
        """Whether it does, or a call awaits on its event loop. Set likewise, as is the next one."""
        self.awaiting: Callable[[], FrameType | None] = lambda: None
        """Returns the frame of a call that awaits; None if none does."""
        self.threads = ActorThreads()
        self.traceable: Traceable | None = None
        """The main thread, from ``install`` on."""
        self._along: dict[int, tuple[FrameType, Gate]] = {}
        """By thread, the frames of those that wait because another thread is paused, and what wakes each; a hint, since
        they look at ``asked``. Each by its own thread."""
        # No events: an interrupt of a thread that is in one would leave it locked.
        self._gate = Gate()
        self._pausers: list[Gate] = []
        """Wake the threads that wait for the pause; a hint. Each by its own thread, in single operations."""
        self._work: deque[Work] = deque()
        """Work for the main thread meanwhile; single operations only, which are atomic."""

    @property
    def tracer(self) -> Tracer:
        """The breakpoints and steps of this thread."""
        found: Tracer | None = getattr(self._tracers, "tracer", None)
        if found is None:
            found = self._tracers.tracer = Tracer(
                self.points, self.stop_at, self._step_over, lambda: self.busy(), lambda: self._canceled
            )
        return found

    def install(
        self,
        in_call: Callable[[], bool],
        has_call: Callable[[], bool],
        busy: Callable[[], bool],
        leads: Callable[[], bool],
        awaiting: Callable[[], FrameType | None],
    ) -> None:
        """Install the signal handler, in the main thread."""
        self.in_call, self.has_call, self.busy, self.leads = in_call, has_call, busy, leads
        self.awaiting = awaiting
        self.traceable = Traceable()
        handler = self._on_signal
        harmless_idle.append(handler)
        signal.signal(PAUSE, handler)

    def pause(self, patience: float) -> bool:
        """Pause the main thread at its next line of user code; return whether it is paused in time.

        Without a call, the next one is paused at its beginning.

        Args:
            patience: seconds to wait while a call runs.
        """
        self.asked = self.wanted = True
        self.parked = False
        until = time.monotonic() + patience
        self._ask_threads()
        paused = Gate()
        self._pausers.append(paused)
        try:
            while self.asked:
                signal.pthread_kill(threading.main_thread().ident or 0, PAUSE)
                if not self.is_paused():
                    paused.wait(_AGAIN)
                if self.is_paused() or not self.runs() or time.monotonic() > until:
                    break
        finally:
            self._pausers.remove(paused)
        return self.is_paused()

    def _ask_threads(self) -> None:
        for each in self.threads.having():
            self.threads.call_soon(each, self._arrive)

    def since_pause(self) -> float:
        """Return the seconds since this rank was last paused; 0 from the request on, infinity if it never was."""
        return 0.0 if self.asked else time.monotonic() - self.resumed

    def runs(self) -> bool:
        """Return whether a call runs or awaits, in the main thread or in that of another actor."""
        return self.has_call() or bool(self.threads.having())

    def place(self) -> FrameType | None:
        """Return the frame in which this rank is paused, or runs or awaits in a call; None if it is idle."""
        frame = self.frame
        if frame is not None:
            return frame
        if self.in_call():
            return frame_of(threading.main_thread().ident or 0)
        running = next((frame_of(each.ident) for each in self.threads.running()), None)
        return running if running is not None else self.awaiting()

    def paused_in(self, ident: int) -> FrameType | None:
        """Return the frame in which a thread is paused; None if it is not."""
        along = self._along.get(ident)
        return self.frame if ident == self._holder else along[0] if along is not None else None

    def resume(self) -> bool:
        """Resume the main thread; return whether it was paused, or about to be."""
        self.parked = False
        asked, self.asked = self.asked, False
        self._gate.open()
        for _, gate in list(self._along.values()):
            gate.open()
        return asked

    def cancel_step(self) -> bool:
        """Let a thread that is in a step continue without stopping; return whether there was one. Receiving thread."""
        if not self._stands or self.is_paused():
            return False
        self._canceled += 1
        self._stands = False
        # At once, since the step may wait for ranks that are paused because of this one.
        tell_left(False)
        if self.is_paused():
            # It has stopped meanwhile.
            self.resume()
        return True

    def resume_beside(self, ident: int) -> None:
        """Resume a thread that is held, unless it is this one."""
        if self._holder not in (0, ident):
            self.resume()

    def end(self) -> None:
        """Abort the code that is paused, and stop at no breakpoint any more, since the process ends."""
        self.busy = lambda: False
        # First, so that no thread that is held continues.
        self.ends = True
        self.resume()

    def holds(self, ident: int) -> bool:
        """Return whether a thread is paused."""
        return ident in self._along or (self._holder == ident and self.is_paused())

    def go(self, step: StepState) -> bool:
        """Let the main thread continue until the end of a step; return whether it was paused."""
        if not self.is_paused():
            return False
        self.step = step
        return self.resume()

    def park(self) -> None:
        """Pause the main thread while another rank is at a breakpoint, if it runs a call; do not wait for it."""
        if self.runs() and not self.asked:
            self.parked = self.asked = self.wanted = True
            self._ask_threads()
            signal.pthread_kill(threading.main_thread().ident or 0, PAUSE)

    def unpark(self) -> None:
        """Resume the main thread if it is paused for that reason only."""
        if self.parked:
            self.resume()

    def set_points(self, points: list[Packed]) -> None:
        """Have these breakpoints from now on, at once also in the middle of calls."""
        self.points.take(points)
        self.wanted = True
        self._ask_threads()
        signal.pthread_kill(threading.main_thread().ident or 0, PAUSE)

    def stop_at(self, frame: FrameType, stop: StopReason) -> None:
        """Pause this thread, which has come to a breakpoint or to the end of a step.

        Args:
            frame: the frame of the code that is paused.
            stop: why.
        """
        if not self.busy() or self.leads() or self._is_holder():
            # No call runs, or this is a callback, or code of an expression of the debugger.
            return
        try:
            while not self._one.acquire(timeout=_LOOK):
                # Another thread of this rank is held; an interrupt ends this wait too.
                pass
            self.parked, self.stop = False, stop
            self.asked = self.wanted = True
            self._hold(frame)
        finally:
            # An interrupt may come at any step.
            self._leave(None)
        self._catch_up(frame)

    def stop_at_error(self, error: BaseException, frames: list[FrameType]) -> None:
        """Pause this thread, whose call has failed, if that is asked for.

        Args:
            error: the error of the call.
            frames: that it has left, innermost first.
        """
        if UNCAUGHT in self.points.others:
            frame = next((each for each in frames if is_users(each)), None)
            if frame is not None:
                self.stop_at(frame, StopReason(ERROR, describe(error), error, error.__traceback__))

    def do(self, work: Work) -> bool:
        """Run something in the main thread, with the frame in which it is paused; None if it has just been resumed.

        Returns:
            False if it is not paused: then the work does not run.
        """
        if not self.is_paused():
            return False
        self._work.append(work)
        self._gate.open()
        if not self.is_paused():
            # It may have been resumed before it could see this.
            self._give_back()
        return True

    def is_paused(self) -> bool:
        """Return whether the main thread is paused."""
        return self.frame is not None

    def enter(self, method: Callable[..., Any]) -> None:
        """Begin a call of a method: forget the last error, look for breakpoints, and pause if that was asked for."""
        if method in self.at_once:
            return
        # In other threads, breakpoints are noticed only here.
        self.wanted = bool(self.points.now)
        for each in self.at_entry:
            each()
        self.tracer.settle(caller())
        # A call of this rank that waits for this one would not come to its next line.
        if self._is_due() and (self.is_paused() or not self._runs_elsewhere()):
            self._pause_at(caller())

    def _runs_elsewhere(self) -> bool:
        """Return whether another thread runs a call."""
        here = threading.get_ident()
        if here != threading.main_thread().ident and self.in_call():
            return True
        return any(each.ident != here for each in self.threads.running())

    def _on_signal(self, _: int, frame: FrameType | None) -> None:
        frame = frame or caller()
        self.tracer.settle(frame)
        if self._is_due() and _may_pause(frame) and not self.leads():
            self._pause_at(frame)
        else:
            self._pause_soon(frame)

    def _arrive(self, frame: FrameType) -> None:
        """Pause this thread of an actor at its next line; called in the middle of any line."""
        self.tracer.settle(frame)
        self._pause_soon(frame)

    def _pause_soon(self, frame: FrameType) -> None:
        """Pause this thread at its next line, if it is to pause; a call that awaits comes to its own when it wakes."""
        if self._may_be_due():
            at_next_line(frame, self._may_be_due, self._pause_at, self.tracer.is_own, lambda: not self.leads())

    def _is_due(self) -> bool:
        """Return whether this thread is to pause."""
        here = threading.get_ident() == threading.main_thread().ident
        return self._may_pause_here() and (self.in_call() if here else self.threads.runs_here())

    def _may_be_due(self) -> bool:
        """Return whether this thread is to pause, now or when a call that awaits there wakes."""
        here = threading.get_ident() == threading.main_thread().ident
        return self._may_pause_here() and (self.has_call() if here else self.threads.has_here())

    def _may_pause_here(self) -> bool:
        # A thread that is paused may run code for a debugger.
        return self.asked and not self._is_holder() and threading.get_ident() not in self._along

    def _pause_at(self, frame: FrameType) -> None:
        while self.asked:
            try:
                if self._one.acquire(blocking=False):
                    self._hold(frame)
                    break
            finally:
                # An interrupt may come at any step.
                self._leave(None)
            # The thread that was first is where the rank is. This one waits for its end, which an interrupt ends too.
            self._wait_along(frame)
        self._catch_up(frame)

    def _wait_along(self, frame: FrameType) -> None:
        """Wait a little, or until this rank is resumed."""
        gate = Gate()
        try:
            self._along[threading.get_ident()] = frame, gate
            if self.asked:
                gate.wait(_LOOK)
            self._go_on()
        finally:
            self._along.pop(threading.get_ident(), None)

    def _catch_up(self, frame: FrameType) -> None:
        """Pause this thread at its next line if that was asked for as it went on."""
        if self._is_due():
            self._arrive(frame)

    def _step_over(self) -> None:
        """Say that a step has ended without a stop, since its call has."""
        if self._stands:
            self._stands = False
            tell_left(False)

    def _hold(self, frame: FrameType) -> None:
        """Hold this thread, which has the lock, and release that."""
        step: StepState | None = None
        try:
            self._holder = threading.get_ident()
            # One that came as the last pause ended.
            self.step = None
            self.since, self.frame = time.time(), frame
            stop = self.stop
            if stop is not None:
                self._stands = True
                tell_stopped(stop, frame)
            else:
                self._told = True
                tell_paused(frame, self.parked)
            for each in list(self._pausers):
                each.open()
            while self.asked:
                self._gate.wait(_LOOK)
                while self._work and self.asked:
                    self._work.popleft()(frame)
            self._go_on()
            step, self.step = self.step, None
        except BaseException:
            # An interrupt ends the pause too: nobody would think of a call that pauses at its beginning.
            self.asked, step = False, None
            # An error in a trace function removes that.
            self.wanted = True
            raise
        finally:
            try:
                self._leave(step)
            finally:
                # Again, if an interrupt came while leaving.
                self._leave(step)
        if step is not None:
            self.tracer.begin(frame, step)

    def _go_on(self) -> None:
        """Abort this thread, which was paused, if the process ends."""
        if not self.ends:
            return
        ident = threading.get_ident()
        if ident == threading.main_thread().ident or any(each.ident == ident for each in self.threads.running()):
            raise new_interrupt()
        # A thread of the program itself ends without a word.
        raise SystemExit

    def _leave(self, step: StepState | None) -> None:
        if not self._is_holder():
            # It has left already, and another thread may be paused now.
            return
        self.frame = self.stop = None
        self.resumed = time.monotonic()
        self._holder = 0
        self._give_back()
        if self._stands or step is not None:
            tell_left(step is not None)
            self._stands = step is not None
        if self._told:
            self._told = False
            tell_resumed()
        self._one.release()

    def _is_holder(self) -> bool:
        """Return whether this thread is held."""
        return is_owned(self._one)

    def _give_back(self) -> None:
        while True:
            try:
                work = self._work.popleft()
            except IndexError:
                return
            work(None)


def _may_pause(frame: FrameType | None) -> bool:
    """Return whether user code runs, or a library that it has called, and no code of ours, which may hold a lock."""
    while frame is not None and (frame.f_code is sleep.__code__ or not is_ours(frame)):
        if is_users(frame):
            return True
        frame = frame.f_back
    return False


gate = PauseGate()
"""Of this process; used in ranks."""
