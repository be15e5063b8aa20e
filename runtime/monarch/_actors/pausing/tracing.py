"""Breakpoints and steps of a thread of a rank, by a trace function that exists only while there are any.

With breakpoints, only functions that have one are traced line by line; others cost one look as they are called. A step
traces the functions of the user that it goes through. Code of this package is never stopped in.
"""

from __future__ import annotations

import dis
import inspect
import re
import sys
from collections.abc import Callable, Sequence
from types import CodeType, FrameType, TracebackType
from typing import Any, NamedTuple

from monarch._actors.pausing.points import RAISED, RankBreakpoint, RankBreakpoints, describe_error, enters, lines_of
from monarch._core.places import is_ours, is_users
from monarch._python.thread_trace import may_trace

BREAKPOINT, STEP, ERROR = "breakpoint", "step", "exception"
NEXT, INTO, UNTIL, FINISH, OUT = "next", "step", "until", "finish", "out"
_MOST = 5000
"""Functions whose breakpoints are remembered."""
_SUSPENDS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_LONGEST = 80
"""Characters that are shown of a value."""
_LONGEST_ERROR = 300
"""Characters that are shown of the text of an error."""
_IN_CPP = re.compile(r"\[\S+\.(?:cc|cpp|cu|h|hpp):\d+\]\s*")
"""A place in the source of torch or gloo, in the text of an error."""
_PASSING = (KeyboardInterrupt, SystemExit, GeneratorExit, StopIteration, StopAsyncIteration)
"""Errors that code raises as a matter of course, or that end it."""


class StopReason(NamedTuple):
    """Why a rank has stopped by itself."""

    kind: str
    """BREAKPOINT, STEP or ERROR."""
    text: str
    """For people; may be empty."""
    error: BaseException | None = None
    """Of ERROR; as long as the rank stands there."""
    trace: TracebackType | None = None
    """Its frames so far, which it may not have itself yet."""


class StepState(NamedTuple):
    """The way of a resumed rank until it stops again."""

    how: str
    """NEXT, INTO, UNTIL, FINISH (to the end of the function) or OUT (to the line that has called it)."""
    line: int = 0
    """For UNTIL: stop from this line on; 0 for any line below the current one."""


