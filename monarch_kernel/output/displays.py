"""Displays of ranks while a cell runs: those at about the same time become one output, side by side."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event
from typing import Any

from monarch._kernel_api import Channel, current_node
from monarch_kernel.compat import captures, publish
from monarch_kernel.output.render import bundle_of_ranks

_WINDOW = 0.3
"""Seconds that the display of one rank waits for those of the others."""
_LAST_S = 5.0
"""Seconds that the end of a cell waits for its displays, which may take any time to unpickle."""


class Displays:
    """Receives the displays of the ranks of a cell, and shows them in its output.

    Args:
        shell: of the notebook.
        count: number of ranks that the cell runs on.
        total: number of ranks of the mesh.
        quiet: whether to show nothing.
    """

    def __init__(self, shell: Any, count: int, total: int, quiet: bool) -> None:
        self._count = count
        self._total = total
        self._quiet = quiet
        self._kernel = getattr(shell, "kernel", None)
        self._publisher = shell.display_pub
        """Of the running cell; ``%%capture`` replaces it."""
        # The current cell; it may have ended when a display arrives.
        self._parent = self._kernel.get_parent("shell") if self._kernel is not None else None
        # From here on, used by the lane only.
        self._so_far: dict[int, int] = {}
        """The number of displays of each rank."""
        self._waiting: dict[int, dict[int, dict[str, Any]]] = {}
        """Displays not shown yet: by their number (first, second, ...), then by rank."""
        self.port, self._receiver = Channel[Any].open_ranked()
        self._receive, self._receiver.reply = self._receiver.reply, self._take

    def _take(self, reply: Any, frames: Any) -> None:
        """Post a display to the lane: unpickling and showing it may run user code."""
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
        """Show the displays that wait for other ranks."""
        waiting, self._waiting = self._waiting, {}
        for _, bundles in sorted(waiting.items()):
            self._show(bundles)

    def close(self) -> None:
        """Show what has arrived, within some seconds, after the end of the cell."""
        shown = Event()
        _post(self._flush)
        _post(shown.set)
        shown.wait(_LAST_S)
        self._receiver.close()

    def _show(self, bundles: dict[int, dict[str, Any]]) -> None:
        bundle = bundle_of_ranks(sorted(bundles.items()), self._total)
        if bundle is None:
            return
        if self._kernel is None or captures(self._publisher):
            self._publisher.publish(bundle)
            return
        content = {"data": bundle, "metadata": {}, "transient": {}}
        publish(self._kernel, "display_data", content, self._parent)


def _post(action: Callable[[], None]) -> None:
    """Run an action on the lane of displays, in order."""
    current_node().lanes.post("displays", action)
