"""The ranks that stand, as a front end has been told, and what it is told when that changes. Control thread only.

JupyterLab shows one thread at a time, that of the last ``stopped`` event, and clears its view at any ``continued``
event. So it is told of one rank; of the next one when that has continued, or of another when somebody asks for it.
Other front ends are told of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from monarch._kernel_api import StoppedRank, split_proc, stops
from monarch_kernel.dap.ids import Ids
from monarch_kernel.dap.protocol import EXTRA, Message
from monarch_kernel.debug.spawned import extra, title

_REASONS = {"breakpoint": "breakpoint", "step": "step", "exception": "exception"}
Emit = Callable[[str, Message], object]


class Stand(NamedTuple):
    """Where a rank stands."""

    token: Any
    """Another one for each stop."""
    reason: str
    text: str
    parked: bool
    """Whether it only waits for another rank."""


class StoppedRanks:
    """The ranks that stand in a session.

    Args:
        ids: the numbers of the session.
        emit: sends an event, by its name and body.
        went_on: called with the process of a rank that has continued.
    """

    def __init__(self, ids: Ids, emit: Emit, went_on: Callable[[str], object]) -> None:
        self._ids = ids
        self._emit = emit
        self._went_on = went_on
        self.one_at_a_time = False
        """Whether the front end shows one thread."""
        self.focus: str | None = None
        """The rank that such a front end shows; None for a thread of the notebook, or nothing."""
        self.now: dict[str, Stand] = {}
        """By process, as the front end knows them, in the order in which they have stopped."""
        self._stepping: dict[str, int] = {}
        """The ranks in a step that the front end has asked for, with their stops until then."""

    def threads(self) -> list[int]:
        """Return the threads of the ranks that a front end should know as stopped, the one that it shows first."""
        shown = [proc for proc, stand in self.now.items() if not stand.parked]
        shown.sort(key=lambda proc: proc != self.focus)
        return [self._ids.thread(proc) for proc in (shown[:1] if self.one_at_a_time else shown)]

    def refresh(self) -> None:
        """Look where ranks stand, and tell the front end of changes."""
        # First, since a stop is noted before it is counted.
        turns = dict(stops().turns)
        found = _found()
        for proc in [proc for proc, stand in self.now.items() if _token(found.get(proc)) is not stand.token]:
            parked = self.now.pop(proc).parked
            self._went_on(proc)
            if proc not in found:
                self._tell_gone(proc, parked)
        new = [proc for proc in found if proc not in self.now]
        for proc in sorted(new, key=split_proc):
            self.now[proc] = found[proc]
            self._stepping.pop(proc, None)
            self._tell_stopped(proc)
        for proc, before in list(self._stepping.items()):
            if turns.get(proc, 0) != before:
                # The call of the rank has ended, or the rank has died.
                del self._stepping[proc]
        self._look_on()

    def step(self, proc: str) -> None:
        """Note that a rank is about to step; its end is told whether it stops again or not."""
        self._stepping[proc] = stops().turns.get(proc, 0)

    def show(self, proc: str) -> None:
        """Make a front end that shows one thread show this rank."""
        self.focus = proc
        stand = self.now[proc]
        self._emit("stopped", self._body(proc, stand))

    def select(self, proc: str) -> None:
        """Show a rank that a person has selected elsewhere, if it stands and the front end shows one thread."""
        if self.one_at_a_time and proc in self.now and proc != self.focus:
            self.show(proc)

    def show_notebook(self) -> None:
        """Note that the front end shows a thread of the notebook, which has stopped."""
        self.focus = None

    def forget(self) -> None:
        """Forget all, at the end of a session."""
        self.now, self._stepping, self.focus = {}, {}, None

    def _tell_stopped(self, proc: str) -> None:
        stand = self.now[proc]
        if not self.one_at_a_time:
            # A front end that shows all threads stays at the one that a person looks at.
            others = any(not each.parked for other, each in self.now.items() if other != proc)
            hint = {"preserveFocusHint": True} if stand.parked or (others and stand.reason != "step") else {}
            self._emit("stopped", {**self._body(proc, stand), **hint})
        elif not stand.parked and self.focus in (None, proc):
            self.show(proc)

    def _tell_gone(self, proc: str, parked: bool) -> None:
        if not self.one_at_a_time or proc == self.focus:
            self._emit("continued", {"threadId": self._ids.thread(proc), "allThreadsContinued": False})

    def _look_on(self) -> None:
        """Have a front end that shows one thread show the next rank, if the one that it has shown is gone."""
        focus = self.focus
        if focus is None or focus in self.now or focus in self._stepping:
            return
        waiting = [proc for proc, stand in self.now.items() if not stand.parked]
        self.focus = None
        if waiting:
            self.show(min(waiting, key=split_proc))

    def _body(self, proc: str, stand: Stand) -> Message:
        text = f"{title(proc)}: {stand.text}" if stand.text else title(proc)
        return {
            "reason": stand.reason,
            "description": text,
            "text": stand.text,
            "threadId": self._ids.thread(proc),
            "allThreadsStopped": False,
            EXTRA: extra(proc),
        }


def _token(stand: Stand | None) -> Any:
    return stand.token if stand is not None else None


def _found() -> dict[str, Stand]:
    """Return where ranks stand now."""
    found: dict[str, Stand] = {}
    for proc, paused in list(stops().paused.items()):
        text = "paused while another rank is at a breakpoint" if paused[1] else "paused"
        found[proc] = Stand(paused, "pause", text, paused[1])
    for proc, stopped in list(stops().now.items()):
        found[proc] = _stand_of(stopped)
    return found


def _stand_of(stopped: StoppedRank) -> Stand:
    return Stand(stopped, _REASONS.get(stopped.kind, "breakpoint"), stopped.position.reason, False)
