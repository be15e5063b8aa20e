"""The event loop of the cells of a rank: it lives as long as the rank, so tasks of a cell continue in later ones."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import threading
from asyncio import tasks
from collections.abc import Coroutine, Generator
from typing import Any

from monarch._notebook.running.pending import CellTasks


class CellLoop:
    """An event loop of the main thread, made when it is first needed; used by that thread alone."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._owner = 0
        """The process that has made it; a fork makes its own."""
        self._pending = CellTasks()

    def make_current(self) -> None:
        """Make ``asyncio.get_event_loop()`` return it, as in a notebook; ``asyncio.run`` of a cell has unset it."""
        if _in_main_thread() and asyncio._get_running_loop() is None:
            asyncio.set_event_loop(self._own())

    def complete(self, awaitable: Any) -> Any:
        """Await something on it, and return its result.

        In other threads, and while a loop runs in this one, a loop of its own is used.

        Raises:
            BaseException: what it raises, without frames of asyncio.
        """
        if not _in_main_thread():
            value, error = asyncio.run(_outcome(awaitable))
        elif asyncio._get_running_loop() is not None:
            with _suspended():
                value, error = asyncio.run(_outcome(awaitable))
        else:
            value, error = self._run(_outcome(awaitable))
        if error is not None:
            try:
                raise error
            finally:
                # Frames of an error hold it.
                del error
        return value

    def tell_pending(self, file: Any) -> None:
        """Say which tasks have been left pending since this was last called."""
        if self._loop is not None and self._owner == os.getpid() and _in_main_thread():
            self._pending.tell(asyncio.all_tasks(self._loop), file)

    def close(self) -> None:
        """Cancel all tasks, let them end, and close the loop."""
        loop, self._loop = self._loop, None
        if loop is None or self._owner != os.getpid() or loop.is_running() or loop.is_closed():
            return
        try:
            late = asyncio.all_tasks(loop)
            for task in late:
                task.cancel()
            if late:
                loop.run_until_complete(asyncio.wait(late))
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            loop.close()

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        loop = self._own()
        asyncio.set_event_loop(loop)
        task = loop.create_task(coroutine)
        try:
            return loop.run_until_complete(task)
        except BaseException as error:
            if task.done():
                raise
            interrupt = error
        # The awaited coroutine is canceled, and runs its finally; tasks beside it continue later.
        task.cancel()
        try:
            with contextlib.suppress(Exception, asyncio.CancelledError):
                canceled = loop.run_until_complete(task)[1]
                if isinstance(canceled, asyncio.CancelledError):
                    # The line that awaited, instead of the loop's own.
                    interrupt = interrupt.with_traceback(canceled.__traceback__)
            raise interrupt
        finally:
            # Frames of an error hold it.
            del interrupt

    def _own(self) -> asyncio.AbstractEventLoop:
        if self._loop is None or self._loop.is_closed() or self._owner != os.getpid():
            self._loop, self._owner = asyncio.new_event_loop(), os.getpid()
            atexit.register(self.close)
        return self._loop


cell_loop = CellLoop()


async def _outcome(awaitable: Any) -> tuple[Any, BaseException | None]:
    try:
        return await awaitable, None
    except BaseException as error:
        return None, error


@contextlib.contextmanager
def _suspended() -> Generator[None]:
    """Let another loop run in this thread during the block, whose loop waits meanwhile."""
    loop = asyncio.get_running_loop()
    task = asyncio.current_task(loop)
    if task is not None:
        tasks._leave_task(loop, task)
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        asyncio._set_running_loop(loop)
        if task is not None:
            tasks._enter_task(loop, task)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
