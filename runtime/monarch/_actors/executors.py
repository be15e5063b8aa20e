"""What the code of an actor runs in: the main thread of a rank, a thread of its own, or an event loop in either."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from threading import get_ident, main_thread
from typing import TYPE_CHECKING, Any, Protocol

from monarch._actors.interrupts import ThreadInterrupts
from monarch._actors.running import ActorLike
from monarch._core.later import asyncio
from monarch._node.node import Node
from monarch._wire.receiving.leadership import Gate
from monarch.config import STOP_CANCEL

if TYPE_CHECKING:
    from monarch._wire.messages import Call
    from monarch._wire.receiving.loop import Turn

Action = Callable[[], None]
_MAIN = main_thread().ident
_EXITED = (
    "monarch: a task or callback of an async actor raised SystemExit; whoever awaits the task gets it, and the process "
    "goes on. Use os._exit() to end it"
)
Item = Any
"""An action, or a message for an actor: mailbox, call and what came beside it."""


def start_task(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """Start a task of ours, bypassing the loop's task factory, which is the user's and may raise."""
    return asyncio.Task(work, loop=loop)


class Receiver(Protocol):
    """An actor that messages are delivered to; see mailbox.py."""

    def start(self, call: Call, more: Sequence[Any], /) -> None: ...
    def _run(self, call: Call, more: Sequence[Any], /) -> None: ...


class Executor:
    """Runs actions one after the other, in the order posted; on an event loop once an async actor has come."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.loop: asyncio.AbstractEventLoop | None = None
        self._items: deque[Item] = deque()
        self.interruptible = False
        """Whether code of the user runs that a Ctrl-C is meant for."""
        self.interrupts: ThreadInterrupts | None = None
        """What interrupts this thread, if it is not the main one, which gets signals."""
        self.meant: tuple[ActorLike, Call] | None = None
        """The message that the SIGINT on its way is meant for, if it is for one: the next one is left alone. Set by the
        receiving thread, taken by the handler."""
        self.unwanted: set[asyncio.Task[Any]] = set()
        """Tasks of the event loop that a Ctrl-C is meant for."""
        self._lock = threading.RLock()
        self.on_lost: Callable[[BaseException], None] = lambda error: None
        """Told what has ended this thread too early; set by the actor that lives here, before it is made."""
        self._ended = False
        self._leaving = False
        """Whether the event loop is to end; written and read by the thread that this is for."""
        self._released: Action | None = None
        """To run when the event loop has ended; likewise."""

    def post(self, action: Action) -> None:
        """Have something run here, from any thread."""
        with self._lock:
            self._items.append(action)
            if self.loop is not None:
                self.loop.call_soon_threadsafe(self._run_item)
                return
        self._notify()

    def deliver(self, mailbox: Receiver, call: Call, more: Sequence[Any]) -> None:
        """Have a message handled here, from any thread."""
        with self._lock:
            self._items.append((mailbox, call, more))
            if self.loop is not None:
                self.loop.call_soon_threadsafe(self._run_item)
                return
        self._notify()

    def enter_loop(self, first: Action) -> None:
        """Turn to an event loop, where this action runs before all that come later; called from an action."""
        loop = asyncio.new_event_loop()
        loop.call_soon(first)
        with self._lock:
            # First: what a __del__ that runs in the middle of this delivers goes to the loop too, perhaps twice.
            self.loop = loop
            for _ in range(len(self._items)):
                loop.call_soon(self._run_item)

    def _run_item(self) -> None:
        """Run the next item on the event loop; what an ended loop leaves is run without it."""
        try:
            item = self._items.popleft()
        except IndexError:
            # It was called once too often: see enter_loop.
            return
        if type(item) is tuple:
            item[0].start(item[1], item[2])
        else:
            item()

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Code of the user runs here, and may be interrupted; in the thread that this is for."""
        try:
            try:
                self.interruptible = True
                if self.interrupts is not None:
                    self.interrupts.enter()
                yield
            finally:
                self._outside()
        finally:
            # Again, if it was in leaving that an interrupt came.
            self._outside()

    def _outside(self) -> None:
        self.interruptible = False
        if self.interrupts is not None:
            self.interrupts.leave()

    def interrupt_now(self) -> None:
        """Interrupt whatever code of the user runs here, from another thread."""
        task = asyncio.current_task(self.loop) if self.loop is not None else None
        if task is not None:
            self.unwanted = {task}
        if task is None and not self.interruptible:
            return
        if self.interrupts is not None:
            self.interrupts.interrupt(inside=True)
        else:
            signal.pthread_kill(_MAIN or 0, signal.SIGINT)

    def release(self, released: Action) -> None:
        """The actor that lived here is gone; called from an action. What is told so runs when another may come."""
        self._leaving = True
        if self.loop is not None:
            self._released = released
            self.loop.stop()
        else:
            released()

    def end(self) -> None:
        """Run nothing more after what was posted."""

        def last() -> None:
            self._ended = self._leaving = True
            if self.loop is not None:
                self.loop.stop()

        self.post(last)

    def run(self) -> None:
        """Run what is posted, until it is ended; in the thread that this is for."""
        while not self._ended:
            if self.loop is not None:
                self._run_loop(self.loop)
                continue
            if not self._items:
                self._wait()
                continue
            item = self._items.popleft()
            try:
                if type(item) is tuple:
                    item[0]._run(item[1], item[2])
                else:
                    item()
            except BaseException:
                # Errors of the user's code are answered where it runs; this is a bug, and must not end the thread.
                traceback.print_exc()

    def _run_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        if self.interrupts is not None:
            self.interrupts.ident = get_ident()
        # No thread waits here in a way that receives.
        self.node.receive_loop.background()
        self._leaving = False
        try:
            self._run_on(loop)
        finally:
            with self._lock:
                self.loop = None
            loop.set_task_factory(None)
            rest = asyncio.all_tasks(loop)
            for task in rest:
                task.cancel()
            if rest:
                # For what they do at their end; one that swallows its cancellation is left behind.
                loop.run_until_complete(asyncio.wait(rest, timeout=STOP_CANCEL()))
            loop.run_until_complete(loop.shutdown_asyncgens())
            asyncio.set_event_loop(None)
            loop.close()
            released, self._released = self._released, None
            if released is not None:
                released()

    def _run_on(self, loop: asyncio.AbstractEventLoop) -> None:
        """Run the loop until the actor leaves it; a stop() by the user's code ends no more than one round."""
        while not self._leaving:
            try:
                loop.run_forever()
            except KeyboardInterrupt:
                # It has come to a task that the user's code made, which has it. The others go on.
                pass
            except SystemExit:
                print(_EXITED, file=sys.stderr)
                traceback.print_exc()

    def _notify(self) -> None:
        raise NotImplementedError

    def _wait(self) -> None:
        raise NotImplementedError


