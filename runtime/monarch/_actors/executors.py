"""Executors of an actor's code: the main thread of a rank, a separate thread, or an event loop in either."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Sequence
from functools import partial
from threading import get_ident, main_thread
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from monarch._actors import interruptible
from monarch._actors.interrupts import ThreadInterrupts
from monarch._actors.pausing.gate import gate
from monarch._actors.running import ActorLike
from monarch._node.node import Node
from monarch._python.later import asyncio
from monarch._python.threads import new_thread
from monarch._wire.deferred_signals import from_handler
from monarch._wire.receiving.leadership import Gate
from monarch.config import STOP_CANCEL

if TYPE_CHECKING:
    from monarch._wire.messages import Call
    from monarch._wire.receiving.loop import Turn

Action = Callable[[], None]
_MAIN = main_thread().ident
_LONG_S = 0.5
"""Seconds of a call after which unread messages are handled before the next one."""
_CATCH_UP_S = 0.1
"""The most seconds that this takes."""
_EXITED = (
    "monarch: a task or callback of an async actor raised SystemExit; the awaiting code gets it, and the process "
    "continues. Call os._exit() to end the process"
)
Item: TypeAlias = "Action | tuple[MessageReceiver, Call, Sequence[Any]]"
"""An action, or a message for an actor: mailbox, call and buffers."""


def start_task(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """Start an internal task without the loop's task factory, which belongs to the user and may raise."""
    return asyncio.Task(work, loop=loop)


class MessageReceiver(Protocol):
    """A receiver of messages; see mailbox.py."""

    since: float

    def start(self, call: Call, more: Sequence[Any], /) -> None: ...
    def run(self, call: Call, more: Sequence[Any], /) -> None: ...
    def answer_broken(self, call: Call, error: BaseException, /) -> bool: ...


