"""Large arguments and results of one process: written into shared memory once, mapped by each who gets them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from threading import RLock
from typing import TYPE_CHECKING, Any, cast

from monarch._node.service import function_of
from monarch._wire import messages as m
from monarch._wire.bulk.mappings import Mappings
from monarch._wire.bulk.segments import BulkRef, Segments
from monarch._wire.pickling import loads

if TYPE_CHECKING:
    from collections.abc import Callable

    from monarch._node.peers import Peer
    from monarch._wire.receiving.loop import Pump, Waiter

_SWEEP = 0.5
"""Seconds between looks for shared memory that is not used any more, while some is."""
SPACE_S = 2.0
"""Seconds to wait for receivers that hold more shared memory than its bound. They may never let go of it, so after that
buffers go through the socket."""
_LENDING = "monarch._state.rdma.exports"


class Bulk:
    """Mixin of the runtime: what it has of shared memory."""

    if TYPE_CHECKING:
        proc: str
        pump: Pump
        deferred: deque[Callable[[], None]]

        def peer(self, proc: str) -> Peer: ...
        def wait(self, waiter: Waiter, timeout: float | None = None) -> bool: ...

    def begin_bulk(self) -> None:
        """Before anything is sent."""
        self.segments = Segments()
        # Appended to by garbage collections, in any thread, so no lock.
        self.releases: deque[tuple[int, int]] = deque()
        """Shared memory that was let go of here, and that its owner was not told of yet: pid and segment."""
        self.mappings = Mappings(self._on_release)
        self._bulk_lock = RLock()
        # These three under _bulk_lock.
        self._spaces: set[_Space] = set()
        self._mapped = 0
        self._sweeping = False
        # By pid; an entry is written again with the same value only.
        self._bulk_owners: dict[int, str] = {}

    def put(self, buffers: Sequence[memoryview], receivers: Sequence[str]) -> m.PackedBulk | None:
        """Writes large buffers into shared memory, once for all receivers; None if that is and stays full."""
        if self.segments.over_limit and not self._wait_for_space():
            return None
        ref = self.segments.put(list(buffers), receivers)
        return (self.proc, ref.pid, ref.fd, ref.segment, list(ref.spans))

    def _wait_for_space(self) -> bool:
        """Waits until receivers hold less shared memory than its bound; False if they do not in time."""
        space = _Space(self.segments)
        with self._bulk_lock:
            self._spaces.add(space)
        try:
            return self.wait(space, SPACE_S)
        finally:
            with self._bulk_lock:
                self._spaces.discard(space)

    def load(self, message: m.Call | m.Create | m.Reply, frames: Sequence[Any] = ()) -> Any:
        """Unpickles the body of a message, with what came beside it."""
        bulk = message.bulk
        if bulk is None:
            return loads(message.body, frames)
        owner, pid, fd, segment, spans = bulk
        ref = BulkRef(pid, fd, segment, tuple((offset, length) for offset, length in spans))
        self._bulk_owners[pid] = owner
        with self._bulk_lock:
            self._mapped += 1
            sweeping, self._sweeping = self._sweeping, True
        if not sweeping:
            # For what is let go of while this process sends nothing.
            self.pump.call_later(_SWEEP, self._sweep)
        return loads(message.body, self.mappings.open(ref))

    def _on_release(self, what: tuple[int, int]) -> None:
        # May run in a garbage collection, in the middle of anything: so it only takes note.
        self.releases.append(what)

    def _sweep(self) -> None:
        self.settle()
        with self._bulk_lock:
            self._sweeping = again = self._mapped > 0
        if again:
            self.pump.call_later(_SWEEP, self._sweep)

    def settle(self) -> None:
        """Does what was put off: tells the owners of shared memory what is not used here any more, and the like."""
        while self.deferred:
            try:
                action = self.deferred.popleft()
            except IndexError:
                # Another thread does it.
                break
            action()
        if self.releases:
            self._send_releases()

    def _send_releases(self) -> None:
        owners: dict[str, list[int]] = {}
        while self.releases:
            try:
                pid, segment = self.releases.popleft()
            except IndexError:
                break
            owners.setdefault(self._bulk_owners[pid], []).append(segment)
        with self._bulk_lock:
            self._mapped -= sum(map(len, owners.values()))
        for owner, segments in owners.items():
            if owner == self.proc:
                self._on_released(m.Release(owner, segments), ())
            else:
                self.peer(owner).send(m.encode(m.Release(self.proc, segments)))

    def _on_released(self, release: m.Release, _: Sequence[Any]) -> None:
        for segment in release.segments:
            self.segments.release(segment, release.src)
        self._tell_of_space()

    def forget_holder(self, proc: str) -> None:
        """A receiver has died: what it held is free."""
        self.segments.forget(proc)
        self._tell_of_space()

    def _tell_of_space(self) -> None:
        """Wakes all that wait for room in shared memory, if there is some."""
        if self._spaces and not self.segments.over_limit:
            with self._bulk_lock:
                spaces = list(self._spaces)
            for space in spaces:
                self.pump.notify(cast("Waiter", space))


class Lending:
    """Lends memory of GPUs, when there is some to lend: what does it is on a floor above this one, and needs torch."""

    def lend(self, tensor: Any, receivers: Sequence[str]) -> Any:
        return function_of(f"{_LENDING}:lend")(tensor, receivers)

    def cancel(self, reduced: Any) -> None:
        function_of(f"{_LENDING}:cancel")(reduced)


class _Space:
    """Room in shared memory."""

    __slots__ = ("_segments", "thread")

    def __init__(self, segments: Segments) -> None:
        self._segments = segments
        self.thread: Any = None

    @property
    def done(self) -> bool:
        return not self._segments.over_limit
