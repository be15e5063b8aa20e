"""``returns_future``: async functions of the user whose result is a Future, for callers that wait and that await."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Coroutine
from contextvars import Context, copy_context
from typing import Any, ParamSpec, TypeVar

from monarch._node.current import open_node
from monarch._node.future import Future, Promise, in_thread, when_done
from monarch._node.node_like import NodeLike
from monarch.exceptions import ArgumentError

P = ParamSpec("P")
R = TypeVar("R")

_tasks: set[asyncio.Task[None]] = set()
"""An event loop keeps only weak references to them. Single operations only, which are atomic."""


def returns_future(function: Callable[P, Coroutine[Any, Any, R]]) -> Callable[P, Future[R]]:
    """Decorate an async function so that it returns a Future: sync code calls ``get()``, and async code awaits it.

    The function runs once, when the future is first used: as a task of the event loop that awaits it first, or
    with an event loop of its own, in another thread, if a ``get()`` or a callback comes first. It sees the context
    variables and the actor of its caller. A ``get()`` whose timeout expires does not end it.

    Args:
        function: an async function.

    Raises:
        ArgumentError: the function is not async.
    """
    if not inspect.iscoroutinefunction(function):
        name = getattr(function, "__qualname__", repr(function))
        raise ArgumentError(f"returns_future: expected an async function, got {name}; write async def")

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> Future[R]:
        return _Deferred(open_node(), f"{function.__qualname__}()", function(*args, **kwargs))

    return call


class _Deferred(Promise[R]):
    """A future of a coroutine that starts when somebody looks at it."""

    __slots__ = ("_context", "_coroutine")

    def __init__(self, node: NodeLike, label: str, coroutine: Coroutine[Any, Any, R]) -> None:
        super().__init__(node, label)
        self._context: Context = copy_context()
        self._coroutine: Coroutine[Any, Any, R] | None = coroutine
        """None once it runs. Guarded by the lock of futures."""

    def get(self, timeout: float | None = None) -> R:
        self._begin_aside()
        return super().get(timeout)

    def add_done_callback(self, callback: Callable[[Future[R]], None]) -> None:
        self._begin_aside()
        super().add_done_callback(callback)

    def as_asyncio(self) -> asyncio.Future[R]:
        loop = asyncio.get_running_loop()
        coroutine = self._take()
        if coroutine is not None:
            task = self._context.run(loop.create_task, self._run(coroutine))
            _tasks.add(task)
            task.add_done_callback(_tasks.discard)
        return super().as_asyncio()

    def _begin_aside(self) -> None:
        """Run it in another thread, unless it runs already."""
        coroutine = self._take()
        if coroutine is None:
            return

        def run() -> R:
            return self._context.run(asyncio.run, coroutine)

        inner = in_thread(self._node, "returned", run)
        when_done(inner, lambda _: self.complete(inner.get))

    def _take(self) -> Coroutine[Any, Any, R] | None:
        with self._lock:
            coroutine, self._coroutine = self._coroutine, None
        return coroutine

    async def _run(self, coroutine: Coroutine[Any, Any, R]) -> None:
        try:
            value = await coroutine
        except BaseException as error:
            caught = error
            self.complete(lambda: _raise(caught))
            if not isinstance(error, Exception):
                raise
        else:
            self.complete(lambda: value)

    def __del__(self) -> None:
        # Nobody has looked at it, so none of its code runs.
        coroutine = getattr(self, "_coroutine", None)
        if coroutine is not None:
            coroutine.close()


def _raise(error: BaseException) -> Any:
    raise error