class ActionExecutor:
    """Runs actions one by one in the order posted; on an event loop once it has an async actor."""

    _wait: Callable[[], object]
    """Waits until an item is queued; may return early. Set by each subclass."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.loop: asyncio.AbstractEventLoop | None = None
        self._items: deque[Item] = deque()
        """The next actions and messages. Any thread appends, the executor's thread takes."""
        self._urgent: deque[Action] = deque()
        """Actions that go before those, while there is no event loop; likewise."""
        self.interruptible = False
        """Whether user code runs that Ctrl-C should interrupt."""
        self.interrupts: ThreadInterrupts | None = None
        """The interrupter of this thread; None for the main thread, which gets signals."""
        self.meant: tuple[ActorLike, Call] | None = None
        """The message that a pending SIGINT is meant for, if any, so that it does not hit the next one. Set by the
        receiving thread, taken by the handler."""
        self.unwanted: set[asyncio.Task[Any]] = set()
        """Tasks of the event loop that Ctrl-C should cancel."""
        self.package_tasks: set[asyncio.Task[Any]] = set()
        """Tasks of the event loop that run code of this package only, which no interrupt may cut. Written on the loop,
        in atomic steps; others read."""
        self.begun = 0
        """How many calls have begun on the event loop and not ended. Written on the loop."""
        self._lock = threading.RLock()
        self.on_lost: Callable[[BaseException], None] = lambda error: None
        """Called with the error that ends this thread early; set by the actor before its construction."""
        self._ended = False
        """Whether the thread must end; in the executor's thread."""
        self._was_long = False
        """Whether the last call took long; in the executor's thread."""
        self._lost: BaseException | None = None
        """The error that has ended the event loop; in the executor's thread."""
        self._leaving = False
        """Whether the event loop must end; read and written by the executor's thread."""
        self._released: Action | None = None
        """Actions to run after the event loop has ended; likewise."""
        self.done = False
        """Whether an item was queued since the thread last looked for one. In MainExecutor, any thread sets it after it
        has queued one; the executor's thread clears it."""
        self.seconds = 0.0
        """Seconds of all messages so far, without those on an event loop. Written by the executor's thread; the
        receiving thread reads it."""
        self.last_end = 0.0
        """When the last of these messages had been handled; likewise."""

    def post(self, action: Action) -> None:
        """Queue an action, from any thread."""
        with self._lock:
            self._items.append(action)
            if self.loop is not None:
                self.loop.call_soon_threadsafe(self._run_item)
                return
        self._notify()

    def post_first(self, action: Action) -> None:
        """Queue an action before all messages that wait, from any thread; on an event loop, after them as usual."""
        with self._lock:
            before_others = self.loop is None
            if before_others:
                self._urgent.append(action)
        if before_others:
            self._notify()
        else:
            self.post(action)

    def deliver(self, mailbox: MessageReceiver, call: Call, more: Sequence[Any]) -> None:
        """Queue a message, from any thread."""
        with self._lock:
            self._items.append((mailbox, call, more))
            if self.loop is not None:
                self.loop.call_soon_threadsafe(self._run_item)
                return
        self._notify()

    def enter_loop(self, first: Action) -> None:
        """Switch to an event loop, where this action runs before later ones; called from an action."""
        loop = asyncio.new_event_loop()
        loop.call_soon(first)
        with self._lock:
            # Tasks that an earlier loop has left behind no longer run.
            self.begun = 0
            # First, so that deliveries of a __del__ in the middle of this reach the loop, perhaps twice.
            self.loop = loop
            self._items.extendleft(reversed(self._urgent))
            self._urgent.clear()
            for _ in range(len(self._items)):
                loop.call_soon(self._run_item)

    def _run_item(self) -> None:
        """Run the next item on the event loop; items left by an ended loop run without it."""
        try:
            item = self._items.popleft()
        except IndexError:
            # A surplus wake-up: see enter_loop.
            return
        if callable(item):
            item()
        else:
            item[0].start(item[1], item[2])

    @contextlib.contextmanager
    def user_code(self) -> Generator[None]:
        """Mark a block as user code that may be interrupted; in the executor's thread."""
        try:
            try:
                self.interruptible = True
                if self.interrupts is not None:
                    self.interrupts.enter()
                yield
            finally:
                self._leave_user_code()
        finally:
            # Again, if an interrupt came while leaving.
            self._leave_user_code()

    @contextlib.contextmanager
    def protected(self) -> Generator[None]:
        """Mark a block within user code that no interrupt cuts; in the executor's thread."""
        was = self.interruptible
        self._leave_user_code()
        try:
            yield
        finally:
            if was:
                self.interruptible = True
                if self.interrupts is not None:
                    self.interrupts.enter()

    def end_user_code(self, task: asyncio.Task[Any]) -> None:
        """Note that this task, which runs, has left the code of the user; on the event loop."""
        self.package_tasks.add(task)
        if self.interrupts is not None:
            self.interrupts.leave()

    def _leave_user_code(self) -> None:
        self.interruptible = False
        if self.interrupts is not None:
            self.interrupts.leave()

    def in_call(self) -> bool:
        """Return whether user code runs here; from any thread."""
        return self.interruptible or self.running_task() is not None

    def running_task(self) -> asyncio.Task[Any] | None:
        """Return the task whose step the event loop runs; from any thread."""
        loop = self.loop
        return asyncio.current_task(loop) if loop is not None else None

    def has_call(self) -> bool:
        """Return whether user code runs here, or awaits on the event loop; from any thread."""
        return self.begun > 0 or self.in_call()

    def interrupt_now(self) -> bool:
        """Interrupt the user code that runs here, from another thread; return whether any runs."""
        return self.interrupt(self.running_task())

    def interrupt(self, task: asyncio.Task[Any] | None) -> bool:
        """Interrupt the user code that runs here, from another thread; return whether any runs.

        Args:
            task: the task whose code is meant; None if no event loop runs it.
        """
        if self.interrupts is not None:
            return self.interrupts.interrupt(is_due=lambda: self._runs_user_code(task))
        if not self._runs_user_code(task):
            return False
        if task is not None:
            self.unwanted = {task}
        # The handler looks again, in the main thread.
        signal.pthread_kill(_MAIN or 0, signal.SIGINT)
        return True

    def _runs_user_code(self, task: asyncio.Task[Any] | None) -> bool:
        """Return whether user code runs here in a task, or in none; from any thread."""
        if self.running_task() is not task:
            return False
        return self.interruptible or (task is not None and task not in self.package_tasks)

    def release(self, released: Action) -> None:
        """Note that the actor is gone; called from an action. Then the executor may take another actor."""
        self._leaving = True
        if self.loop is not None:
            self._released = released
            self.loop.stop()
        else:
            released()

    def end(self) -> None:
        """End after the actions posted so far."""

        def last() -> None:
            self._ended = self._leaving = True
            if self.loop is not None:
                self.loop.stop()

        self.post(last)

    def run(self) -> None:
        """Run posted actions until the end; in the executor's thread."""
        while not self._ended:
            try:
                while not self._ended and self.loop is None:
                    self._run_next()
            except BaseException:
                # User errors are answered elsewhere. This is a bug, or raised by a signal handler of the user between
                # two messages, and must not end the thread. Nor may a handler that raises as this is printed, which
                # takes a try here: in a function of its own one could raise before it.
                try:
                    traceback.print_exc()
                except BaseException:
                    pass
            if self.loop is not None:
                self._run_loop(self.loop)

    def _run_next(self) -> None:
        if self._was_long:
            # If the last call kept the GIL, a Stop of the next one is among the messages that nobody has read.
            self._was_long = False
            self.node.receive_loop.catch_up(_CATCH_UP_S, traceback.print_exc)
        self.done = False
        if not self._items and not self._urgent:
            self._wait()
            if not self._items and not self._urgent:
                return
        # Not popleft(): Python may run a signal handler that raises at the end of a call, and the item would be lost.
        if self._urgent:
            action = self._urgent[0]
            del self._urgent[0]
            action()
            return
        item = self._items[0]
        is_action = callable(item)
        del self._items[0]
        if is_action:
            item()
            return
        mailbox = item[0]
        before = mailbox.since
        try:
            mailbox.run(item[1], item[2])
        except BaseException as error:
            if not mailbox.answer_broken(item[1], error):
                raise
        # A message that was refused has not run: the time is that of the one before.
        if mailbox.since != before:
            self.last_end = now = monotonic()
            took = now - mailbox.since
            self.seconds += took
            self._was_long = took > _LONG_S

    def _run_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        if self.interrupts is not None:
            self.interrupts.ident = get_ident()
        # This wait does not receive messages.
        self.node.receive_loop.background()
        self._leaving = False
        try:
            self._run_on(loop)
        except BaseException as error:
            self._lost = error
            raise
        finally:
            with self._lock:
                self.loop = None
            loop.set_task_factory(None)
            rest = asyncio.all_tasks(loop)
            for task in rest:
                task.cancel()
            if rest:
                # Time for their cleanup; a task that swallows its cancellation is left behind.
                loop.run_until_complete(asyncio.wait(rest, timeout=STOP_CANCEL()))
            loop.run_until_complete(loop.shutdown_asyncgens())
            asyncio.set_event_loop(None)
            loop.close()
            released, self._released = self._released, None
            if released is not None:
                released()

    def _run_on(self, loop: asyncio.AbstractEventLoop) -> None:
        """Run the loop until the actor leaves it, though signal handlers of the user may raise between two lines."""
        while not self._leaving:
            try:
                self._run_iterations(loop)
            except BaseException as error:
                if not from_handler(error):
                    raise

    def _run_iterations(self, loop: asyncio.AbstractEventLoop) -> None:
        """Run the loop until the actor leaves it; a stop() in user code only ends one iteration."""
        while not self._leaving:
            try:
                loop.run_forever()
            except KeyboardInterrupt:
                # The user's task that raised it keeps it. The others continue.
                pass
            except SystemExit:
                # See run().
                try:
                    print(_EXITED, file=sys.stderr)
                    traceback.print_exc()
                except BaseException:
                    pass
            except Exception as error:
                breaks = False
                try:
                    breaks = _breaks_loop(error)
                    if not breaks:
                        # A signal handler of the user has raised while the loop was between two tasks.
                        traceback.print_exc()
                except BaseException:
                    pass
                if breaks:
                    raise

    def _notify(self) -> None:
        raise NotImplementedError


