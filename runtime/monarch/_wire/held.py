"""Handlers of signals that are put off in the main thread, where what they raise would lose a message."""

from __future__ import annotations

import _signal  # pyright: ignore[reportMissingImports]
import signal
import sys
from collections import deque
from collections.abc import Callable
from typing import Any

Handler = Callable[..., Any]
_FAULTS = frozenset({signal.SIGKILL, signal.SIGSTOP, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL})
_NUMBERS = tuple(int(number) for number in signal.valid_signals() if number not in _FAULTS)
_getsignal, _set = _signal.getsignal, _signal.signal
harmless: list[Handler] = []
"""Handlers of this package that raise nothing, and need not be put off. Only added to."""


class Held:
    """Puts off what handlers do, from ``begin`` to ``end``; for the main thread, which alone runs handlers.

    Args:
        noted: called in a handler's place, in the middle of anything; raises nothing.
    """

    def __init__(self, noted: Callable[[], None]) -> None:
        self._noted = noted
        # All of these: main thread only.
        self.numbers: deque[int] = deque()
        """Signals that have come and whose handlers have not run."""
        self._handlers: list[Any] = []
        self._found: list[tuple[int, Handler]] = []
        """All handlers at the last ``begin``, and those of them that are put off."""

    def begin(self) -> list[tuple[int, Handler]]:
        """Put off all handlers in Python from now on; ``end_and_run`` takes what this returns."""
        # All handlers are asked for each time, in 2 us: nobody tells of a new one.
        handlers = list(map(_getsignal, _NUMBERS))
        if handlers != self._handlers:
            self._found = [pair for pair in zip(_NUMBERS, handlers, strict=True) if _is_to_be_held(pair[1])]
            self._handlers = handlers
        found = self._found
        try:
            for number, _ in found:
                _set(number, self._note)
        except BaseException:
            # Of one that was still to come.
            self.end(found)
            raise
        return found

    def _note(self, number: int, _frame: Any) -> None:
        if number not in self.numbers:
            self.numbers.append(number)
        self._noted()

    def end_and_run(self, found: list[tuple[int, Handler]], report: Callable[[], None] | None = None) -> bool:
        """Put the handlers back and run those whose signals have come; whether there were any.

        Args:
            found: what ``begin`` has returned.
            report: called where a handler has raised; None lets that be raised here.
        """
        try:
            self.end(found)
        finally:
            ran = bool(self.numbers)
            if ran:
                self._run(found, report)
        return ran

    def end(self, found: list[tuple[int, Handler]]) -> None:
        """Put the handlers back."""
        try:
            for number, handler in found:
                _set(number, handler)
        except BaseException:
            # One that is back has raised; the others must not stay away.
            self.end(found)
            raise

    def _run(self, found: list[tuple[int, Handler]], report: Callable[[], None] | None) -> None:
        while self.numbers:
            number = self.numbers.popleft()
            try:
                for each, handler in found:
                    if each == number:
                        handler(number, sys._getframe())  # pyright: ignore[reportPrivateUsage]
            except (Exception, KeyboardInterrupt):
                if report is None:
                    raise
                report()
            finally:
                # Of two that raise, the second one is told with the first one as its context.
                self._run(found, report)


def _is_to_be_held(handler: Any) -> bool:
    return callable(handler) and not any(handler is each for each in harmless)
