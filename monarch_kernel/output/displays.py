"""What ranks display while a cell runs: what all of them show at about the same time is one output, side by side."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event
from typing import Any

from monarch._kernel_api import Channel, current_node
from monarch_kernel.compat import publish
from monarch_kernel.output.render import bundle_of_ranks

_WINDOW = 0.3
"""Seconds for which the display of one rank waits for those of the others."""
_LAST_S = 5.0
"""Seconds for which the end of a cell waits for what it has displayed: to unpickle that may take any time."""


class Displays:
    """Takes what the ranks of a cell display, and shows it in the output of that cell.

    Args:
        shell: of the notebook.
        count: how many ranks the cell runs on.
        total: how many the mesh has.
        quiet: whether nothing is shown.
    """

    def __init__(self, shell: Any, count: int, total: int, quiet: bool) -> None:
        self._shell = shell
        self._count = count
        self._total = total
        self._quiet = quiet
        self._kernel = getattr(shell, "kernel", None)
        # The cell that runs now; it may have ended when something is displayed.
        self._parent = self._kernel.get_parent("shell") if self._kernel is not None else None
        # From here on: the lane only.
        self._so_far: dict[int, int] = {}
        """How much each rank has displayed."""
        self._waiting: dict[int, dict[int, dict[str, Any]]] = {}
        """Of the first display of each rank, the second and so on: what is not shown yet, by rank."""
        self.port, self._receiver = Channel.open_ranked()
        self._receive, self._receiver.reply = self._receiver.reply, self._take

    def _take(self, reply: Any, frames: Any) -> None:
        """In the receiving thread: to unpickle it may run code of the user, and to show it too."""
        self._receive(reply, frames)
        _post(self._unpack)

    def _unpack(self) -> None:
        rank, bundle = self._receiver.recv().get()
        if self._quiet:
            return
        turn = self._so_far.get(rank, 0)
        self._so_far[rank] = turn + 1
        idle = not self._waiting
        waiting = self._waiting.setdefault(turn, {})
        waiting[rank] = bundle
        if len(waiting) == self._count:
            del self._waiting[turn]
            self._show(waiting)
        elif idle:
            current_node().receive_loop.call_later(_WINDOW, lambda: _post(self._flush))

    def _flush(self) -> None:
        """Shows what waits for others."""
        waiting, self._waiting = self._waiting, {}
        for _, bundles in sorted(waiting.items()):
            self._show(bundles)

    def close(self) -> None:
        """The cell has ended: shows what has arrived, in some seconds at most."""
        shown = Event()
        _post(self._flush)
        _post(shown.set)
        shown.wait(_LAST_S)
        self._receiver.close()

    def _show(self, bundles: dict[int, dict[str, Any]]) -> None:
        bundle = bundle_of_ranks(sorted(bundles.items()), self._total)
        if bundle is None:
            return
        if self._kernel is None:
            self._shell.display_pub.publish(bundle)
            return
        content = {"data": bundle, "metadata": {}, "transient": {}}
        publish(self._kernel, "display_data", content, self._parent)


def _post(action: Callable[[], None]) -> None:
    """Has something run on the lane of displays, one after the other."""
    current_node().lanes.post("displays", action)
