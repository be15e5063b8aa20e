"""Displays of ranks while a cell runs: those at about the same time become one output, side by side."""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from threading import Event
from typing import Any

from monarch._kernel_api import CLEAR, UPDATE, Channel, Shown, current_node
from monarch_kernel.compat import captures, publish
from monarch_kernel.output.bundles import Bundle, bundles_of_ranks, is_apart, merged_bundle
from monarch_kernel.output.frontend import overwrites_displays

_WINDOW = 0.1
"""Seconds that the display of one rank waits for those of the others."""
_EVERY = 0.1
"""Seconds between two updates of a display."""
_LAST_S = 5.0
"""Seconds that the end of a cell waits for its displays, which may take any time to unpickle."""
_KEPT = 64
"""Displays that ranks can still change, of one cell and of those with an id."""


class Output:
    """One output, with what each rank shows in it. For the lane of displays only."""

    def __init__(self, name: str, is_named: bool = False) -> None:
        self.name = name
        """Display id."""
        self.is_named = is_named
        """Whether the user gave the id."""
        self.bundles: dict[int, Bundle] = {}
        self.changed: set[int] = set()
        """Ranks whose bundles are not on screen yet."""
        self.is_shown = False
        self.due = 0.0
        """When to show it, on the monotonic clock."""
        self.held: list[Event] = []
        """Set once it is shown: later output waits for that."""


_named: OrderedDict[str, Output] = OrderedDict()
"""Displays with an id of the user, also of earlier cells. For the lane of displays only."""


