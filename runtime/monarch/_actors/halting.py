"""The end of an actor: drain, interrupt slow calls, clean up; each step has a bound."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Coroutine
from threading import Event, Lock
from typing import Any

from monarch._actors.executors import start_task
from monarch._actors.running import ActorLike, current
from monarch._core.kinds import is_coroutine
from monarch._node.remote_errors import pack_failure
from monarch._python.later import asyncio
from monarch._wire import messages as m
from monarch.config import STOP_CANCEL, STOP_CLEANUP, STOP_DRAIN, STOP_OWNED
from monarch.exceptions import MonarchError

_DRAINING, _OWNED, _CLEANING, _RELEASING, _DONE = range(5)
_PING = 0.1
"""Seconds for an event loop to respond; otherwise it is in code that does not await."""
_IGNORED = 2
"""Interrupts that code ignores before its actor is given up."""
_INSISTS = 5
"""Interrupts of a step after which the actor is given up, even if each has ended one of many tasks that block it."""


def longest() -> float:
    """Return the maximum seconds that the end of an actor takes."""
    # Three steps are interrupted, and one waits for cancelled calls.
    interrupts = 3 * _INSISTS * (STOP_CANCEL() + _PING) + STOP_CANCEL()
    return STOP_DRAIN() + STOP_OWNED() + 2 * STOP_CLEANUP() + interrupts


def is_stuck(mailbox: ActorLike) -> bool:
    """Return whether an actor was given up while its code continues."""
    return mailbox.halting is not None and mailbox.halting.given_up


class _Pressure:
    """The interrupts of one slow step. In the receiving thread.

    Args:
        step: the step.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        self.tries = 0
        """How often the code that blocked it was to be interrupted."""
        self.code: object = None
        """The task that blocks it, or the message without an event loop."""
        self.times = 0
        """How many interrupts that code has had."""

    def note(self, code: object) -> None:
        """Note which code blocks the actor now; if it is not the same, the last one has ended."""
        if code is not self.code:
            self.code, self.times = code, 0

    @property
    def is_over(self) -> bool:
        """Whether the actor is given up."""
        return self.times >= _IGNORED or self.tries >= _INSISTS


