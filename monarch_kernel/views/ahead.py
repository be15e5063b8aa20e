"""The state of a mesh in its widget, for a page whose first message waits for the running cell."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from monarch._kernel_api import open_node
from monarch_kernel.views.feed import Feeds, StateSource
from monarch_kernel.views.model import snapshot

_EVERY_S = 1.0
"""Least seconds between two states: each is everything of the mesh."""

_encode = msgspec.json.Encoder().encode


class Ahead:
    """Keeps the state of a mesh in a widget until its page is heard.

    ipykernel's comms are read around the running cell; elsewhere, as in marimo, a page that opens during a cell would
    show nothing until the cell ends.

    Args:
        widget: has the trait ``state``.
        feeds: the feeds of the program.
        source: the mesh.
    """

    def __init__(self, widget: Any, feeds: Feeds, source: StateSource) -> None:
        self._widget = widget
        self._node = open_node()
        self._feeds = feeds
        self._source = source
        self._due = time.monotonic() + _EVERY_S
        """When the state may be sent again. Written by the lane, read by the thread of the feeds."""
        self._waits = False
        """Whether an update is scheduled; a hint, set by the thread of the feeds and cleared by the lane."""
        self._ended = False
        feeds.open(source, self, [])

    def send(self, message: bytes) -> None:
        """Take a message about the mesh, which is of a new state."""
        # It has no page that says so.
        if not self._feeds.heard(self._source.uid, self) or self._waits:
            return
        self._waits = True
        node, wait = self._node, max(0.0, self._due - time.monotonic())
        # Not from the thread of the feeds, which would wait, nor from the receiving thread, which is quick.
        node.receive_loop.call_later(wait, lambda: node.lanes.post("pictures", self._update))

    def _update(self) -> None:
        self._waits, self._due = False, time.monotonic() + _EVERY_S
        if not self._ended:
            self._widget.state = state_text(self._source)
        if self._ended:
            # A page was heard meanwhile. One that is loaded later must not show it as the present state.
            self._widget.state = ""

    def end(self) -> None:
        """Send nothing more: the page gets messages, or the widget is closed."""
        self._ended = True
        self._feeds.close(self._source.uid, self)
        self._widget.state = ""


def state_text(source: StateSource) -> str:
    """Return the state of a mesh as JSON."""
    return _encode(source.read(lambda model: snapshot(model, source.uid, [], time.time())[0])).decode()
