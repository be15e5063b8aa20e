"""Sends the state of meshes to the views that show them: one thread, at a bounded rate, nothing if nobody looks."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from monarch._kernel_api import MeshModel, spawn_thread
from monarch_kernel.views.model import Seen, patch, snapshot
from monarch_kernel.views.protocol import ALIVE_SECONDS, Action, FromKernel

EVERY_S = 0.1
"""Least seconds between two messages about a mesh."""
BYTES_A_SECOND = 700_000
"""Of the messages to all views of a kernel, after the first ones; the headers of messages come on top."""
SILENT_S = 3.0 * ALIVE_SECONDS + 10.0
"""Seconds after which a view that has said nothing gets no more patches."""
_LINGER_S = 1.0
"""Seconds for which the thread waits for the next view before it ends."""

_encode = msgspec.json.Encoder().encode


class ViewChannel(Protocol):
    """A way to the views behind one comm. Sending puts a message into a queue and never waits."""

    def send(self, message: bytes) -> None:
        """Send a message, written as JSON."""
        ...


class StateSource(Protocol):
    """A mesh whose state can be read and followed."""

    @property
    def uid(self) -> str:
        """Of the mesh."""
        ...

    def read(self, reader: Callable[[MeshModel], Any]) -> Any:
        """Return the result of a quick function of the state."""
        ...

    def subscribe(self, callback: Callable[[], object]) -> Callable[[], None]:
        """Call a function soon after each change; return a function that ends this."""
        ...


class Feed:
    """The views of one mesh. All but ``changed`` is used under the lock of ``Feeds``, or by its thread."""

    def __init__(self, source: StateSource, actions: list[Action]) -> None:
        self.source = source
        self.actions = actions
        self.lines: dict[ViewChannel, float] = {}
        """Each way to a view, with the time at which it was last heard of."""
        self.new: set[ViewChannel] = set()
        """Those that need a snapshot."""
        self.changed = False
        """Whether something has happened since the last look; set by any thread, cleared by the thread of the feeds."""
        self.due = 0.0
        """When the next message may be sent, on the monotonic clock. Thread of the feeds only, as ``seen`` is."""
        self.seen: Seen | None = None
        self.unsubscribe: Callable[[], None] = lambda: None

    def messages(self, now: float, needs_snapshot: bool) -> tuple[FromKernel | None, FromKernel | None]:
        """Return what the views that are up to date need, and what new ones need.

        Args:
            now: seconds since the epoch.
            needs_snapshot: whether there are new ones.
        """

        def look(model: MeshModel) -> tuple[FromKernel | None, FromKernel | None]:
            seen, change, whole = self.seen, None, None
            if seen is not None and seen.fits(model):
                if model.number != seen.number:
                    change, self.seen = patch(model, seen, now)
                if needs_snapshot:
                    before = self.seen or seen
                    whole, self.seen = snapshot(model, self.source.uid, self.actions, now)
                    # The new views may have fewer of very many points; from here on, all have the same.
                    change = change if self.seen.series == before.series else whole
                return change, whole
            whole, self.seen = snapshot(model, self.source.uid, self.actions, now)
            return whole, whole

        return self.source.read(look)


class Feeds:
    """The feeds of a kernel, and the thread that serves them while a view is open. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._feeds: dict[str, Feed] = {}
        """By mesh. Guarded by ``_lock``, as ``_running`` is."""
        self._running = False
        self._wake = threading.Event()

    def open(self, source: StateSource, line: ViewChannel, actions: list[Action]) -> None:
        """Send a snapshot of a mesh, and what changes from then on."""
        with self._lock:
            feed = self._feeds.get(source.uid)
            first = feed is None
            if feed is None:
                feed = self._feeds[source.uid] = Feed(source, actions)
            feed.lines[line] = time.monotonic()
            feed.new.add(line)
        if first:
            self._subscribe(feed)
        self._start()

    def _subscribe(self, feed: Feed) -> None:
        def changed() -> None:
            feed.changed = True
            self._wake.set()

        end = feed.source.subscribe(changed)
        with self._lock:
            feed.unsubscribe = end
            left = self._feeds.get(feed.source.uid) is not feed
        if left:
            end()

    def _start(self) -> None:
        with self._lock:
            starts, self._running = not self._running, True
        self._wake.set()
        if starts:
            spawn_thread("monarch-views", self._run)

    def heard(self, uid: str, line: ViewChannel) -> bool:
        """Record that a view still shows a mesh; return whether it gets messages about it."""
        with self._lock:
            feed = self._feeds.get(uid)
            if feed is None or line not in feed.lines:
                return False
            feed.lines[line] = time.monotonic()
            return True

    def close(self, uid: str, line: ViewChannel) -> None:
        """Send nothing more about a mesh to a view."""
        with self._lock:
            feed = self._feeds.get(uid)
            gone = self._forget(feed, line) if feed is not None else None
        if gone is not None:
            gone.unsubscribe()

    def close_all(self, line: ViewChannel) -> None:
        """Send nothing more to a view."""
        for uid in self.open_meshes():
            self.close(uid, line)

    def open_meshes(self) -> list[str]:
        """Return the meshes that a view shows."""
        with self._lock:
            return list(self._feeds)

    def _forget(self, feed: Feed, line: ViewChannel) -> Feed | None:
        """Remove a view, under the lock; return its feed if it was the last one."""
        feed.lines.pop(line, None)
        feed.new.discard(line)
        return self._feeds.pop(feed.source.uid, None) if not feed.lines else None

    # The thread

    def _run(self) -> None:
        idle = time.monotonic()
        while True:
            self._wake.wait(self._pause())
            self._wake.clear()
            self._drop_silent()
            if self._serve_all():
                idle = time.monotonic()
            elif self._ends(idle):
                return

    def _serve_all(self) -> int:
        """Serve all feeds; return how many there are."""
        with self._lock:
            feeds = list(self._feeds.values())
        for feed in feeds:
            self._try_to_serve(feed, len(feeds))
        return len(feeds)

    def _ends(self, idle: float) -> bool:
        """Return whether no view has come for a while, so that the thread ends."""
        with self._lock:
            self._running = bool(self._feeds) or time.monotonic() - idle < _LINGER_S
            return not self._running

    def _pause(self) -> float:
        """Return the seconds until the next message may be sent."""
        with self._lock:
            waiting = [feed.due for feed in self._feeds.values() if feed.changed or feed.new]
        return min([_LINGER_S, *(max(0.0, due - time.monotonic()) for due in waiting)])

    def _drop_silent(self) -> None:
        since = time.monotonic() - SILENT_S
        with self._lock:
            silent = [(uid, line) for uid, feed in self._feeds.items() for line, at in feed.lines.items() if at < since]
        for uid, line in silent:
            self.close(uid, line)

    def _try_to_serve(self, feed: Feed, feeds: int) -> None:
        try:
            self._serve(feed, feeds)
        except Exception:
            # A mesh whose session has ended, or a bug: other meshes continue.
            traceback.print_exc()
            for line in list(feed.lines):
                self.close(feed.source.uid, line)

    def _serve(self, feed: Feed, feeds: int) -> None:
        """Send what has changed, if it is time."""
        now = time.monotonic()
        if now < feed.due or not (feed.changed or feed.new):
            return
        with self._lock:
            new, lines = set(feed.new), list(feed.lines)
            feed.new.clear()
        feed.changed = False
        change, whole = feed.messages(time.time(), bool(new))
        size = 0
        for message, to in ((change, [each for each in lines if each not in new]), (whole, list(new))):
            size += _send(message, to) if message is not None and to else 0
        feed.due = now + max(EVERY_S, size * feeds / BYTES_A_SECOND)


def _send(message: FromKernel, lines: list[ViewChannel]) -> int:
    """Send a message to some views; return the bytes."""
    data = _encode(message)
    for line in lines:
        line.send(data)
    return len(data) * len(lines)