class Tracer:
    """Stops a thread at breakpoints and at the ends of steps. Used by that thread only.

    Args:
        points: the breakpoints of the process.
        reached: called at such a place, with the frame and the reason; it returns when the code may continue, and may
            raise, as the line itself may.
        over: called when a step ends without a stop, since its call has ended.
        busy: tells whether calls run.
        canceled: returns how often steps have been canceled.
    """

    def __init__(
        self,
        points: RankBreakpoints,
        reached: Callable[[FrameType, StopReason], object],
        over: Callable[[], object],
        busy: Callable[[], bool],
        canceled: Callable[[], int],
    ) -> None:
        self._canceled, self._before = canceled, 0
        """How often steps have been canceled, and that as the step has begun."""
        self._points, self._reached, self._over, self._busy = points, reached, over, busy
        self._used: tuple[RankBreakpoint, ...] = ()
        """The breakpoints that the trace function knows."""
        self._raised = False
        """Whether it stops where errors are raised."""
        self._known: dict[int, tuple[CodeType, dict[int, tuple[RankBreakpoint, ...]], tuple[RankBreakpoint, ...]]] = {}
        """By identity of a function's code: the code, its breakpoints by line, and those at its beginning."""
        self._step: StepState | None = None
        self._frame: FrameType | None = None
        """Of a step: the frame in which it ends; None for any."""
        self._line = 0
        """Of a step: the first line in that frame at which it ends."""
        self._begun = "", 0
        """Of a step: the file and line in which it has begun."""
        self._left: FrameType | None = None
        """The frame whose return a step has stopped at, until the next step."""
        self._traced: list[FrameType] = []
        """The frames that a step traces, besides those that it enters."""

    def is_own(self, trace: Any) -> bool:
        """Return whether a trace function is this one."""
        return trace == self._call

    def settle(self, frame: FrameType) -> None:
        """Begin or end tracing, as breakpoints want; with the innermost frame of the thread."""
        if self._used is not self._points.now:
            self._used, self._known = self._points.now, {}
            self._raised = any(each.kind == RAISED for each in self._used)
            for each in _outward(frame):
                if is_users(each) and self._keeps(each):
                    each.f_trace, each.f_trace_lines = self._local, True
        self._switch()

    def begin(self, frame: FrameType, step: StepState) -> None:
        """Begin a step from a frame that is paused."""
        # The frame that is shown: libraries that it has called are not stepped through.
        users = next((each for each in _outward(frame) if is_users(each)), frame)
        self._step, self._before = step, self._canceled()
        self._line, self._begun = 0, (users.f_code.co_filename, users.f_lineno)
        if step.how == OUT:
            self._begin_out(users)
            return
        self._frame = None if step.how == INTO else users
        if step.how == UNTIL:
            self._line = step.line or users.f_lineno + 1
        self._trace(frame)
        left, self._left = self._left, None
        if left is users and step.how != INTO and users.f_code.co_flags & _SUSPENDS:
            # Its return is not seen again. Of a function, its callers are traced.
            self._end_in_caller(users)
        self._switch()

    def _begin_out(self, frame: FrameType) -> None:
        """Begin a step that ends in the line that has called this function; without one, it has no end."""
        outer = next((each for each in _outward(frame.f_back) if is_users(each)), None)
        if outer is None:
            self.end()
            return
        self._step, self._frame = StepState(NEXT), outer
        self._trace(outer)
        self._switch()

    def _trace(self, frame: FrameType) -> None:
        for each in _outward(frame):
            if is_users(each):
                each.f_trace, each.f_trace_lines = self._local, True
                self._traced.append(each)

    def _keeps(self, frame: FrameType) -> bool:
        """Return whether a frame is traced for a breakpoint."""
        return bool(self._used) and (self._raised or bool(self._lines(frame)))

    def end(self) -> None:
        """End a step."""
        if self._step is not None:
            self._forget()
            self._switch()
            self._over()

    def _forget(self) -> None:
        self._step = self._frame = None
        for each in self._traced:
            if not self._keeps(each):
                each.f_trace = None
        self._traced = []

    def _switch(self) -> None:
        """Install the trace function, or remove it; never in place of another debugger's."""
        wanted = bool(self._used or self._step is not None)
        present = sys.gettrace()
        if wanted and present is None and may_trace():
            sys.settrace(self._call)
        elif not wanted and self.is_own(present):
            sys.settrace(None)

    # Trace functions

    def _call(self, frame: FrameType, event: str, _: Any) -> Any:
        """Look at a function that is called."""
        if self._used is not self._points.now:
            self.settle(frame)
        step = self._step
        if step is not None and not self._busy():
            self.end()
            return None
        if step is not None and self._before != self._canceled():
            self.end()
            step = None
        known = self._known.get(id(frame.f_code))
        if known is None:
            known = self._remember(frame)
        _, lines, first = known
        met = self._met(first, frame) if first else None
        if met is not None:
            return self._at_beginning(met)
        if lines:
            return self._local
        if not (self._raised or step is not None) or not is_users(frame):
            return None
        # In a step over a function, only its callers are of interest.
        if step is not None and (self._frame is None or step.how == INTO):
            return self._local
        if not self._raised:
            return None
        # Of a function without breakpoints, only its errors.
        frame.f_trace_lines = False
        return self._local

    def _at_beginning(self, point: RankBreakpoint) -> Callable[[FrameType, str, Any], Any]:
        """Return a trace function that stops at the first line of a function that has a breakpoint."""

        def first(frame: FrameType, event: str, _: Any) -> Any:
            if event != "line":
                return first
            self._stop(frame, StopReason(BREAKPOINT, self._why(point, frame)))
            return self._local

        return first

    def _local(self, frame: FrameType, event: str, arg: Any) -> Any:
        """Look at a line of a function that is traced, at its end, or at an error in it."""
        if self._step is not None and self._before != self._canceled():
            self.end()
        if event == "line":
            points = self._lines(frame).get(frame.f_lineno, ()) if self._used else ()
            point = self._met(points, frame) if points else None
            if point is not None:
                self._stop(frame, StopReason(BREAKPOINT, self._why(point, frame)))
            elif self._step is not None and self._is_end(frame):
                self._stop(frame, StopReason(STEP, ""))
        elif event == "return":
            self._returns(frame, arg)
        elif event == "exception":
            if self._step is not None and issubclass(arg[0], (KeyboardInterrupt, SystemExit)):
                # Code that handles it must run on.
                self.end()
            elif self._raised and not issubclass(arg[0], _PASSING) and _is_new(arg[2]):
                self._stop(frame, StopReason(ERROR, describe(arg[1]), arg[1], arg[2]))
        return self._local

    def _is_end(self, frame: FrameType) -> bool:
        step = self._step
        if step is None or step.how == FINISH:
            return False
        if self._frame is None:
            # The last expression of a cell is code of its own, after what notes its line.
            is_next = frame.f_code.co_name == "<module>" and self._begun != (frame.f_code.co_filename, frame.f_lineno)
            return step.how == INTO or is_next
        if frame is self._frame:
            return frame.f_lineno >= self._line
        # A step from the end of a function has not seen its return.
        return not self._frame.f_code.co_flags & _SUSPENDS and any(each is frame for each in self._traced)

    def _returns(self, frame: FrameType, value: Any) -> None:
        step = self._step
        if step is None or frame is not self._frame:
            return
        is_coroutine = bool(frame.f_code.co_flags & inspect.CO_COROUTINE)
        if _suspends(frame) and (is_coroutine or step.how != FINISH):
            # The step resumes with the rank.
            return
        if step.how == FINISH:
            self._left = None if _suspends(frame) else frame
            self._stop(frame, StopReason(STEP, f"returns {_shown(value)}"))
            return
        self._end_in_caller(frame)

    def _end_in_caller(self, frame: FrameType) -> None:
        """Have the step end in the caller of a frame that returns; without one, in the next part of the cell."""
        is_coroutine = bool(frame.f_code.co_flags & inspect.CO_COROUTINE)
        callers = _outward(frame.f_back)
        # A task has no caller: the step ends in what continues, such as the task that has awaited it.
        is_task = is_coroutine and not any(each.f_code.co_flags & inspect.CO_COROUTINE for each in callers)
        self._frame = None if is_task else next((each for each in callers if is_users(each)), None)
        self._line = 0
        self._step = StepState(INTO if is_task else NEXT)

    def _stop(self, frame: FrameType, stop: StopReason) -> None:
        self._forget()
        self._reached(frame, stop)
        self._switch()

    # Breakpoints

    def _lines(self, frame: FrameType) -> dict[int, tuple[RankBreakpoint, ...]]:
        return (self._known.get(id(frame.f_code)) or self._remember(frame))[1]

    def _remember(
        self, frame: FrameType
    ) -> tuple[CodeType, dict[int, tuple[RankBreakpoint, ...]], tuple[RankBreakpoint, ...]]:
        if len(self._known) > _MOST:
            self._known = {}
        code = frame.f_code
        lines: dict[int, tuple[RankBreakpoint, ...]] = {}
        first: tuple[RankBreakpoint, ...] = ()
        if self._used and not is_ours(frame):
            lines = lines_of(self._used, code)
            first = tuple(each for each in self._used if enters(each, frame))
        # The code is kept, so that no other one gets its identity.
        known = self._known[id(code)] = code, lines, first
        return known

    def _met(self, points: Sequence[RankBreakpoint], frame: FrameType) -> RankBreakpoint | None:
        """Return the first breakpoint of a place that stops there; all of them count, and print their messages."""
        met = [each for each in points if self._is_met(each, frame)]
        return met[0] if met else None

    def _is_met(self, point: RankBreakpoint, frame: FrameType) -> bool:
        try:
            met = point.condition is None or bool(eval(point.condition, frame.f_globals, frame.f_locals))
        except KeyboardInterrupt:
            # Stop means the code too.
            raise
        except BaseException:
            # As in pdb: stopped at rather than missed. SystemExit is of the condition, not of the code.
            met = True
        if not met or not point.counts():
            return False
        if point.message:
            print(point.text(frame))
        return not point.message

    def _why(self, point: RankBreakpoint, frame: FrameType) -> str:
        number = f" {point.number}" if point.number else ""
        return f"breakpoint{number}{describe_error(point, frame)}"


