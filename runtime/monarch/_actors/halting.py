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
from monarch._core.later import asyncio
from monarch._node.remote_errors import pack_failure
from monarch._wire import messages as m
from monarch.config import STOP_CANCEL, STOP_CLEANUP, STOP_DRAIN, STOP_OWNED
from monarch.exceptions import MonarchError

_DRAINING, _OWNED, _CLEANING, _DONE = range(4)
_PING = 0.1
"""Seconds for an event loop to respond; otherwise it is in code that does not await."""


def longest() -> float:
    """Return the maximum seconds that the end of an actor takes."""
    return STOP_DRAIN() + STOP_OWNED() + STOP_CLEANUP() + 5 * STOP_CANCEL()


def is_stuck(mailbox: ActorLike) -> bool:
    """Return whether an actor was given up while its code continues."""
    return mailbox.halting is not None and mailbox.halting.given_up


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
            self._mailbox.executor.outside.add(self._task)
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
            hook = getattr(self._mailbox.instance, "__cleanup__", None)
            if hook is not None:
                with self._mailbox.executor.inside():
                    hook(self._mailbox.end_cause())
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
            hook = getattr(mailbox.instance, "__cleanup__", None)
            if hook is not None:
                with mailbox.executor.inside():
                    result = hook(mailbox.end_cause())
                if is_coroutine(result):
                    await self._within_bounds(result)
        except BaseException as error:
            failure = self._failure(error)
        self._end(failure)

    async def _within_bounds(self, cleanup: Coroutine[Any, Any, Any]) -> None:
        task = start_task(asyncio.get_running_loop(), cleanup)
        done, _ = await asyncio.wait({task}, timeout=STOP_CLEANUP())
        if not done:
            task.cancel()
            await asyncio.wait({task}, timeout=STOP_CANCEL())
            raise MonarchError(self._late(_CLEANING, "cancelled"))
        task.result()

    def _message(self) -> tuple[ActorLike, m.Call]:
        mailbox = self._mailbox
        return mailbox, m.Call(mailbox.node.proc, mailbox.key, "__cleanup__", 0, b"", "", 0, b"")

    def _failure(self, error: BaseException) -> bytes:
        if isinstance(error, KeyboardInterrupt):
            error = MonarchError(self._late(_CLEANING, "interrupted"))
        return pack_failure(error, isinstance(error, MonarchError))

    def _enter(self, step: int) -> None:
        with self._lock:
            if self._step < step:
                self._step = step
        if step == _CLEANING:
            self._limit(step, STOP_CLEANUP())

    def _end(self, failure: bytes | None) -> None:
        """Finish the end, whatever its steps achieved."""
        with self._lock:
            given_up, self._step = self.given_up, _DONE
        self._mailbox.leave(self._reason)
        self._mailbox.let_go()
        if self._task is not None:
            self._mailbox.executor.outside.discard(self._task)
        self._mailbox.executor.release(lambda: None if given_up else self._stopped(failure))

    # In the receiving thread

    def _limit(self, step: int, seconds: float) -> None:
        self._mailbox.node.receive_loop.call_later(seconds, lambda: self._press(step, 0))

    def _press(self, step: int, times: int) -> None:
        """Interrupt the code that blocks a slow step, twice; then give up on the actor."""
        if self._step != step:
            return
        mailbox, call_later = self._mailbox, self._mailbox.node.receive_loop.call_later
        if step == _DRAINING:
            mailbox.refuse_rest(self._reason)
        loop = mailbox.executor.loop
        if loop is None:
            if times == 2:
                self._give_up(step)
                return
            mailbox.executor.interrupt_now()
            call_later(STOP_CANCEL(), lambda: self._press(step, times + 1))
            return
        alive, ended = Event(), mailbox.turns.ended
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(alive.set)

        def insist() -> None:
            if self._step != step:
                return
            if alive.is_set() or mailbox.turns.ended != ended:
                # The loop enforces the bounds itself. Behind many messages, this event may take its time.
                call_later(STOP_CANCEL(), lambda: self._press(step, times))
            elif times == 2:
                self._give_up(step)
            else:
                mailbox.executor.interrupt_now()
                call_later(STOP_CANCEL(), lambda: self._press(step, times + 1))

        call_later(_PING, insist)

    def _give_up(self, step: int) -> None:
        with self._lock:
            if self._step != step:
                return
            self.given_up = True
        mailbox = self._mailbox
        running = self._running()
        text = self._late(step, "interrupted", running)
        mailbox.leave(self._reason)
        mailbox.abandon([running] if running is not None and running.port else [])
        self._stopped(pack_failure(MonarchError(text), True))

    def _late(self, step: int, how: str, running: m.Call | None = None) -> str:
        mailbox = self._mailbox
        if step == _CLEANING:
            return (
                f"{mailbox.title()}.__cleanup__() did not end within {STOP_CLEANUP():g} s and was {how}; "
                f"it may be unfinished. Set {STOP_CLEANUP.variable} to give it more time"
            )
        where = self._where(running)
        fate = "its process was ended" if self._process else "its thread keeps running until the procs are stopped"
        return (
            f"{where} did not end within {self._drain:g} s of the stop and ignored two interrupts; "
            f"{fate}, and __cleanup__ has not run. Set {STOP_DRAIN.variable} to give calls more time"
        )

    def _where(self, running: m.Call | None) -> str:
        mailbox = self._mailbox
        if running is None and mailbox.instance is not None:
            return f"a background task or callback of {mailbox.title()}"
        return f"{mailbox.title()}.{running.method if running is not None else '__init__'}()"

    def _running(self) -> m.Call | None:
        """Return the message that blocks the actor; None if its constructor, task or callback does."""
        mailbox = self._mailbox
        loop = mailbox.executor.loop
        task = asyncio.current_task(loop) if loop is not None else None
        return (mailbox.turns.tasks.get(task) if task is not None else None) or mailbox.running or mailbox.turns.call
