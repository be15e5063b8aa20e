"""The line of a running cell that says which ranks still run, from its second second on; it disappears at the end."""

from __future__ import annotations

import html
import secrets
import time
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any

from monarch._kernel_api import Gather, describe_ranks, duration_text, split_proc, stops
from monarch.debug import Level
from monarch_kernel.calls.record import CallRecord

PATIENCE = 1.0
"""Seconds that a call takes before the line appears, and between two updates."""
MARK = "monarch_waiting"
"""Metadata of these displays, which are no results."""
_STYLE = "font-size:85%;color:#888;white-space:pre-wrap"
_WARNING = "color:var(--jp-warn-color0,var(--vscode-editorWarning-foreground,#b26a00))"
_WARNED = tuple(f"{level.value}: " for level in (Level.STUCK, Level.WAITING))
"""Beginnings of the lines that are about a wait and its cause."""

Send = Callable[[str, dict[str, Any], Any], None]
"""Sends a display: the kind of the message, its content, the request of the cell."""


class WaitingLine:
    """One display for each running cell that waits for ranks.

    Args:
        calls: the calls of the notebook.
        positions: describes where the ranks of a call are, of an age in seconds and a title.
        reasons: describes why the ranks of calls wait, given their age in seconds and a title.
        send: sends a display.
    """

    def __init__(
        self,
        calls: CallRecord,
        positions: Callable[[Gather[Any], float, str], str],
        reasons: Callable[[Sequence[Gather[Any]], Callable[[Gather[Any]], float], str], str],
        send: Send,
    ) -> None:
        self._calls = calls
        self._positions = positions
        self._reasons = reasons
        self._send = send
        # Guarded by _lock, which is held while a line is sent: the last message of a display empties it.
        self._lock = Lock()
        self._shown: dict[str, tuple[str, str]] = {}
        """By cell: display id and text."""

    def update(
        self,
        cell: str,
        parent: Any,
        waiting: Sequence[Gather[Any]],
        is_running: Callable[[], bool],
        note: str = "",
    ) -> None:
        """Show what a cell waits for; nothing for calls that are quick.

        Args:
            cell: id of its request.
            parent: its request.
            waiting: its unanswered calls.
            is_running: whether the cell still runs.
            note: the line of a cell that waits for no rank.
        """
        text = "\n".join(self.lines(waiting)) or note
        with self._lock:
            if text and is_running():
                self._show(cell, parent, text)
            else:
                self._wipe(cell, parent)

    def end(self, cell: str, parent: Any) -> str:
        """Remove the line of a cell that has ended; return the id of its display, which is empty, or nothing."""
        with self._lock:
            self._wipe(cell, parent)
            return self._shown.pop(cell, ("", ""))[0]

    def again(self, cell: str, parent: Any) -> None:
        """Show the line of a cell again, whose output was cleared."""
        with self._lock:
            _, text = self._shown.pop(cell, ("", ""))
            if text:
                self._show(cell, parent, text)

    def lines(self, waiting: Sequence[Gather[Any]]) -> list[str]:
        """Describe which ranks a cell waits for, in one line, and then why; nothing for calls that are quick."""
        calls = [call for call in waiting if call.actor and not self._calls.is_setup(call)]
        calls = [call for call in calls if self._calls.seconds(call) >= PATIENCE]
        if not calls:
            return []
        going = [call for call in calls if not self._calls.is_stopping(call)]
        reasons = self._reasons(going, self._calls.seconds, self._calls.title(calls[0]))
        return [self.text(calls, not reasons), *reasons.splitlines()]

    def text(self, calls: Sequence[Gather[Any]], with_places: bool = True) -> str:
        """Describe which ranks have not answered, and for how long."""
        behind = {(each.call.actor, proc) for each in self._calls.ahead(calls) for proc in each.procs}
        several = len({call.mesh for call in calls}) > 1
        return "; ".join(dict.fromkeys(self._of_call(call, behind, several, with_places) for call in calls))

    def _of_call(self, call: Gather[Any], behind: set[tuple[str, str]], several: bool, with_places: bool) -> str:
        left = [peer.proc for peer in call.waits_for()]
        since = _since(self._calls.seconds(call))
        waiting = {proc for proc in left if (call.actor, proc) in behind}
        starting = {peer.proc for peer in call.waits_for() if peer.starting} - waiting
        paused = _paused(set(left) - waiting - starting)
        groups = [
            (starting, f"starting for {since}"),
            (set(left) - waiting - starting - paused, f"running for {since}"),
            (paused, f"paused for {since}" if len(paused) == len(left) else "paused"),
            (waiting, f"waiting for {since}"),
            ({peer.proc for peer in call.targets} - set(left), "finished"),
        ]
        parts = [f"{describe_ranks(split_proc(proc)[1] for proc in procs)} {what}" for procs, what in groups if procs]
        where = ""
        if with_places and left and not waiting:
            where = self._positions(call, self._calls.seconds(call), self._calls.title(call))
        return (f"{call.mesh}: " if several else "") + ", ".join(parts) + (f"; {where}" if where else "")

    def _show(self, cell: str, parent: Any, text: str) -> None:
        name, before = self._shown.get(cell, ("", ""))
        if text == before:
            return
        kind = "update_display_data" if name else "display_data"
        name = name or secrets.token_hex(8)
        self._shown[cell] = name, text
        # An empty bundle takes no room in JupyterLab, an empty text a line.
        data = {"text/plain": text, "text/html": f"<span style='{_STYLE}'>{_marked(text)}</span>"} if text else {}
        self._send(kind, {"data": data, "metadata": {MARK: True}, "transient": {"display_id": name}}, parent)

    def _wipe(self, cell: str, parent: Any) -> None:
        if cell in self._shown:
            self._show(cell, parent, "")


def _marked(text: str) -> str:
    """Return lines as HTML, in which those about a wait stand out."""
    lines = [
        f"<b style='{_WARNING}'>{html.escape(line)}</b>" if line.startswith(_WARNED) else html.escape(line)
        for line in text.split("\n")
    ]
    return "\n".join(lines)


def _paused(procs: set[str]) -> set[str]:
    """Return those of some processes that a debugger or a breakpoint has paused."""
    if not procs:
        return set()
    known = stops()
    parked = {proc for uid in {split_proc(proc)[0] for proc in procs} for proc in known.parked(uid)}
    return {proc for proc in procs if proc in known.now or proc in known.by_hand or proc in parked}


def _since(seconds: float) -> str:
    """Return how long ago something began, and when: a front end that is closed meanwhile keeps an old state.

    The text changes less often the longer it is.
    """
    step = 1 if seconds < 60 else 10 if seconds < 3600 else 60
    begun = time.strftime("%H:%M:%S", time.localtime(time.time() - seconds))
    return f"{duration_text(seconds // step * step)} (since {begun})"