def describe(error: BaseException) -> str:
    """Return the type and text of an error in one line, whatever its own code does; without the stack in C++ code."""
    try:
        text = " ".join(_IN_CPP.sub("", str(error).partition("\nException raised from ")[0]).split())
    except Exception:
        text = ""
    text = text if len(text) <= _LONGEST_ERROR else f"{text[: _LONGEST_ERROR - 1]}…"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _is_new(trace: TracebackType | None) -> bool:
    """Return whether an error has been raised here, or in a library that is called here, and passed no user code."""
    inner = trace.tb_next if trace is not None else None
    while inner is not None:
        if is_users(inner.tb_frame):
            return False
        inner = inner.tb_next
    return True


def _suspends(frame: FrameType) -> bool:
    """Return whether a frame that is left is a generator or coroutine that may be continued, or has raised."""
    code = frame.f_code
    if not code.co_flags & _SUSPENDS:
        return False
    name = dis.opname[code.co_code[frame.f_lasti]]
    return name not in ("RETURN_VALUE", "RETURN_CONST")


def _outward(frame: FrameType | None) -> Sequence[FrameType]:
    found: list[FrameType] = []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found


def _shown(value: Any) -> str:
    """Return plain values as text, and of others the type: their own code is not run."""
    text = repr(value) if type(value) in (int, float, bool, str, bytes, type(None)) else f"a {type(value).__name__}"
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
