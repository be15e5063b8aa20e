"""Warnings before a scheduler takes hosts back."""

from __future__ import annotations

from collections.abc import Callable

from monarch._node.future import in_thread
from monarch._node.node import Node
from monarch._procs.launch.interface import Launch
from monarch._session.launching.waiting import STEP_S, Tell

_WARN_S = (600.0, 120.0)
"""Seconds before the end of an allocation at which its user is warned."""


class Reminder:
    """Warnings before the hosts' time ends.

    Args:
        node: the node of this program.
        is_over: returns whether the hosts have ended.
        launch: that of the hosts.
        tell: shows a line.
    """

    def __init__(self, node: Node, is_over: Callable[[], bool], launch: Launch, tell: Tell) -> None:
        self._node = node
        self._is_over = is_over
        self._launch = launch
        self._tell = tell

    def begin(self, left: float) -> None:
        """Say how many seconds are left, and wait for the warnings."""
        self._tell(f"the host allocation ends in {_minutes(left)}", True)
        self._plan(left)

    def _plan(self, left: float) -> None:
        due = [left - before for before in _WARN_S if left > before]
        if due:
            self._node.receive_loop.call_later(min(due), self._start)

    def _start(self) -> None:
        if not self._is_over():
            in_thread(self._node, "host-time", self._warn)

    def _warn(self) -> None:
        left = self._launch.left()
        if left is None:
            return
        if left <= max(_WARN_S) + STEP_S:
            self._tell(
                f"the host allocation ends in {_minutes(left)}; save what you need, for example "
                f"with %mesh checkpoint, or ask for more time",
                True,
            )
        # It may have been extended.
        self._plan(left - 1.0)


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"