class MainExecutor(ActionExecutor):
    """The main thread of a rank: while nothing is posted, it receives messages itself."""

    def __init__(self, node: Node) -> None:
        super().__init__(node)
        self.thread: Turn | None = None
        self.busy = False
        """Whether an actor lives here; further actors get separate threads."""
        # No user code waits here, so exceptions of signal handlers have no receiver. Not a method, as it runs for each
        # message.
        self._wait = partial(node.receive_loop.wait, self, None, traceback.print_exc)

    def run(self) -> None:
        while not self._ended:
            try:
                super().run()
            except BaseException:
                if self._lost is not None:
                    raise
                # A signal handler of the user has raised between two lines that are not in a try.
                try:
                    traceback.print_exc()
                except BaseException:
                    pass

    def _notify(self) -> None:
        self.done = True
        self.node.receive_loop.notify(self)

    def deliver(self, mailbox: MessageReceiver, call: Call, more: Sequence[Any]) -> None:
        if self.loop is None and get_ident() == _MAIN:
            # The thread itself receives and sees the new item.
            self._items.append((mailbox, call, more))
            self.done = True
        else:
            super().deliver(mailbox, call, more)

    def release(self, released: Action) -> None:
        def free() -> None:
            self.busy = False
            released()

        super().release(free)


def _breaks_loop(error: Exception) -> bool:
    """Return whether an error comes from the event loop itself, such as a closed selector, so that it would recur."""
    tb = error.__traceback__
    while tb is not None and tb.tb_next is not None:
        tb = tb.tb_next
    module = tb.tb_frame.f_globals.get("__name__", "") if tb is not None else ""
    return module.partition(".")[0] in ("asyncio", "selectors", "uvloop")


def _nothing() -> None:
    pass


class ThreadExecutor(ActionExecutor):
    """A thread for one actor, which ends with the actor."""

    def __init__(self, node: Node, name: str) -> None:
        super().__init__(node)
        self.interrupts = ThreadInterrupts()
        self.awake: Callable[[], None] = _nothing
        """Called in this thread before it runs actions. Written once; the first actions may run before that."""
        # Not a semaphore: a __del__ that delivers while it is locked would deadlock.
        self._gate = Gate()
        self._wait = self._sleep
        self._thread = new_thread(name, self._live)
        self._thread.start()

    def _live(self) -> None:
        interruptible.begin()
        gate.threads.begin(self.in_call, self.has_call)
        try:
            self.run()
        except BaseException as error:
            # For example, user code closed the selector: no thread handles the actor's messages any more.
            self.on_lost(error)
        finally:
            gate.threads.end()
            interruptible.end()

    def _notify(self) -> None:
        self._gate.open()

    def _sleep(self) -> None:
        self._gate.wait(None)
        self.awake()

    def release(self, released: Action) -> None:
        self.end()
        released()
