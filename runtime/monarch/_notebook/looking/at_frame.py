"""Code that runs in a frame of a rank: in the main thread if that is paused, otherwise beside the code that runs."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

from monarch._actors.interrupts import raised
from monarch._actors.pausing.failed import failed
from monarch._actors.pausing.gate import gate
from monarch._debug.frames import users_frames
from monarch._procs.zygote.user_forks import leave_if_forked
from monarch._python.threads import spawn_thread

PATIENCE = 5.0
"""Seconds for what runs in a frame."""
MOST_CALLERS = 1000
LATE = "the expression is still running after 5 s; %mesh interrupt ends it"
_LATE_BESIDE = "the expression is still running after 5 s, alongside the code of the rank"
_BUSY = "an earlier expression is still running here"
RESUMED = "the rank was resumed before it could evaluate this"


class Scope(NamedTuple):
    """The variables that code in a frame sees."""

    names: dict[str, Any]
    """Those of the module, hidden by local ones."""
    local: Any
    """The local ones."""
    frame: FrameType | None
    """None on an idle rank, which has only the variables of its cells."""

    def value_of(self, source: str) -> Any:
        """Return the value of an expression."""
        return eval(compile(source, "<expression>", "eval"), self.names, self.local)


def scope_of(level: int, frame: FrameType | None) -> Scope:
    """Return the variables of a frame.

    Args:
        level: the level of the frame: 0 for the innermost one of the user's code, 1 for its caller.
        frame: the innermost one of a stack.

    Raises:
        LookupError: the stack has fewer frames.
    """
    frames = users_frames(frame)
    if level and level >= len(frames):
        callers = max(0, len(frames) - 1)
        raise LookupError(f"the code has {callers} caller{'s' * (callers != 1)} here, so --up takes at most {callers}")
    if not frames:
        names = sys.modules["__main__"].__dict__
        return Scope(names, names, None)
    at = frames[level]
    # A copy, so that comprehensions in the expression find the local variables.
    local = dict(at.f_locals)
    return Scope({**at.f_globals, **local}, local, at)


def innermost() -> FrameType | None:
    """Return the frame in which the main thread is, paused or running; None if it runs no call."""
    return gate.place() or failed.frame()


def look(level: int, read: Callable[[Scope], Any]) -> tuple[bool, Any]:
    """Run something in a frame; return whether it has ended well, and what it returns, or the error as text.

    Args:
        level: the level of the frame; see ``scope_of``.
        read: runs there, with its variables.
    """
    looking = _Look(level, read)
    # In the main thread if it is paused, since code may depend on its thread: autograd's modes, CUDA's device.
    paused = gate.do(looking.paused)
    if not paused:
        try:
            _beside.pop()
        except IndexError:
            return False, _BUSY
        try:
            spawn_thread("monarch-expression", looking.beside)
        except BaseException:
            _beside.append(None)
            raise
    if not looking.done.wait(PATIENCE):
        return False, LATE if paused else _LATE_BESIDE
    return looking.ok, looking.answer


_beside: deque[None] = deque([None])
"""One for each expression that may be evaluated beside running code; taken and given back in atomic steps."""


class _Look:
    """Something that runs in a frame, and what comes of it; written by one thread, until it is done."""

    def __init__(self, level: int, read: Callable[[Scope], Any]) -> None:
        self._level, self._read = level, read
        self.ok = False
        self.answer: Any = RESUMED
        self.done = threading.Event()

    def paused(self, frame: FrameType | None) -> None:
        """Run it in the main thread, in the frame in which that is paused; None if it has been resumed."""
        try:
            if frame is not None:
                self._run(frame)
        finally:
            self.done.set()

    def beside(self) -> None:
        """Run it in a thread of its own, while the main thread runs on."""
        try:
            self._run(gate.place() or failed.frame())
        except KeyboardInterrupt:
            # Nobody interrupts this thread, so the expression has raised it.
            pass
        finally:
            _beside.append(None)
            self.done.set()

    def _run(self, frame: FrameType | None) -> None:
        try:
            self.answer = self._read(scope_of(self._level, frame))
            self.ok = True
        except KeyboardInterrupt as error:
            self.answer = "KeyboardInterrupt"
            if raised.get(threading.get_ident()) is error:
                # Stop means the paused code too; another one is of the expression.
                raise
        except BaseException as error:
            # SystemExit too: it is of the expression, not of the paused code.
            self.answer = text_of(error)
        finally:
            # A fork that the expression has made would continue with the code.
            leave_if_forked()


def text_of(error: BaseException) -> str:
    """Return the type and text of an error in one line, whatever its own code does."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception as broken:
        return f"{type(error).__name__}, whose str() raised ({type(broken).__name__})"