class MainExecutor(Executor):
    """The main thread of a rank: while nothing is posted, it receives messages itself."""

    def __init__(self, node: Node) -> None:
        super().__init__(node)
        self.thread: Turn | None = None
        self.busy = False
        """Whether an actor lives here; another one gets a thread of its own."""

    @property
    def done(self) -> bool:
        """Whether there is something to run: what the thread waits for."""
        return bool(self._items)

    def _notify(self) -> None:
        self.node.receive_loop.notify(self)

    def _wait(self) -> None:
        # No code of the user waits here that what a handler of a signal raises would be for.
        self.node.receive_loop.wait(self, report=traceback.print_exc)

    def deliver(self, mailbox: Receiver, call: Call, more: Sequence[Any]) -> None:
        if self.loop is None and get_ident() == _MAIN:
            # It receives itself, and sees that there is something to run.
            self._items.append((mailbox, call, more))
        else:
            super().deliver(mailbox, call, more)

    def release(self, released: Action) -> None:
        def free() -> None:
            self.busy = False
            released()

        super().release(free)


class ThreadExecutor(Executor):
    """A thread for one actor; it ends with it."""

    def __init__(self, node: Node, name: str) -> None:
        super().__init__(node)
        self.interrupts = ThreadInterrupts()
        # Not a semaphore, whose lock a __del__ that delivers in the middle of its steps would wait for.
        self._gate = Gate()
        self._thread = threading.Thread(target=self._live, name=name, daemon=True)
        self._thread.start()

    def _live(self) -> None:
        try:
            self.run()
        except BaseException as error:
            # Such as a selector that the user's code has closed: no thread handles what is sent to the actor any more.
            self.on_lost(error)

    def _notify(self) -> None:
        self._gate.open()

    def _wait(self) -> None:
        self._gate.wait(None)

    def release(self, released: Action) -> None:
        self.end()
        released()