class Halting:
    """The end of one actor.

    The steps run in the actor's thread. The receiving thread has the timers: it interrupts a slow step and gives up on
    the actor if that does not help. Nothing here waits in the receiving thread.

    Args:
        mailbox: the mailbox of the actor.
        reason: for the callers of refused messages.
        stopped: called once, in any thread, with the failure of the end if any; see ``also``.
        process: whether the process ends with the actor.
        drain: seconds for earlier messages; None for the setting.
    """

    def __init__(
        self,
        mailbox: ActorLike,
        reason: str,
        stopped: Callable[[bytes | None], None],
        process: bool,
        drain: float | None,
    ) -> None:
        self._mailbox = mailbox
        self._reason = reason
        self._waiting: list[Callable[[bytes | None], None]] | None = [stopped]
        """To be told of the end; None when they have been. Lock: ``_lock``."""
        self._process = process
        self._drain = STOP_DRAIN() if drain is None else drain
        self._lock = Lock()
        self._step = _DRAINING
        """Written by the actor's thread and by the timers, under ``_lock``."""
        self.given_up = False
        """Whether its code continues after the end; written once, under ``_lock``."""
        self._task: asyncio.Task[None] | None = None
        """Keeps the task that ends an async actor alive; used by the loop's thread."""

    def also(self, stopped: Callable[[bytes | None], None]) -> bool:
        """Tell another one of the end; return False if the end has been told already."""
        with self._lock:
            if self._waiting is not None:
                self._waiting.append(stopped)
            return self._waiting is not None

    def _stopped(self, failure: bytes | None) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting or [], None
        for stopped in waiting:
            stopped(failure)

    def begin(self) -> None:
        """Begin the end after earlier messages; in the receiving thread."""
        self._limit(_DRAINING, self._drain)
        self._mailbox.executor.post(self._act)

    # In the actor's thread

    def _act(self) -> None:
        loop = self._mailbox.executor.loop
        if loop is not None:
            self._task = start_task(loop, self._act_async())
            self._mailbox.executor.package_tasks.add(self._task)
            return
        self._mailbox.refuse_rest(self._reason)
        token = current.set(self._message())
        failure = None
        try:
            self._enter(_OWNED)
            until = time.monotonic() + STOP_OWNED()
            for mesh in reversed(self._mailbox.owned):
                with contextlib.suppress(MonarchError):
                    mesh.stop().get(max(0.0, until - time.monotonic()))
            self._enter(_CLEANING)
            self._begin_cleanup()
        except BaseException as error:
            failure = self._failure(error)
        finally:
            current.reset(token)
        self._end(failure)

    async def _act_async(self) -> None:
        mailbox = self._mailbox
        failure = None
        try:
            await mailbox.turns.drain(self._drain)
            mailbox.refuse_rest(self._reason)
            mailbox.abandon(await mailbox.turns.cancel_all(STOP_CANCEL()))
            current.set(self._message())
            self._enter(_OWNED)
            until = time.monotonic() + STOP_OWNED()
            for mesh in reversed(mailbox.owned):
                with contextlib.suppress(MonarchError, asyncio.TimeoutError):
                    await asyncio.wait_for(mesh.stop().as_asyncio(), max(0.0, until - time.monotonic()))
            self._enter(_CLEANING)
            result = self._begin_cleanup()
            if is_coroutine(result):
                await self._within_bounds(result)
            result = None
        except BaseException as error:
            failure = self._failure(error)
        self._end(failure)

    def _begin_cleanup(self) -> Any:
        """Call ``__cleanup__``, if there is one. The instance is not kept, so that it ends in ``let_go``."""
        mailbox = self._mailbox
        hook = getattr(mailbox.instance, "__cleanup__", None)
        if hook is None:
            return None
        with mailbox.executor.user_code():
            return hook(mailbox.end_cause())

    async def _within_bounds(self, cleanup: Coroutine[Any, Any, Any]) -> None:
        task = start_task(asyncio.get_running_loop(), cleanup)
        done, _ = await asyncio.wait({task}, timeout=STOP_CLEANUP())
        if not done:
            task.cancel()
            await asyncio.wait({task}, timeout=STOP_CANCEL())
            raise MonarchError(self._late_cleanup("cancelled"))
        task.result()

    def _message(self) -> tuple[ActorLike, m.Call]:
        mailbox = self._mailbox
        return mailbox, m.Call(mailbox.node.proc, mailbox.key, "__cleanup__", 0, b"", "", 0, b"")

    def _failure(self, error: BaseException) -> bytes:
        if isinstance(error, KeyboardInterrupt):
            error = MonarchError(self._late_cleanup("interrupted"))
        return pack_failure(error, isinstance(error, MonarchError))

    def _enter(self, step: int) -> None:
        with self._lock:
            if self._step < step:
                self._step = step
        if step in (_CLEANING, _RELEASING):
            self._limit(step, STOP_CLEANUP())

    def _end(self, failure: bytes | None) -> None:
        """Finish the end, whatever its steps achieved."""
        self._mailbox.leave(self._reason)
        self._enter(_RELEASING)
        self._mailbox.let_go()
        with self._lock:
            given_up, self._step = self.given_up, _DONE
        if self._task is not None:
            self._mailbox.executor.package_tasks.discard(self._task)
        self._mailbox.executor.release(lambda: None if given_up else self._stopped(failure))

    # In the receiving thread

    def _limit(self, step: int, seconds: float) -> None:
        pressure = _Pressure(step)
        self._mailbox.node.receive_loop.call_later(seconds, lambda: self._press(pressure))

    def _press(self, pressure: _Pressure) -> None:
        """Interrupt the code that blocks a slow step; give up on the actor if that ignores two interrupts."""
        if self._step != pressure.step:
            return
        mailbox, call_later = self._mailbox, self._mailbox.node.receive_loop.call_later
        if pressure.step == _DRAINING:
            mailbox.refuse_rest(self._reason)
        loop = mailbox.executor.loop
        if loop is None:
            self._insist(pressure)
            return
        alive, ended = Event(), mailbox.turns.ended
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(alive.set)

        def look() -> None:
            if not alive.is_set() and mailbox.turns.ended == ended:
                self._insist(pressure)
                return
            # The loop enforces the bounds itself. Behind many messages, this event may take its time.
            pressure.note(None)
            call_later(STOP_CANCEL(), lambda: self._press(pressure))

        call_later(_PING, look)

    def _insist(self, pressure: _Pressure) -> None:
        if self._step != pressure.step:
            return
        mailbox = self._mailbox
        task = mailbox.executor.running_task()
        pressure.note(mailbox.running if task is None else task)
        if pressure.is_over:
            self._give_up(pressure)
            return
        pressure.tries += 1
        if mailbox.executor.interrupt(task):
            pressure.times += 1
        mailbox.node.receive_loop.call_later(STOP_CANCEL(), lambda: self._press(pressure))

    def _give_up(self, pressure: _Pressure) -> None:
        step = pressure.step
        with self._lock:
            if self._step != step:
                return
            self.given_up = True
        mailbox = self._mailbox
        running = self._running()
        how = "interrupted" if pressure.times else "abandoned"
        if step == _CLEANING:
            text = self._late_cleanup(how)
        elif step == _RELEASING:
            text = (
                f"the release of {mailbox.title()} did not finish within {STOP_CLEANUP():g} s of its cleanup and was "
                f"{how}: a __del__ is blocking. Set {STOP_CLEANUP.variable} to give it more time"
            )
        else:
            text = self._late_calls(running, pressure.times >= _IGNORED)
        # The actor answers the calls in its queue as it leaves.
        queued = set(map(id, list(mailbox.queue)))
        begun = {id(call): call for task, call in list(mailbox.turns.tasks.items()) if not task.done()}
        if running is not None:
            begun[id(running)] = running
        mailbox.leave(self._reason)
        mailbox.abandon(call for ident, call in begun.items() if call.port and ident not in queued)
        self._stopped(pack_failure(MonarchError(text), True))

    def _late_cleanup(self, how: str) -> str:
        return (
            f"{self._mailbox.title()}.__cleanup__() did not finish within {STOP_CLEANUP():g} s and was {how}; "
            f"it may be unfinished. Set {STOP_CLEANUP.variable} to give it more time"
        )

    def _late_calls(self, running: m.Call | None, ignored: bool) -> str:
        how = "ignored two interrupts" if ignored else f"still blocked the actor {_INSISTS * STOP_CANCEL():g} s later"
        fate = "its process was ended" if self._process else "its thread keeps running until the procs are stopped"
        return (
            f"{self._title_of(running)} did not finish within {self._drain:g} s of the stop and {how}; "
            f"{fate}, and __cleanup__ has not run. Set {STOP_DRAIN.variable} to give calls more time"
        )

    def _title_of(self, running: m.Call | None) -> str:
        mailbox = self._mailbox
        if running is None and mailbox.instance is not None:
            return f"a background task or callback of {mailbox.title()}"
        return f"{mailbox.title()}.{running.method if running is not None else '__init__'}()"

    def _running(self) -> m.Call | None:
        """Return the message that blocks the actor; None if its arguments, a task or a callback do."""
        mailbox = self._mailbox
        task = mailbox.executor.running_task()
        if task is not None:
            return mailbox.turns.tasks.get(task)
        # On a loop, only a constructor runs in no task.
        return mailbox.running if mailbox.executor.loop is None or mailbox.instance is None else None
