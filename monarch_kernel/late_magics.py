"""The magics of the kernel load after it has said that it is ready: to import them takes as long as ipykernel.

Until then the kernel answers what it is, and the other messages wait.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from monarch_kernel.compat import peeked, runs_code_first

_READY = "kernel_info_request"
"""The question of a front end that waits for the kernel, the first one of each."""
_SOON_S = 0.02
"""Seconds after the answer to it: front ends hear first that the kernel is idle."""


class LateMagics:
    """Loads the magics once: after the first answer, or before a message or a configured cell that may need them.

    Args:
        kernel: the kernel of the notebook.
        load: loads them, in the main thread.
    """

    def __init__(self, kernel: Any, load: Callable[[], None]) -> None:
        self._kernel = kernel
        self._load = load
        self._is_loading = False
        """Main thread only."""
        self._loaded: Future[None] = Future()
        self._gate = asyncio.Lock()
        """Held by the message that waits for them: the others queue behind it. Thread of the shell channel only."""
        if runs_code_first(kernel.parent):
            self.load()

    def load(self) -> None:
        """Load them, unless they are loaded or load; without them the kernel ends. In the main thread."""
        if self._is_loading or threading.current_thread() is not threading.main_thread():
            return
        self._is_loading = True
        try:
            self._load()
        except Exception:
            # Front ends see that it has died, and its output says why. No cell would be answered without them.
            traceback.print_exc(file=sys.__stderr__)
            os._exit(1)
        except BaseException:
            # An interrupt; the next message tries again.
            self._is_loading = False
            raise
        self._loaded.set_result(None)

    def load_soon(self) -> None:
        """Load them once front ends know that the kernel is idle; in the main thread, as it answers the first one."""
        if not self._loaded.done():
            asyncio.get_running_loop().call_later(_SOON_S, self.load)

    async def admit(self, message: Any) -> None:
        """Return when a message on the shell channel may be handled; in the thread of that channel."""
        if self._loaded.done() and not self._gate.locked():
            return
        header, _ = peeked(self._kernel, message)
        if header.get("msg_type") == _READY:
            return
        async with self._gate:
            if not self._loaded.done():
                self._kernel.io_loop.add_callback(self.load)
                await asyncio.wrap_future(self._loaded)
