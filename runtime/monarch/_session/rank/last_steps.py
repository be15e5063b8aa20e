"""The last steps of a rank that was asked to end, after those of its actors: threads, then exit functions."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable

from monarch._actors.executors import ActionExecutor
from monarch._node.node import Node
from monarch._procs.rank.exit_functions import join_threads, left_children, left_threads, run_functions
from monarch._wire import messages as m
from monarch.config import STOP_CANCEL, STOP_CLEANUP

_STEPS = 2
_PRESSES = 2
"""Interrupts of a step, before the process ends without it."""


class LastSteps:
    """The steps of Python at the end of a process, with bounds: each is interrupted when it is late.

    Args:
        node: the node of the rank.
        main: the executor of its main thread, where ``run`` is called.
        since: the time of the wish that the process ends, by the monotonic clock.
        give_up: called in the receiving thread, with a line for the user, if a step continues all the same.
    """

    def __init__(self, node: Node, main: ActionExecutor, since: float, give_up: Callable[[str], None]) -> None:
        self._node = node
        self._main = main
        self._since = since
        self._give_up = give_up
        self._now = -1
        """The step that runs; -1 between steps. Written by the main thread."""
        self._late = -1
        """The newest step that was interrupted. Written by the receiving thread."""

    def run(self) -> None:
        """Wait for non-daemon threads, and run the ``atexit`` functions."""
        most = time.monotonic() - self._since + _STEPS * (STOP_CLEANUP() + (_PRESSES + 1) * STOP_CANCEL())
        self._node.peers.to_agent(self._node.host, m.Stop(self._node.proc, [self._node.proc], most))
        for number, (step, text) in enumerate(((join_threads, _of_threads), (run_functions, _of_functions))):
            self._run(number, step)
            if self._late == number:
                print(text(), file=sys.stderr)

    def _run(self, number: int, step: Callable[[], None]) -> None:
        self._node.receive_loop.call_later(STOP_CLEANUP(), lambda: self._press(number, 0))
        try:
            try:
                self._now = number
                with self._main.user_code():
                    step()
            finally:
                self._now = -1
        except KeyboardInterrupt:
            pass
        except BaseException:
            traceback.print_exc()

    def _press(self, number: int, times: int) -> None:
        if self._now != number:
            return
        if times == _PRESSES:
            self._give_up(_of_functions() if number else _of_threads())
            return
        self._late = number
        self._main.interrupt_now()
        self._node.receive_loop.call_later(STOP_CANCEL(), lambda: self._press(number, times + 1))


def _of_threads() -> str:
    names = ", ".join(repr(name) for name in left_threads())
    return (
        f"the process exits without waiting for these non-daemon threads, which did not end within "
        f"{STOP_CLEANUP():g} s: {names}; start them with daemon=True, or raise {STOP_CLEANUP.variable}"
    )


def _of_functions() -> str:
    children = ", ".join(repr(name) for name in left_children())
    if children:
        return (
            f"the process exits without waiting for these child processes, which did not end within "
            f"{STOP_CLEANUP():g} s: {children}; start them with daemon=True, or raise {STOP_CLEANUP.variable}"
        )
    return (
        f"the exit functions of the process did not finish within {STOP_CLEANUP():g} s and were interrupted; raise "
        f"{STOP_CLEANUP.variable} to give them more time"
    )
