"""How far the displays of a rank run ahead of the notebook, which shows them one by one.

A rank that displays faster waits in ``display``, where a Stop reaches it. So a flood of displays delays neither the
Stop nor the cells that follow.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from monarch._node.current import current_node
from monarch._node.services.frame import ask_frame
from monarch._node.services.registry import request, service
from monarch.exceptions import DeadlockError

if TYPE_CHECKING:
    from monarch._wire.receiving.loop import Turn

_ALL, _LEAST, _MOST = 512, 16, 32
"""Displays of all ranks of a mesh, and of one rank, that may be on their way; a large one counts as several."""
_UNIT = 64 << 10
"""Bytes of a display that count as one more."""
_CLEAR = 4
_STALLED_S = 5.0
"""Seconds without progress after which a cell's displays no longer wait: nobody takes them."""

_paces: WeakValueDictionary[int, Pace] = WeakValueDictionary()
"""By the port that displays are sent to. Any thread."""


def cost_of(bundle: Mapping[str, Any]) -> int:
    """Return the cost of a display, or of a clear, which shows a page again."""
    if not bundle:
        return _CLEAR
    return 1 + sum(len(value) for value in bundle.values() if isinstance(value, (str, bytes))) // _UNIT


class Pace:
    """The displays of a cell on this rank that the notebook has not taken.

    Args:
        port: that they are sent to.
    """

    def __init__(self, port: int) -> None:
        config = current_node().config
        ranks = config.procs.size if config is not None else 1
        self._room = max(_LEAST, min(_MOST, _ALL // max(1, ranks)))
        self._sent = 0
        self._is_stalled = False
        self._taken = 0
        """Written by the receiving thread only."""
        self.thread: Turn | None = None
        """Locks of threads that wait, as the receive loop requires."""
        _paces[port] = self

    @property
    def done(self) -> bool:
        """Whether there is room for one more."""
        return self._is_stalled or self._sent - self._taken < self._room

    def wait(self, bundle: Mapping[str, Any]) -> None:
        """Wait for room for a display that is about to be sent, for a bounded time."""
        while not self.done:
            taken = self._taken
            try:
                current_node().receive_loop.wait(self, _STALLED_S)
            except DeadlockError:
                # A signal handler displays in the middle of a wait.
                break
            if self._taken == taken:
                self._is_stalled = True
        self._sent += cost_of(bundle)

    def take(self, total: int) -> None:
        """Note what the notebook has taken."""
        self._taken = total
        current_node().receive_loop.notify(self)


@service("display_pace.taken", "quick")
def taken(port: int, total: int) -> None:
    """Service: note the total cost of the displays that the notebook has taken at a port."""
    pace = _paces.get(port)
    if pace is not None:
        pace.take(total)


def tell_taken(proc: str, port: int, total: int) -> None:
    """Tell a rank which of its displays the notebook has taken, without waiting."""
    node = current_node()
    node.peers.get(proc).send(ask_frame(node, request(taken, port, total), 0))


def pace_of(sink: Any) -> Pace | None:
    """Return a new pace for the displays that go to a port; None for other places."""
    number = getattr(sink, "number", 0)
    return Pace(number) if isinstance(number, int) and number else None
