"""The line of a running cell that says which ranks still run, from its second second on; it disappears at the end."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any

from monarch._kernel_api import Gather, describe_ranks, duration_text, split_proc
from monarch_kernel.cells.calls import Calls

PATIENCE = 1.0
"""Seconds that a call takes before the line appears, and between two updates."""
MARK = "monarch_waiting"
"""Metadata of these displays, which are no results."""
_STYLE = "font-size:85%;color:#888"

Send = Callable[[str, dict[str, Any], Any], None]
"""Sends a display: the kind of the message, its content, the request of the cell."""


class WaitingLine:
    """One display for each running cell that waits for ranks.

    Args:
        calls: of the notebook.
        send: sends a display.
    """

    def __init__(self, calls: Calls, send: Send) -> None:
        self._calls = calls
        self._send = send
        # Guarded by _lock, which is held while a line is sent: the last message of a display empties it.
        self._lock = Lock()
        self._shown: dict[str, tuple[str, str]] = {}
        """By cell: display id and text."""

    def update(self, cell: str, parent: Any, waiting: Sequence[Gather[Any]], is_running: Callable[[], bool]) -> None:
        """Show what a cell waits for; nothing for calls that are quick.

        Args:
            cell: id of its request.
            parent: its request.
            waiting: its unanswered calls.
            is_running: whether the cell still runs.
        """
        text = self.text([call for call in waiting if call.actor and self._calls.seconds(call) >= PATIENCE])
        with self._lock:
            if text and is_running():
                self._show(cell, parent, text)
            else:
                self._wipe(cell, parent)

    def end(self, cell: str, parent: Any) -> None:
        """Remove the line of a cell that has ended."""
        with self._lock:
            self._wipe(cell, parent)
            self._shown.pop(cell, None)

    def text(self, calls: Sequence[Gather[Any]]) -> str:
        """Describe which ranks have not answered, and for how long."""
        behind = {(each.call.actor, proc) for each in self._calls.ahead(calls) for proc in each.procs}
        several = len({call.mesh for call in calls}) > 1
        return "; ".join(dict.fromkeys(self._of_call(call, behind, several) for call in calls))

    def _of_call(self, call: Gather[Any], behind: set[tuple[str, str]], several: bool) -> str:
        left = [peer.proc for peer in call.waits_for()]
        since = _since(self._calls.seconds(call))
        waiting = {proc for proc in left if (call.actor, proc) in behind}
        groups = [
            (set(left) - waiting, f"running for {since}"),
            (waiting, f"waiting for {since}"),
            ({peer.proc for peer in call.targets} - set(left), "finished"),
        ]
        parts = [f"{describe_ranks(split_proc(proc)[1] for proc in procs)} {what}" for procs, what in groups if procs]
        return (f"{call.mesh}: " if several else "") + ", ".join(parts)

    def _show(self, cell: str, parent: Any, text: str) -> None:
        name, before = self._shown.get(cell, ("", ""))
        if text == before:
            return
        kind = "update_display_data" if name else "display_data"
        name = name or secrets.token_hex(8)
        self._shown[cell] = name, text
        # An empty bundle takes no room in JupyterLab, an empty text a line.
        data = {"text/plain": text, "text/html": f"<span style='{_STYLE}'>{text}</span>"} if text else {}
        self._send(kind, {"data": data, "metadata": {MARK: True}, "transient": {"display_id": name}}, parent)

    def _wipe(self, cell: str, parent: Any) -> None:
        if cell in self._shown:
            self._show(cell, parent, "")


def _since(seconds: float) -> str:
    """Return how long ago something began, and when: a front end that is closed meanwhile keeps an old state.

    The text changes less often the longer it is.
    """
    step = 1 if seconds < 60 else 10 if seconds < 3600 else 60
    begun = time.strftime("%H:%M:%S", time.localtime(time.time() - seconds))
    return f"{duration_text(seconds // step * step)} (since {begun})"
