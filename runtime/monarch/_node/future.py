"""Futures of results from ranks. A thread can wait for them, and an event loop can await them."""

from __future__ import annotations

import math
import sys
import time
import traceback
from collections.abc import Callable, Generator
from contextvars import ContextVar, copy_context
from functools import partial
from threading import get_ident
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from monarch._node.node_like import NodeLike
from monarch._node.remote_errors import drop_own_frames
from monarch._python.later import asyncio
from monarch._python.threads import spawn_thread
from monarch._wire.receiving.aside import tell_error
from monarch.exceptions import CallTimeoutError, DeadlockError

if TYPE_CHECKING:
    from monarch._wire.receiving.loop import Turn

R = TypeVar("R")
S = TypeVar("S")

judging: ContextVar[bool] = ContextVar("monarch_judging", default=False)
"""Whether this code judges or heals a mesh, and so must not wait for the verdict."""

PENDING: Any = object()


class Future(Generic[R]):
    """The result of a call. The call is already running, and dropping its future does not cancel it.

    It can be read any number of times, from any thread or event loop, and it can be awaited.
    """

    __slots__ = (
        "__dict__",
        "__weakref__",
        "_label",
        "_lock",
        "_maker",
        "_node",
        "_value",
        "done",
        "thread",
        "wanted",
    )

    # Most futures keep these, so they are not set for each. Guarded by ``_lock``.
    _callbacks: list[Callable[[Future[Any]], None]] | None = None
    _error: BaseException | None = None
    _onlookers: list[Callable[[], None]] | None = None
    """Called when the thread that unpickles the value has finished or was interrupted."""

    def __init__(self, node: NodeLike, label: str = "") -> None:
        self._node = node
        self._label = label
        self.done: bool = False
        self.thread: Turn | None = None
        self.wanted = False
        """Whether a thread waits for it; a hint, written by waiting threads."""
        # Shared by all futures of a node, held briefly. Guards everything below.
        self._lock = node.waits.lock
        self._value: Any = PENDING
        self._maker = 0
        """The thread that unpickles the value; 0 if none does."""

    @property
    def label(self) -> str:
        """The awaited call, for errors."""
        return self._label

    # Waiting

    def get(self, timeout: float | None = None) -> R:
        """Wait for the result and return it.

        Args:
            timeout: seconds to wait; None waits without a limit.

        Raises:
            CallTimeoutError: the timeout expired. The call continues, and a later ``get`` can still return its result.
            ActorError: the endpoint raised.
            DeviceMeshError: a process or actor of the call has died or was stopped.
            DeadlockError: the call waits for this actor, or this is the receiving thread.
            ValueError: the timeout is negative or not a number.
        """
        if timeout is not None and not (timeout >= 0 and math.isfinite(timeout)):
            raise ValueError(f"timeout: expected a number of seconds of at least 0, got {timeout!r}")
        deadline = None if timeout is None else time.monotonic() + timeout
        if not self.done:
            self.wanted = True
            try:
                is_over = self._node.waits.wait(self, timeout)
            except KeyboardInterrupt as error:
                self._node.events.interrupted.tell(self)
                drop_own_frames(error)
                raise
            if not is_over and timeout is not None:
                self.wanted = False
                raise self.timeout_error(timeout)
        if self._value is PENDING and self._node.waits.unshown:
            # Show the output of the call before its result is read.
            self._node.waits.await_shown()
        return self._outcome(deadline)

    def timeout_error(self, timeout: float) -> CallTimeoutError:
        """Return the error of a wait that has ended after some seconds."""
        why = f"{self._unanswered_text()}{self._running_instead(timeout)}"
        return CallTimeoutError(
            f"{self.label or 'the call'} has not finished within {timeout:g} s{why}; "
            f"it is still running, and you can call get() again"
        )

    def result(self, timeout: float | None = None) -> R:
        """Return the same as ``get``."""
        return self.get(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait and return the error that ``get`` would raise, or None. Raise CallTimeoutError on timeout."""
        try:
            self.get(timeout)
        except BaseException as error:
            if error is not self._error:
                raise
            return error
        return None

    def __await__(self) -> Generator[Any, None, R]:
        if not self.done:
            yield from self.as_asyncio().__await__()
        return self._outcome()

    def as_asyncio(self) -> asyncio.Future[R]:
        """Return an asyncio future of the running loop with the same outcome; cancelling it does not cancel the call.

        Raises:
            RuntimeError: no event loop runs in this thread.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[R] = loop.create_future()
        self._when_done(_Settling(self._settle, loop, future).arrived)
        self._node.waits.awaited(self, future)
        return future

    def _settle(self, future: asyncio.Future[R], again: Callable[[], None]) -> None:
        """Give an asyncio future the outcome, in its loop."""
        # Cancelled or in a deadlock; or called again, since another thread unpickles the value.
        if future.done() or self._look_on(again):
            return
        try:
            future.set_result(self._outcome())
        except StopIteration as error:
            future.set_exception(RuntimeError(f"the call raised StopIteration: {error}"))
        except BaseException as error:
            future.set_exception(error)

    def add_done_callback(self, callback: Callable[[Future[R]], None]) -> None:
        """Call a function with this future once it is done.

        If it is done, the function runs at once, in this thread. The others of a process run one by one in a separate
        thread, in the order in which their futures are done. So they may wait for other futures, but not for a callback
        that comes later. The traceback of a callback that raises is written to stderr.
        """
        if self.done and not self._node.receive_loop.receives_here():
            _call(callback, self)
        else:
            self._when_done(partial(_call_later, callback))

    def _when_done(self, callback: Callable[[Future[R]], None]) -> None:
        """Call an internal function once it is done, in the thread that completes it.

        That may be the receiving thread, so the function does not wait or run user code.
        """
        with self._lock:
            if self._callbacks is None:
                self._callbacks = []
            self._callbacks.append(callback)
        if self.done:
            # It was, or is completed just now: one of the two threads takes the callbacks.
            self._call_back()
        else:
            # No waiting thread receives, so the background thread must.
            self._node.receive_loop.background()

    # Completing

    def _complete(self) -> None:
        """Mark it done, from the thread with the outcome."""
        # Without the lock: a thread that adds a callback meanwhile looks at this after it.
        self.done = True
        self._node.receive_loop.notify(self)
        if self._callbacks is not None:
            self._call_back()

    def _call_back(self) -> None:
        with self._lock:
            callbacks, self._callbacks = self._callbacks, None
        for callback in callbacks or ():
            try:
                callback(self)
            except Exception as error:
                # The other callbacks must still run.
                tell_error(error)

    def _outcome(self, deadline: float | None = None) -> R:
        """Return the result or raise its error; wait until a deadline (monotonic) for a thread that unpickles it.

        Unpickling runs user code, so no lock is held; one thread does it, and others wait.
        """
        while self._value is PENDING and self._error is None:
            if not self._make_now():
                self._wait_for_maker(deadline)
        if self._error is not None:
            # Otherwise the traceback would grow with each get.
            raise self._error.with_traceback(None)
        return self._value

    def _make_now(self) -> bool:
        """Unpickle the value in this thread, unless that was done; return False if another thread does it."""
        ident = get_ident()
        with self._lock:
            if self._value is not PENDING or self._error is not None:
                return True
            if self._maker == ident:
                raise DeadlockError(
                    f"the result of {self.label or 'the call'} is read while this thread unpickles it: its get() "
                    f"cannot be called in a __setstate__ of the result, or in a module that unpickling imports"
                )
            if self._maker:
                return False
            self._maker = ident
        try:
            self._value = self._make()
        except KeyboardInterrupt:
            # The interrupt is for this reader, not the outcome: the next reader tries again.
            raise
        except BaseException as error:
            self._error = error
        finally:
            # Without the lock: a thread that looks on looks at this again after it has added itself.
            self._maker = 0
            if self._onlookers is not None:
                self._tell_onlookers()
        return True

    def _tell_onlookers(self) -> None:
        with self._lock:
            onlookers, self._onlookers = self._onlookers, None
        for tell in onlookers or ():
            tell()

    def _look_on(self, tell: Callable[[], None]) -> bool:
        """Return whether another thread unpickles the value; if so, call a function when it stops."""
        with self._lock:
            if not self._maker or self._maker == get_ident():
                return False
            if self._onlookers is None:
                self._onlookers = []
            self._onlookers.append(tell)
        if not self._maker:
            # It has finished meanwhile, and may not have seen this one.
            self._tell_onlookers()
        return True

    def _wait_for_maker(self, deadline: float | None) -> None:
        onlooker = _Onlooker(self._node, f"another thread that unpickles the result of {self.label or 'a call'}")
        if not self._look_on(onlooker.tell):
            return
        if not self._node.waits.wait(onlooker, None if deadline is None else max(0.0, deadline - time.monotonic())):
            raise CallTimeoutError(
                f"the answer to {self.label or 'the call'} has arrived, but another thread has not finished "
                f"unpickling it in time; you can call get() again"
            )

    def _make(self) -> R:
        """Return the result or raise its error; called once, in the first thread that reads it."""
        raise NotImplementedError

    def _unanswered_text(self) -> str:
        return ""

    def _running_instead(self, waited: float) -> str:
        """Describe what runs in front of it, after a wait of some seconds."""
        return ""

    def __repr__(self) -> str:
        return f"<Future of {self.label or 'a call'}: {'done' if self.done else 'pending'}>"


# The insides of futures, for other files: users see the other attributes when they press Tab.


def node_behind(future: Future[Any]) -> NodeLike:
    """Return the node of this process in the session of a call."""
    return future._node  # pyright: ignore[reportPrivateUsage]


def when_done(future: Future[R], callback: Callable[[Future[R]], None]) -> None:
    """Call an internal function once a future is done, in the thread that completes it.

    That may be the receiving thread, so the function does not wait or run user code.
    """
    future._when_done(callback)  # pyright: ignore[reportPrivateUsage]


def is_awaited(future: Future[Any]) -> bool:
    """Return whether a thread or an event loop waits for a future; a hint."""
    return future.wanted or bool(future._callbacks)  # pyright: ignore[reportPrivateUsage]


def missing_of(future: Future[Any]) -> str:
    """Describe the ranks that have not answered, for errors; empty without any."""
    return future._unanswered_text()  # pyright: ignore[reportPrivateUsage]


def _call_later(callback: Callable[[Future[R]], None], future: Future[R]) -> None:
    node_behind(future).lanes.post("callbacks", partial(_call, callback, future))


def _call(callback: Callable[[Future[R]], None], future: Future[R]) -> None:
    """Call a user callback and print its error."""
    try:
        callback(future)
    except Exception as error:
        name = getattr(callback, "__qualname__", None) or repr(callback)
        print(f"monarch: exception in done callback {name} of {future.label or 'a call'}:", file=sys.stderr)
        traceback.print_exception(error)


class _Settling(Generic[R]):
    """Gives an asyncio future the outcome of a future. Not closures, whose cycle would keep a dropped future alive."""

    __slots__ = ("_future", "_loop", "_settle")

    def __init__(
        self,
        settle: Callable[[asyncio.Future[R], Callable[[], None]], None],
        loop: asyncio.AbstractEventLoop,
        future: asyncio.Future[R],
    ) -> None:
        self._settle, self._loop, self._future = settle, loop, future

    def arrived(self, _: object = None) -> None:
        """Settle it soon, from any thread."""
        try:
            self._loop.call_soon_threadsafe(self._settle, self._future, self.arrived)
        except RuntimeError:
            # The loop was closed meanwhile.
            pass


class _Onlooker:
    """Waits until another thread has unpickled a value."""

    __slots__ = ("_node", "done", "label", "thread")

    def __init__(self, node: NodeLike, label: str) -> None:
        self._node = node
        self.label = label
        self.done = False
        self.thread: Turn | None = None

    def tell(self) -> None:
        self.done = True
        self._node.receive_loop.notify(self)


class Promise(Future[R]):
    """A future that this process completes itself."""

    __slots__ = ("_completer",)

    def __init__(self, node: NodeLike, label: str = "") -> None:
        super().__init__(node, label)
        self._completer: Callable[[], R] | None = None

    def complete(self, make: Callable[[], R]) -> None:
        """Complete it: ``get`` returns or raises what this function does."""
        if not self.done:
            self._completer = make
            self._complete()

    def _make(self) -> R:
        make = self._completer
        assert make is not None
        value = make()
        # Only now: an interrupt leaves it for the next reader.
        self._completer = None
        return value


class DoneFuture(Future[R]):
    """A future that is done from the beginning."""

    __slots__ = ()

    def __init__(self, node: NodeLike, label: str, value: Any, error: BaseException | None = None) -> None:
        super().__init__(node, label)
        self._value, self._error = value, error
        self.done = True


def in_thread(node: NodeLike, label: str, work: Callable[[], R], promise: Promise[R] | None = None) -> Promise[R]:
    """Run a function that waits for other futures in a separate thread, and return a future of its result.

    Args:
        node: the node of this process.
        label: what the function does, for errors.
        work: the function.
        promise: the future, for a caller that an interrupt may keep from getting it as a result.
    """
    promise = Promise(node, label) if promise is None else promise
    judges = judging.get()

    def run() -> None:
        judging.set(judges)
        try:
            value = work()
        except BaseException as error:
            caught = error
            promise.complete(lambda: _raise(caught))
        else:
            promise.complete(lambda: value)

    spawn_thread(f"monarch-{label[:20]}", run)
    return promise


def to_its_end(node: NodeLike, label: str, work: Callable[[], R]) -> R:
    """Run a function that must not stop half way: an interrupt of the waiting thread does not reach it."""
    # On behalf of the same actor.
    here = copy_context()
    return in_thread(node, label, lambda: here.run(work)).get()


def then(source: Future[S], label: str, make: Callable[[], R]) -> Promise[R]:
    """Return a future that is done when another is, with the outcome of a function called then."""
    promise: Promise[R] = Promise(node_behind(source), label)
    when_done(source, lambda _: promise.complete(make))
    return promise


def _raise(error: BaseException) -> Any:
    raise error
