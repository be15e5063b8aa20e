"""Futures: what will be there once the ranks have answered. Waited for by a thread, or awaited by an event loop."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Generator
from contextvars import ContextVar, copy_context
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from monarch.exceptions import CallTimeoutError

if TYPE_CHECKING:
    from monarch._actors.runtime import Runtime
    from monarch._procs.pump import Turn

R = TypeVar("R")
S = TypeVar("S")

judging: ContextVar[bool] = ContextVar("monarch_judging", default=False)
"""Whether what runs here judges or heals a mesh, and so must not wait for the end of that."""

_PENDING: Any = object()


class Future(Generic[R]):
    """The result of a call, which is under way already: a future that nobody waits for takes nothing back.

    It can be read any number of times, from any thread or event loop, and it can be awaited.
    """

    __slots__ = ("__weakref__", "_callbacks", "_error", "_lock", "_runtime", "_value", "done", "label", "thread")

    def __init__(self, runtime: Runtime, label: str = "") -> None:
        self._runtime = runtime
        self.label = label
        """What is waited for, as errors say it."""
        self.done = False
        self.thread: Turn | None = None
        self._callbacks: list[Callable[[Future[R]], None]] | None = None
        self._value: Any = _PENDING
        self._error: BaseException | None = None
        self._lock = runtime.future_lock

    # Waiting

    def get(self, timeout: float | None = None) -> R:
        """Waits for the result and returns it.

        Args:
            timeout: seconds to wait at most; None waits as long as it takes.

        Raises:
            CallTimeoutError: the time ran out. The call goes on, and a later ``get`` can still have its result.
            ActorError: the endpoint raised.
            DeviceMeshError: a process or actor that was to answer has died or was stopped.
            DeadlockError: what is waited for waits for this actor.
            ValueError: the timeout is negative or no number.
        """
        if timeout is not None and not (timeout >= 0 and math.isfinite(timeout)):
            raise ValueError(f"timeout must be a number of seconds that is not negative, not {timeout!r}")
        if not self.done and not self._runtime.wait(self, timeout):
            raise CallTimeoutError(
                f"{self.label or 'the call'} has not finished within {timeout:g} s{self._missing()}; "
                f"it goes on, and get() can be called again"
            )
        if self._value is _PENDING and self._runtime.unshown:
            # What the call has printed is shown before its result is read.
            self._runtime.await_shown()
        return self._outcome()

    def result(self, timeout: float | None = None) -> R:
        """The same as ``get``."""
        return self.get(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Waits, and returns the error that ``get`` would raise, or None. CallTimeoutError is raised."""
        try:
            self.get(timeout)
        except BaseException as error:
            if not self.done:
                raise
            return error
        return None

    def __await__(self) -> Generator[Any, None, R]:
        if not self.done:
            yield from self.as_asyncio().__await__()
        return self._outcome()

    def as_asyncio(self) -> asyncio.Future[R]:
        """A future of the running event loop with the same outcome; cancelling it does not cancel the call.

        Raises:
            RuntimeError: no event loop runs in this thread.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[R] = loop.create_future()

        def settle() -> None:
            # Cancelled, or told that it waits in a circle.
            if future.done():
                return
            try:
                future.set_result(self._outcome())
            except StopIteration as error:
                future.set_exception(RuntimeError(f"the call raised StopIteration: {error}"))
            except BaseException as error:
                future.set_exception(error)

        def arrived(_: Future[R]) -> None:
            try:
                loop.call_soon_threadsafe(settle)
            except RuntimeError:
                # The loop was closed meanwhile; nobody is there to be told.
                pass

        self.add_done_callback(arrived)
        self._runtime.awaited(self, future)
        return future

    def add_done_callback(self, callback: Callable[[Future[R]], None]) -> None:
        """Has a function called once the future is done, at once if it is. It must not block."""
        with self._lock:
            if not self.done:
                if self._callbacks is None:
                    self._callbacks = []
                self._callbacks.append(callback)
                callback = _nothing
        if callback is _nothing:
            # Nobody waits in the way that would receive the answer, so the background does.
            self._runtime.pump.background()
        else:
            callback(self)

    # Completing

    def _complete(self) -> None:
        """Marks it done; by the thread that has what completes it."""
        with self._lock:
            self.done = True
            callbacks, self._callbacks = self._callbacks, None
        self._runtime.pump.notify(self)
        for callback in callbacks or ():
            callback(self)

    def _outcome(self) -> R:
        if self._value is _PENDING and self._error is None:
            with self._runtime.outcome_lock:
                if self._value is _PENDING and self._error is None:
                    try:
                        self._value = self._make()
                    except BaseException as error:
                        self._error = error
        if self._error is not None:
            # A traceback that grows with each get would show frames of earlier ones.
            raise self._error.with_traceback(None)
        return self._value

    def _make(self) -> R:
        """The result, made once in the thread that reads it first; or its error, raised."""
        raise NotImplementedError

    def _missing(self) -> str:
        return ""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.label or 'a call'}: {'done' if self.done else 'pending'}>"


def _nothing(_: Any) -> None:
    pass


class Promise(Future[R]):
    """A future that this process completes by itself."""

    __slots__ = ("_maker",)

    def __init__(self, runtime: Runtime, label: str = "") -> None:
        super().__init__(runtime, label)
        self._maker: Callable[[], R] | None = None

    def complete(self, make: Callable[[], R]) -> None:
        """Its result is what this returns, or raises, when it is read."""
        if not self.done:
            self._maker = make
            self._complete()

    def _make(self) -> R:
        assert self._maker is not None
        maker, self._maker = self._maker, None
        return maker()


class Ready(Future[R]):
    """A future that is done from the beginning."""

    __slots__ = ()

    def __init__(self, runtime: Runtime, label: str, value: Any, error: BaseException | None = None) -> None:
        super().__init__(runtime, label)
        self._value, self._error = value, error
        self.done = True


def in_thread(runtime: Runtime, label: str, work: Callable[[], R]) -> Promise[R]:
    """A future of what a function returns that waits for other futures, in a thread of its own."""
    promise: Promise[R] = Promise(runtime, label)
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

    threading.Thread(target=run, name=f"monarch-{label[:20]}", daemon=True).start()
    return promise


def to_its_end(runtime: Runtime, label: str, work: Callable[[], R]) -> R:
    """Does what must not be left half done: an interrupt of who waits for it here does not reach it."""
    # It is done on behalf of the same actor.
    here = copy_context()
    return in_thread(runtime, label, lambda: here.run(work)).get()


def then(source: Future[S], label: str, make: Callable[[], R]) -> Promise[R]:
    """A future that is done when another is; its result is what the function then returns or raises."""
    promise: Promise[R] = Promise(source._runtime, label)  # pyright: ignore[reportPrivateUsage]
    source.add_done_callback(lambda _: promise.complete(make))
    return promise


def _raise(error: BaseException) -> Any:
    raise error
