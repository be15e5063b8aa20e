"""Statements that run in a frame of a paused rank, in its main thread; see ``%%mesh --in-frame``."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from types import FrameType
from typing import Any

from monarch._actors.pausing.gate import gate
from monarch._node.services.registry import service
from monarch._notebook.looking.at_frame import scope_of, text_of
from monarch._notebook.looking.breaking_off import running
from monarch._notebook.looking.writing import write_back
from monarch._notebook.running.execute import CellResult, run, steps_of
from monarch._notebook.running.marks import prepare
from monarch._notebook.showing.display import Display
from monarch._notebook.showing.streams import printing_for

NOT_PAUSED = "not paused, so no statement can run in its frames; %mesh pause pauses it"
_RESUMED = "resumed before it could run this"


@service("statements.run_here", "threaded")
def run_here(source: str, name: str, level: int, sink: Any, caller: str, typed: str) -> CellResult | str:
    """Service: run statements in a frame of the paused main thread; return the result, or why they have not run.

    Args:
        source: the code.
        name: the name of its frames in tracebacks, such as ``cell [12]``.
        level: the level of the frame: 0 for the innermost one of the user's code, 1 for its caller.
        sink: a Port for what it displays; prints are sent as output of a call that waits there.
        caller: the proc of that port.
        typed: its text as typed, if that has magics.
    """
    statements = _Statements(source, name, level, sink, caller, typed)
    if not gate.do(statements.run):
        return NOT_PAUSED
    statements.done.wait()
    return statements.answer


@dataclass
class _Call:
    """Stands for the call of a mailbox, whose output it is."""

    src: str
    port: int
    method: str = "run"


@dataclass
class _Runner:
    """Stands for the mailbox of an actor."""

    key: str = "in-frame"
    running: None = None


class _Statements:
    """Statements, and what comes of them; written by the main thread, until it is done."""

    def __init__(self, source: str, name: str, level: int, sink: Any, caller: str, typed: str) -> None:
        self._source, self._name, self._level = source, name, level
        self._sink, self._caller, self._typed = sink, caller, typed
        self.answer: CellResult | str = _RESUMED
        self.done = threading.Event()

    def run(self, frame: FrameType | None) -> None:
        """Run them in the main thread, in the frame in which that is paused; None if it has been resumed."""
        try:
            if frame is not None:
                self._run(frame)
        finally:
            self.done.set()

    def _run(self, frame: FrameType) -> None:
        slot = prepare().slot
        line = slot[0]
        running.begin()
        try:
            with printing_for((_Runner(), _Call(self._caller, self._sink.number))):
                self.answer = self._result(frame)
        except LookupError as error:
            self.answer = text_of(error)
        finally:
            slot[0] = line
            broken_off = running.end()
        error = self.answer.error if isinstance(self.answer, CellResult) else None
        if error is not None and error.interrupted:
            if not broken_off:
                # Stop means the paused code too.
                raise KeyboardInterrupt
            # The interrupt has ended the pause.
            gate.asked = True

    def _result(self, frame: FrameType) -> CellResult:
        scope = scope_of(self._level, frame)
        at = scope.frame
        # The variables of a module are those of its frame; a function's are copied, and written back.
        is_module = at is None or at.f_locals is at.f_globals
        names = scope.local if at is None else at.f_globals if is_module else scope.names
        before = dict(names)
        result = run(steps_of(self._source, self._name, names, Display(), self._sink, typed=self._typed, figures=False))
        if at is not None and not is_module:
            write_back(at, self._source, before, names)
        return result
