"""Turns on an actor's event loop: endpoints run one at a time, concurrent ones beside any other."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any

from monarch._actors.executors import start_task
from monarch._actors.running import ActorLike
from monarch._python.later import asyncio

if TYPE_CHECKING:
    from monarch._wire.messages import Call


class Turns:
    """The messages of one actor on its event loop.

    A message of a non-concurrent endpoint has the turn until its coroutine ends; the next one waits. A concurrent one
    begins on arrival. Only the loop's thread changes anything; other threads read.
    """

    def __init__(self, mailbox: ActorLike) -> None:
        self._mailbox = mailbox
        self.tasks: dict[asyncio.Task[Any], Call] = {}
        """The messages that have begun."""
        self.waiting: deque[tuple[Call, Sequence[Any]]] = deque()
        """The messages waiting for their turn, in order of arrival."""
        self.call: Call | None = None
        """The message with the turn."""
        self.task: asyncio.Task[Any] | None = None
        """Its task."""
        self.ended = 0
        """How many messages have ended here, or were refused."""

    def start(self, call: Call, more: Sequence[Any]) -> None:
        """Start a message, or queue it for its turn."""
        mailbox = self._mailbox
        if mailbox.is_refused(call):
            self.ended += 1
            return
        if mailbox.is_concurrent(call):
            self._begin(call, more)
        elif self.call is not None:
            self.waiting.append((call, more))
        else:
            self.call = call
            mailbox.since = monotonic()
            self.task = self._begin(call, more)

    def finished(self, call: Call) -> None:
        """End a message and give the next one its turn."""
        if self.call is not call:
            return
        self.call = self.task = None
        while self.waiting and self.call is None:
            self.start(*self.waiting.popleft())

    def cancel(self, src: str, port: int, why: str) -> None:
        """Cancel the running and queued messages of a caller."""
        for task, call in list(self.tasks.items()):
            if call.port == port and call.src == src:
                task.cancel(why)
        self.cancel_queued(src, port, why)

    def cancel_queued(self, src: str, port: int, why: str) -> None:
        """Cancel the messages of a caller that have not begun."""
        for item in list(self.waiting):
            if item[0].port == port and item[0].src == src:
                self.waiting.remove(item)
                self._mailbox.cancelled(item[0], why)

    def has(self, src: str, port: int) -> bool:
        """Return whether a message of a caller runs or waits here; from any thread."""
        # Messages on their way to the loop are in the queue.
        known = (*list(self.tasks.values()), *list(self._mailbox.queue))
        return any(call.port == port and call.src == src for call in known)

    async def drain(self, seconds: float) -> None:
        """Wait until all messages are handled, for at most these seconds."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while self.tasks and (left := deadline - loop.time()) > 0:
            await asyncio.wait(list(self.tasks), timeout=left)

    async def cancel_all(self, seconds: float) -> list[Call]:
        """Cancel the running messages and wait, for at most these seconds; return those that continue."""
        late = dict(self.tasks)
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late, timeout=seconds)
        return [call for task, call in late.items() if not task.done()]

    def _begin(self, call: Call, more: Sequence[Any]) -> asyncio.Task[Any]:
        loop = self._mailbox.executor.loop
        assert loop is not None
        task = start_task(loop, self._mailbox.run_async(call, more))
        self.tasks[task] = call
        self._mailbox.executor.package_tasks.add(task)
        self._mailbox.executor.begun += 1
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        call = self.tasks.pop(task)
        self._mailbox.executor.package_tasks.discard(task)
        self._mailbox.executor.begun -= 1
        self.ended += 1
        if task.cancelled():
            # Before its first step, so that nothing of it has run.
            self._mailbox.cancelled(call, "cancelled")
        self.finished(call)