class Displays:
    """Receives the displays of the ranks of a cell, and shows them in its output.

    Args:
        shell: of the notebook.
        count: number of ranks that the cell runs on.
        total: number of ranks of the mesh.
        quiet: whether to show nothing.
        lines: the printed output of the session, which keeps its order with displays.
    """

    def __init__(self, shell: Any, count: int, total: int, quiet: bool, lines: Any) -> None:
        self._count = count
        self._total = total
        self._quiet = quiet
        self._lines = lines
        self._kernel = getattr(shell, "kernel", None)
        self._publisher = shell.display_pub
        """Of the running cell; ``%%capture`` replaces it."""
        # The current cell; it may have ended when a display arrives.
        self._parent = self._kernel.get_parent("shell") if self._kernel is not None else None
        self._id = secrets.token_hex(8)
        # From here on, used by the lane only.
        self._so_far: dict[int, int] = {}
        """The number of displays of each rank since it cleared them."""
        self._turns: OrderedDict[int, Output] = OrderedDict()
        """Displays without an id, by their number (first, second, ...)."""
        self._stale: set[int] = set()
        """Ranks that clear what they have displayed at their next display."""
        self._waiting: list[Output] = []
        self._scheduled = False
        self.port, self._receiver = Channel[Any].open_ranked()
        self._receive, self._receiver.reply = self._receiver.reply, self._take

    def _take(self, reply: Any, frames: Any) -> None:
        """Post a display to the lane: unpickling and showing it may run user code."""
        self._receive(reply, frames)
        event = Event()
        if not self._quiet:
            self._lines.hold(reply.src, event)
        _post(lambda: self._unpack(event))

    def _unpack(self, event: Event) -> None:
        rank, shown = self._receiver.recv().get()
        if self._quiet:
            return
        if shown.kind == CLEAR:
            self._clear(rank, shown.wait)
            event.set()
            self._lines.go_on()
            return
        if rank in self._stale:
            self._stale.discard(rank)
            self._remove(rank)
        output = self._output_of(rank, shown)
        output.bundles[rank] = shown.bundle
        output.held.append(event)
        self._change(rank, output)

    def _output_of(self, rank: int, shown: Shown) -> Output:
        """Return the output that a display belongs to."""
        if shown.name:
            output = _named.get(shown.name)
            # The same name again is another display of the same value, as in IPython; here they are one.
            if output is None:
                output = _named[shown.name] = Output(f"ranks-{shown.name}", True)
                output.is_shown = shown.kind == UPDATE
            _named.move_to_end(shown.name)
            if len(_named) > _KEPT:
                _named.popitem(last=False)
            return output
        turn = self._so_far.get(rank, 0)
        self._so_far[rank] = turn + 1
        output = self._turns.get(turn)
        if output is None:
            output = self._turns[turn] = Output(f"{self._id}-{turn}")
            if len(self._turns) > _KEPT:
                self._turns.popitem(last=False)
        return output

    def _change(self, rank: int, output: Output) -> None:
        output.changed.add(rank)
        now = time.monotonic()
        if output not in self._waiting:
            output.due = max(output.due + _EVERY, now) if output.is_shown else now + _WINDOW
            self._waiting.append(output)
        if len(output.changed) == self._count and (not output.is_shown or output.due <= now):
            output.due = now
        self._show_due()

    # Clearing

    def _clear(self, rank: int, wait: bool) -> None:
        """Remove what a rank has displayed; where no other rank shows anything, all of the cell's output."""
        self._so_far[rank] = 0
        if self._count == 1 and self._kernel is not None:
            self._lines.catch_up()
            publish(self._kernel, "clear_output", {"wait": wait}, self._parent)
            self._turns.clear()
            self._waiting.clear()
        elif wait:
            self._stale.add(rank)
        else:
            self._remove(rank)

    def _remove(self, rank: int) -> None:
        for output in list(self._turns.values()):
            if output.bundles.pop(rank, None) is not None:
                self._change(rank, output)

    # Showing

    def _show_due(self) -> None:
        """Show the displays whose time has come."""
        now = time.monotonic()
        due = [output for output in self._waiting if output.due <= now]
        self._waiting = [output for output in self._waiting if output.due > now]
        for output in due:
            self._show(output)
        if self._waiting and not self._scheduled:
            self._scheduled = True
            pause = min(output.due for output in self._waiting) - now
            current_node().receive_loop.call_later(max(0.0, pause), lambda: _post(self._wake))

    def _wake(self) -> None:
        self._scheduled = False
        self._show_due()

    def _flush(self) -> None:
        """Show the displays that wait for other ranks."""
        for output in self._waiting:
            output.due = 0.0
        self._show_due()

    def close(self) -> None:
        """Show what has arrived, within some seconds, after the end of the cell."""
        shown = Event()
        _post(self._flush)
        _post(shown.set)
        shown.wait(_LAST_S)
        self._receiver.close()

    def _show(self, output: Output) -> None:
        is_update = output.is_shown and overwrites_displays(self._kernel, self._parent)
        if captures(self._publisher) or (not output.is_named and any(map(is_apart, output.bundles.values()))):
            # Its label is an output of its own, which no update changes; %%capture takes no updates.
            is_update = False
        ranks = output.bundles if is_update else output.changed & output.bundles.keys()
        bundles = [(rank, output.bundles[rank]) for rank in sorted(ranks)]
        output.due, output.is_shown, output.changed = time.monotonic(), True, set()
        if is_update:
            self._send(merged_bundle(bundles, self._total), output.name, "update_display_data")
        elif bundles:
            self._lines.catch_up()
            *before, last = bundles_of_ranks(bundles, self._total)
            for each in before:
                self._send(each, "")
            self._send(last, output.name)
        for event in output.held:
            event.set()
        output.held.clear()
        self._lines.go_on()

    def _send(self, bundle: Bundle, name: str, kind: str = "display_data") -> None:
        if self._kernel is None or captures(self._publisher):
            self._publisher.publish(bundle)
            return
        content = {"data": bundle, "metadata": {}, "transient": {"display_id": name} if name else {}}
        publish(self._kernel, kind, content, self._parent)


def _post(action: Callable[[], None]) -> None:
    """Run an action on the lane of displays, in order."""
    current_node().lanes.post("displays", action)
