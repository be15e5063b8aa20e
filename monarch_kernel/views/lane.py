"""Lets messages of views, and questions of a page that opens, pass a cell that runs.

ipykernel queues the messages of a front end behind the running cell, unless the front end knows subshells. Even then it
queues those to a comm that was opened in a cell, as a widget's is. Messages of views need nothing of the notebook's
thread, so a thread of their own handles them.
"""

from __future__ import annotations

import queue
import traceback
from collections.abc import Callable
from typing import Any

from monarch._kernel_api import spawn_thread
from monarch_kernel.compat import deserialized, give_to_comm, open_comm, peeked, publish_status, reply_while_busy
from monarch_kernel.kernel_like import OwnKernel

Handler = Callable[[Any], None]
"""Takes a message; never waits for the notebook."""
_QUESTIONS = ("kernel_info_request", "comm_info_request")
"""Questions of a page before it shows anything."""
_CONTROL = "jupyter.widget.control"
"""The comm target on which a page asks for the states of all widgets."""
_STATES = ("request_states", "request_state")
"""Questions there, and to single widgets."""
_AGAIN = 3
"""Attempts to read the states of widgets, which the running cell may change meanwhile."""


class Lane:
    """The way around the running cell.

    Args:
        kernel: the kernel of the notebook.
    """

    def __init__(self, kernel: OwnKernel) -> None:
        self._kernel = kernel
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._started = False
        """Thread of the shell channel only."""
        self.targets: dict[str, Callable[[str], Handler]] = {}
        """By target, what returns the handler of a new comm. Single operations, as for the next two."""
        self.comms: dict[str, Handler] = {}
        """Handlers of the comms of panels: of messages, and of the end of the comm."""
        self.widgets: dict[str, Handler] = {}
        """Handlers of custom messages to widgets."""

    async def takes(self, message: Any) -> bool:
        """Return whether a message on the shell channel is handled here; called in the thread of the channel."""
        header, content = peeked(self._kernel, message)
        kind = header.get("msg_type", "")
        if kind in _QUESTIONS and self._kernel.running is not None:
            await reply_while_busy(self._kernel, kind, message)
            self._kernel.say_busy()
            return True
        handler = self._handler(kind, content) if kind.startswith("comm_") else None
        if handler is not None:
            _, request = deserialized(self._kernel, message)
            self._post(lambda: self._handle(handler, request))
        return handler is not None

    def _handler(self, kind: str, content: Any) -> Handler | None:
        comm = content.get("comm_id", "")
        if kind == "comm_open":
            return self._opened(comm, content.get("target_name", ""))
        data: Any = content.get("data") or {}
        if kind == "comm_msg" and self._kernel.running is not None and data.get("method") in _STATES:
            return self._tell_states
        if kind == "comm_msg" and comm in self.widgets and data.get("method") == "custom":
            return self.widgets[comm]
        return self.comms.get(comm) if kind in ("comm_msg", "comm_close") else None

    def _opened(self, comm: str, target: str) -> Handler | None:
        """Return what handles the opening of a comm: nothing is left to do, but the next message may come at once."""
        if target == _CONTROL and self._kernel.running is not None:
            return lambda request: open_comm(self._kernel, request)
        opener = self.targets.get(target)
        if opener is None or not comm:
            return None
        self.comms[comm] = opener(comm)
        return lambda request: None

    def _post(self, work: Callable[[], None]) -> None:
        if not self._started:
            self._started = True
            spawn_thread("monarch-lane", self._run)
        self._work.put(work)

    def _run(self) -> None:
        while True:
            self._work.get()()

    def _handle(self, handler: Handler, request: Any) -> None:
        publish_status(self._kernel, "busy", request)
        try:
            handler(request)
        except Exception:
            # A bug must not end the messages of other views.
            traceback.print_exc()
        publish_status(self._kernel, "idle", request)
        self._kernel.say_busy()

    def _tell_states(self, request: Any) -> None:
        """Let widgets tell a page their states, although a cell runs."""
        for left in reversed(range(_AGAIN)):
            try:
                give_to_comm(self._kernel, request)
                return
            except RuntimeError:
                # The cell has changed a table of widgets meanwhile.
                if not left:
                    raise
