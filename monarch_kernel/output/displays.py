"""Displays of ranks while a cell runs: those at about the same time become one output, side by side."""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from threading import Event
from typing import Any

from monarch._kernel_api import CLEAR, UPDATE, Channel, ShownObject, cost_of, current_node, tell_taken
from monarch_kernel.compat import captures, publish
from monarch_kernel.kernel_like import kernel_of
from monarch_kernel.output.bundles import Bundle, bundles_of_ranks, is_apart, merged_bundle
from monarch_kernel.output.frontend import overwrites_displays
from monarch_kernel.output.owners import without_code
from monarch_kernel.output.page import Page

_WINDOW = 0.1
"""Seconds that the display of one rank waits for those of the others."""
_EVERY = 0.1
"""Seconds between two updates of a display."""
_LAST_S = 5.0
"""Seconds that the end of a cell waits for its displays, which may take any time to unpickle."""
_STEP = 8
"""Cost of displays of a rank after which it is told how much is shown."""
_KEPT = 64
"""Displays that ranks can still change, of one cell and of those with an id."""


class SharedOutput:
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


_named: OrderedDict[str, SharedOutput] = OrderedDict()
"""Displays with an id of the user, also of earlier cells. For the lane of displays only."""


class Displays:
    """Receives the displays of the ranks of a cell, and shows them in its output.

    Args:
        shell: the shell of the notebook.
        count: number of ranks that the cell runs on.
        total: number of ranks of the mesh.
        quiet: whether to show nothing.
        streams: show the printed output, which keeps its order with displays.
    """

    def __init__(self, shell: Any, count: int, total: int, quiet: bool, streams: Any) -> None:
        self._count = count
        self._total = total
        self._quiet = quiet
        self._streams = streams
        self._lines = streams.output
        self._kernel = kernel_of(shell)
        self._publisher = shell.display_pub
        """Of the running cell; ``%%capture`` replaces it."""
        # The current cell; it may have ended when a display arrives.
        self._parent = without_code(self._kernel.get_parent("shell")) if self._kernel is not None else None
        self._page: Page | None = streams.open_page(self._parent) if not quiet else None
        if self._page is not None:
            self._page.on_cleared = lambda rank, number: _post(lambda: self._remove(rank, number))
        # From here on, used by the lane only.
        self._id = ""
        """Prefix of the ids of unnamed displays; made with the first one, since it costs a system call."""
        self._so_far: dict[int, int] = {}
        """The number of displays of each rank since it cleared them."""
        self._turns: OrderedDict[int, SharedOutput] = OrderedDict()
        """Displays without an id, by their number (first, second, ...)."""
        self._cleared: dict[int, dict[int, dict[SharedOutput, Bundle]]] = {}
        """Displays of each rank at its clears, by the number of the clear, until they are removed."""
        self._clears = 0
        self._waiting: list[SharedOutput] = []
        self._scheduled = False
        self._taken: dict[str, tuple[int, int]] = {}
        """By proc, the cost of its displays so far, and what it was told."""
        self._has_displays = False
        """Whether a rank has displayed something; set once, in the receiving thread."""
        self.port, self._receiver = Channel[Any].open_ranked()
        self._receive, self._receiver.reply = self._receiver.reply, self._take

    def _take(self, reply: Any, frames: Any) -> None:
        """Post a display to the lane: unpickling and showing it may run user code."""
        self._has_displays = True
        self._receive(reply, frames)
        event = Event()
        if not self._quiet:
            self._lines.hold(reply.src, event)
        _post(lambda: self._unpack(event, reply.src))

    def _unpack(self, event: Event, proc: str) -> None:
        rank, shown = self._receiver.recv().get()
        try:
            if not self._quiet:
                self._use(event, proc, rank, shown)
        finally:
            total, told = self._taken.get(proc, (0, 0))
            total += cost_of(shown.bundle)
            if total - told >= _STEP:
                told = total
                tell_taken(proc, self._receiver.port, total)
            self._taken[proc] = total, told

    def _use(self, event: Event, proc: str, rank: int, shown: ShownObject) -> None:
        if shown.kind == CLEAR:
            self._clear(rank, shown.wait, proc)
            event.set()
            self._lines.go_on()
            return
        if self._page is not None and self._page.is_stale(rank):
            # Lines before this display clear first.
            self._lines.catch_up()
            with self._page.lock:
                self._page.wake([rank], True)
        self._remove(rank, self._clears)
        output = self._output_of(rank, shown)
        output.bundles[rank] = shown.bundle
        output.held.append(event)
        self._change(rank, output)

    def _output_of(self, rank: int, shown: ShownObject) -> SharedOutput:
        """Return the output that a display belongs to."""
        if shown.name:
            output = _named.get(shown.name)
            # The same name again is another display of the same value, as in IPython; here they are one.
            if output is None:
                output = _named[shown.name] = SharedOutput(f"ranks-{shown.name}", True)
                output.is_shown = shown.kind == UPDATE
            _named.move_to_end(shown.name)
            if len(_named) > _KEPT:
                _named.popitem(last=False)
            return output
        turn = self._so_far.get(rank, 0)
        self._so_far[rank] = turn + 1
        output = self._turns.get(turn)
        if output is None:
            self._id = self._id or secrets.token_hex(8)
            output = self._turns[turn] = SharedOutput(f"{self._id}-{turn}")
            if len(self._turns) > _KEPT:
                self._turns.popitem(last=False)
        return output

    def _change(self, rank: int, output: SharedOutput) -> None:
        output.changed.add(rank)
        now = time.monotonic()
        if output not in self._waiting:
            output.due = max(output.due + _EVERY, now) if output.is_shown else now + _WINDOW
            self._waiting.append(output)
        if len(output.changed) == self._count and (not output.is_shown or output.due <= now):
            output.due = now
        self._show_due()

    # Clearing

    def _clear(self, rank: int, wait: bool, proc: str) -> None:
        """Clear what a rank has printed and displayed, now or with its next output."""
        self._clears += 1
        self._so_far[rank] = 0
        shown = {output: output.bundles[rank] for output in self._turns.values() if rank in output.bundles}
        self._cleared.setdefault(rank, {})[self._clears] = shown
        self._lines.catch_up(proc, partial(self._streams.is_of, parent=self._parent), _LAST_S)
        if self._page is not None:
            self._page.clear(rank, wait, self._clears)
        if not wait:
            self._remove(rank, self._clears)

    def _remove(self, rank: int, number: int) -> None:
        """Remove what a rank had displayed at its clears up to a number."""
        cleared = self._cleared.get(rank, {})
        for each in [each for each in cleared if each <= number]:
            for output, bundle in cleared.pop(each).items():
                if output.bundles.get(rank) is bundle:
                    del output.bundles[rank]
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
        if self._has_displays:
            shown = Event()
            _post(self._flush)
            _post(shown.set)
            shown.wait(_LAST_S)
        self._receiver.close()
        if self._page is not None:
            if self._clears:
                # Lines may have waited for the last clear.
                self._lines.catch_up(patience=_LAST_S)
            self._streams.close_page(self._parent, self._page)

    def _show(self, output: SharedOutput) -> None:
        is_update = output.is_shown and overwrites_displays(self._kernel, self._parent)
        if captures(self._publisher) or (not output.is_named and any(map(is_apart, output.bundles.values()))):
            # Its label is an output of its own, which no update changes; %%capture takes no updates.
            is_update = False
        ranks = output.bundles if is_update else output.changed & output.bundles.keys()
        bundles = [(rank, output.bundles[rank]) for rank in sorted(ranks)]
        output.due, output.is_shown, output.changed = time.monotonic(), True, set()
        if is_update:
            self._send(output, [merged_bundle(bundles, self._total)], {rank for rank, _ in bundles}, True)
        elif bundles:
            self._lines.catch_up()
            self._send(output, bundles_of_ranks(bundles, self._total), {rank for rank, _ in bundles}, False)
        for event in output.held:
            event.set()
        output.held.clear()
        self._lines.go_on()

    def _send(self, output: SharedOutput, bundles: list[Bundle], ranks: set[int], is_update: bool) -> None:
        """Send bundles, the last of which has the id of the output, unless the page will be shown again."""
        if self._kernel is None or captures(self._publisher):
            for bundle in bundles:
                self._publisher.publish(bundle)
            return
        contents = [{"data": bundle, "metadata": {}, "transient": {}} for bundle in bundles]
        contents[-1]["transient"] = {"display_id": output.name}
        kind, page = "update_display_data" if is_update else "display_data", self._page
        with page.lock if page is not None else nullcontext():
            # An update of a display of another cell is not on this page.
            if page is not None and not (is_update and output.is_named and not page.has(output.name)):
                kind = page.add_display(output.name, contents, ranks, is_update)
            for content in contents if kind else ():
                publish(self._kernel, kind, content, self._parent)


def _post(action: Callable[[], None]) -> None:
    """Run an action on the lane of displays, in order."""
    current_node().lanes.post("displays", action)
