"""Signal handlers deferred in the main thread, where an exception from them would lose a message."""

from __future__ import annotations

# In C; typings/ has its types.
import _signal  # pyright: ignore[reportMissingModuleSource]
import signal
import sys
from collections import deque
from collections.abc import Callable
from typing import Any, TypeGuard

Handler = Callable[..., Any]
_FAULTS = frozenset({signal.SIGKILL, signal.SIGSTOP, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL})
_NUMBERS = tuple(int(number) for number in signal.valid_signals() if number not in _FAULTS)
_getsignal, _set = _signal.getsignal, _signal.signal
harmless: list[Handler] = []
"""Handlers of this package that raise nothing, and need not be deferred. Only added to."""
harmless_idle: list[Handler] = []
"""Those that raise nothing as long as the main thread runs no user code. Only added to."""


def from_handler(error: BaseException) -> bool:
    """Return whether a handler of a signal has raised an error, such as a time limit of the program."""
    codes = {id(code) for each in map(_getsignal, _NUMBERS) if (code := getattr(each, "__code__", None)) is not None}
    trace = error.__traceback__ if codes else None
    while trace is not None:
        if id(trace.tb_frame.f_code) in codes:
            return True
        trace = trace.tb_next
    return False


class DeferredSignals:
    """Defers handlers, from ``begin`` to ``end``; for the main thread, which alone runs handlers.

    Args:
        noted: called in a handler's place, at any point of the code; raises nothing.
    """

    def __init__(self, noted: Callable[[], None]) -> None:
        self._noted = noted
        self.holds = False
        """Whether handlers are deferred now. Main thread only."""
        self.may_raise = False
        """Whether a handler may raise while the main thread runs no user code, as of the last ``begin``. Written by the
        main thread, read by any."""
        # All of these: main thread only.
        self.numbers: deque[int] = deque()
        """Signals that have come and whose handlers have not run."""
        self._handlers: list[Any] = []
        self._held: list[tuple[int, Handler]] = []
        self._held_idle: list[tuple[int, Handler]] = []
        """All handlers at the last ``begin``, those to defer, and those to defer without user code."""
        self._deferred: list[tuple[int, Handler]] = []
        """The result of the last ``begin``."""

    def begin(self, idle: bool = False) -> list[tuple[int, Handler]]:
        """Defer all Python handlers from now on; ``end_and_run`` takes the result.

        Args:
            idle: whether no user code runs in the main thread.
        """
        # All handlers are queried each time, in 2 us: nothing announces a new one.
        if self.holds:
            # The last end has failed, as at the limit of recursion.
            self.end(self._deferred)
        handlers = list(map(_getsignal, _NUMBERS))
        if handlers != self._handlers:
            # Most are a number, SIG_DFL or SIG_IGN. A cell has a new handler each time.
            pairs = [each for each in zip(_NUMBERS, handlers, strict=True) if each[1].__class__ is not int]
            self._held = [(number, handler) for number, handler in pairs if _is_to_be_held(handler)]
            self._held_idle = [pair for pair in self._held if not any(pair[1] is each for each in harmless_idle)]
            self.may_raise = bool(self._held_idle)
            self._handlers = handlers
        held = self._held_idle if idle else self._held
        # Without handlers to restore, the caller may skip the end.
        self.holds, self._deferred = bool(held), held
        try:
            for number, _ in held:
                _set(number, self._note)
        except BaseException:
            # A signal that was still to come.
            self.end(held)
            raise
        return held

    def _note(self, number: int, _frame: Any) -> None:
        if number not in self.numbers:
            self.numbers.append(number)
            # Once for each: a storm of signals would nest more and more of these calls.
            self._noted()

    def end_and_run(self, held: list[tuple[int, Handler]], report: Callable[[], None] | None = None) -> bool:
        """Restore the handlers and run those whose signals have come; return whether there were any.

        Args:
            held: the result of ``begin``.
            report: called when a handler has raised; with None, the error is raised here.
        """
        try:
            for number, handler in held:
                _set(number, handler)
            self.holds = False
        except BaseException:
            # A restored handler has raised; restore the others all the same.
            self.end(held)
            raise
        finally:
            ran = bool(self.numbers)
            if ran:
                self._run(held, report)
        return ran

    def end(self, held: list[tuple[int, Handler]]) -> None:
        """Restore the handlers."""
        try:
            for number, handler in held:
                _set(number, handler)
            self.holds = False
        except BaseException:
            # A restored handler has raised; restore the others all the same.
            self.end(held)
            raise

    def _run(self, held: list[tuple[int, Handler]], report: Callable[[], None] | None) -> None:
        while self.numbers:
            number = self.numbers.popleft()
            try:
                for each, handler in held:
                    if each == number:
                        handler(number, sys._getframe())  # pyright: ignore[reportPrivateUsage]
            except (Exception, KeyboardInterrupt):
                if report is None:
                    raise
                report()
            finally:
                # If two raise, the second has the first as its context.
                self._run(held, report)


def _is_to_be_held(handler: object) -> TypeGuard[Handler]:
    return callable(handler) and not any(handler is each for each in harmless)
