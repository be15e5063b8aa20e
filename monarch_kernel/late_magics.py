"""The magics of the kernel load after it has said that it is ready: to import them takes 0.25 s.

Until then the kernel answers what it is, and the other messages wait, each channel in its order.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from monarch_kernel.compat import keep_modules, peeked, runs_code_first

_QUESTIONS = frozenset({"kernel_info_request", "create_subshell_request", "list_subshell_request"})
"""Messages that need no magics: the first question of a front end, and those that make or list threads for cells."""
_ENDS = frozenset({"shutdown_request", "interrupt_request"})
"""Messages of the control channel that end something. On the shell channel they come after its cells."""
_CELL = "execute_request"
_SOON_S = 0.02
"""Seconds after the answer to the first question: front ends hear first that the kernel is idle."""
_AGAIN_S = 1.0
"""Seconds after which a message that still waits asks again."""


class LateMagics:
    """Loads the magics once: after the first answer, or before a message or configured code that may need them.

    Args:
        kernel: the kernel of the notebook.
        load: loads them, in the thread of the notebook, which makes this object.
    """

    def __init__(self, kernel: Any, load: Callable[[], None]) -> None:
        self._kernel = kernel
        self._load = load
        self._thread = threading.current_thread()
        self._begun = False
        """Notebook's thread only."""
        self._loaded: Future[None] = Future()
        """Done by the notebook's thread; any thread looks."""
        self.shell, self.control = MessageGate(self, _QUESTIONS), MessageGate(self, _QUESTIONS | _ENDS)
        """The gate of each channel, used by the thread of that channel."""
        self._stopped: frozenset[str] = frozenset()
        """Ids of the cells that waited at a Stop. Main thread only."""
        if not kernel.is_ready_first or runs_code_first(kernel.parent):
            self._load_now()

    @property
    def is_loaded(self) -> bool:
        """Whether they are loaded."""
        return self._loaded.done()

    def load(self) -> None:
        """Load them once, unless the kernel ends; end the process if that fails. Does nothing in another thread."""
        if threading.current_thread() is not self._thread or self._begun or self._kernel.ending.is_set():
            return
        try:
            self._load_now()
        except BaseException:
            # Front ends see that the kernel has died, and its log says why. It would answer no cell. ipykernel has put
            # a pipe over stderr, of which the end of the process would lose the last lines, but for those of this log.
            self._kernel.log.critical("the kernel ends, since its magics cannot load", exc_info=True)
            os._exit(1)

    def _load_now(self) -> None:
        self._begun = True
        before = set(sys.modules)
        self._load()
        # As if they had been there from the start.
        keep_modules(self._kernel.shell, sys.modules.keys() - before)
        self._loaded.set_result(None)

    def load_soon(self) -> None:
        """Load them once front ends know that the kernel is idle. Does nothing in another thread."""
        if threading.current_thread() is self._thread and not self._begun:
            asyncio.get_running_loop().call_later(_SOON_S, self.load)

    async def wait(self) -> None:
        """Wait until they are loaded, in the event loop of any other thread.

        The notebook's thread loads them, so the wait ends like one for a running cell.
        """
        while not self._loaded.done():
            self._kernel.io_loop.add_callback(self.load)
            with suppress(asyncio.TimeoutError):
                # A message that is given up must not cancel the future of all.
                await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(self._loaded)), _AGAIN_S)

    def stop_waiting(self) -> bool:
        """Note a Stop, if cells wait that it is for, and return whether any does; in the main thread."""
        waiting = frozenset(self.shell.cells)
        self._stopped |= waiting
        return bool(waiting)

    def is_stopped(self, request: Any) -> bool:
        """Return whether the cell of a request waited at a Stop that has reached none yet; in the main thread."""
        return request["header"]["msg_id"] in self._stopped and not request["content"].get("silent")

    def stop_was_heard(self) -> None:
        """Note that a Stop has reached a cell, so that it is not for the others; in the main thread."""
        self._stopped = frozenset()


class MessageGate:
    """Where the messages of a channel wait for the magics, in their order. For the thread of the channel.

    Args:
        magics: they open it.
        passes: the types of messages that do not wait.
    """

    def __init__(self, magics: LateMagics, passes: frozenset[str]) -> None:
        self._magics = magics
        self._passes = passes
        self._lock = asyncio.Lock()
        """Fair, so that messages keep their order."""
        self._waiting = 0
        """Messages that are not through yet, also those that came after the first ones were let through."""
        self.cells: set[str] = set()
        """Ids of the cells among them, but for those of subshells. Other threads copy it, in one step."""

    async def admit(self, kernel: Any, message: Any) -> None:
        """Return when a raw message may be handled."""
        if self._magics.is_loaded and not self._waiting:
            return
        header, _ = peeked(kernel, message)
        kind = header.get("msg_type", "")
        if kind in self._passes:
            return
        self._waiting += 1
        if kind == _CELL and header.get("subshell_id") is None:
            self.cells.add(header["msg_id"])
        try:
            async with self._lock:
                await self._magics.wait()
        finally:
            self._waiting -= 1
            self.cells.discard(header.get("msg_id", ""))
