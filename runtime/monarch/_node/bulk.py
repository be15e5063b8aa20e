"""Large arguments and results of one process: written into shared memory once, mapped by each receiver."""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Sequence
from threading import RLock
from typing import TYPE_CHECKING, Any, cast

from monarch._node.services.registry import declared
from monarch._wire import messages as m
from monarch._wire.bulk.mappings import Mappings
from monarch._wire.bulk.segments import BulkRef, Segments
from monarch._wire.pickling import loads

if TYPE_CHECKING:
    from collections.abc import Callable

    from monarch._wire.receiving.loop import ReceiveLoop, Waiter

_SWEEP = 0.5
"""Seconds between checks for unused shared memory, while some is in use."""
SPACE_S = 2.0
"""Seconds to wait for receivers that hold more shared memory than its bound. They may never release it, so after that
buffers go through the socket."""


class BulkData:
    """The shared memory of one process: segments that it wrote for others, and mapped segments of theirs.

    Args:
        proc: id of this process.
        receive_loop: the receive loop of this process.
        send: sends a message to a process.
    """

    def __init__(self, proc: str, receive_loop: ReceiveLoop, send: Callable[[str, bytes], None]) -> None:
        self._proc = proc
        self._receive_loop = receive_loop
        self._send = send
        self.wait: Callable[[Waiter, float], bool] = receive_loop.wait
        """The wait of a sender for room; set once, before anything is sent."""
        self.segments = Segments()
        # Appended to by garbage collections, in any thread, so no lock.
        self.releases: deque[tuple[int, int]] = deque()
        """Released segments whose owner was not told yet: pid and segment."""
        self.deferred: deque[Callable[[], None]] = deque()
        """Work deferred by garbage collections."""
        self.mappings = Mappings(self._on_release)
        self._lock = RLock()
        self.spaces: set[_Space] = set()
        """Waiters for room; under ``_lock``."""
        self.mapped = 0
        """Messages mapped here from shared memory of others; under ``_lock``."""
        self._sweeping = False
        """Whether the next look for unmapped messages is arranged; under ``_lock``."""
        # By pid; an entry never changes its value.
        self._owners: dict[int, str] = {}

    def put(self, buffers: Sequence[memoryview], receivers: Sequence[str]) -> m.PackedBulk | None:
        """Write large buffers into shared memory, once for all receivers; None if they go through a socket."""
        if self.segments.over_limit and not self._wait_for_space():
            return None
        try:
            ref = self.segments.put(list(buffers), receivers)
        except MemoryError as error:
            cause = error.__cause__
            if isinstance(cause, OSError) and cause.errno in (errno.EMFILE, errno.ENFILE):
                # It takes a descriptor; a socket takes none.
                return None
            raise
        return (self._proc, ref.pid, ref.fd, ref.segment, list(ref.spans))

    def _wait_for_space(self) -> bool:
        """Wait until receivers hold less shared memory than its bound; False on timeout."""
        space = _Space(self.segments)
        with self._lock:
            self.spaces.add(space)
        try:
            return self.wait(space, SPACE_S)
        finally:
            with self._lock:
                self.spaces.discard(space)

    def load(self, message: m.Call | m.Create | m.Reply, frames: Sequence[Any] = ()) -> Any:
        """Unpickle the body of a message with its buffers."""
        return loads(message.body, frames if message.bulk is None or frames else self.open(message.bulk))

    def arrived(self, bulk: m.PackedBulk) -> list[memoryview]:
        """Return the buffers of an answer from shared memory, which outlive its sender; none if they do not fit now."""
        try:
            return self.open(bulk, False)
        except Exception:
            # The reader tries again, and gets the error.
            with self._lock:
                self.mapped -= 1
            return []

    def open(self, bulk: m.PackedBulk, last: bool = True) -> list[memoryview]:
        """Return the buffers of a message from shared memory; no code of the user runs.

        Args:
            bulk: where they are.
            last: whether this is the last try, as in ``Mappings.open``.
        """
        owner, pid, fd, segment, spans = bulk
        ref = BulkRef(pid, fd, segment, tuple((offset, length) for offset, length in spans))
        self._owners[pid] = owner
        with self._lock:
            self.mapped += 1
            sweeping, self._sweeping = self._sweeping, True
        if not sweeping:
            # For segments released while this process sends nothing.
            self._receive_loop.call_later(_SWEEP, self._sweep)
        return self.mappings.open(ref, last)

    def _on_release(self, what: tuple[int, int]) -> None:
        # May run in a garbage collection at any point, so it only takes note.
        self.releases.append(what)

    def _sweep(self) -> None:
        self.settle()
        with self._lock:
            self._sweeping = again = self.mapped > 0
        if again:
            self._receive_loop.call_later(_SWEEP, self._sweep)

    def settle(self) -> None:
        """Do the deferred work, such as telling owners of released segments."""
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
            owners.setdefault(self._owners[pid], []).append(segment)
        with self._lock:
            self.mapped -= sum(map(len, owners.values()))
        for owner, segments in owners.items():
            if owner == self._proc:
                self.released(m.Release(owner, segments), ())
            else:
                self._send(owner, m.encode(m.Release(self._proc, segments)))

    def released(self, release: m.Release, _: Sequence[Any]) -> None:
        """Note that a receiver has released a segment."""
        for segment in release.segments:
            self.segments.release(segment, release.src)
        self._tell_of_space()

    def forget_holder(self, proc: str) -> None:
        """Free the segments of a dead receiver."""
        self.segments.forget(proc)
        self._tell_of_space()

    def _tell_of_space(self) -> None:
        """Wake waiters for room, if there is some."""
        if self.spaces and not self.segments.over_limit:
            with self._lock:
                spaces = list(self.spaces)
            for space in spaces:
                self._receive_loop.notify(cast("Waiter", space))


@declared("exports.export")
def export(tensor: Any, receivers: Sequence[str]) -> Any:
    """Export a GPU tensor to some processes; None if it must be copied."""
    raise NotImplementedError


@declared("exports.cancel")
def cancel(reduced: Any) -> None:
    """Take back an export that was not sent."""
    raise NotImplementedError


class ExportSlot:
    """The slot for exports of GPU memory, implemented on a higher floor, since it needs torch."""

    def export(self, tensor: Any, receivers: Sequence[str]) -> Any:
        return export(tensor, receivers)

    def cancel(self, reduced: Any) -> None:
        cancel(reduced)


class _Space:
    """Room in shared memory."""

    __slots__ = ("_segments", "thread")

    def __init__(self, segments: Segments) -> None:
        self._segments = segments
        self.thread: Any = None

    @property
    def done(self) -> bool:
        return not self._segments.over_limit


class Loading:
    """Unpickles an answer when it is called, as often as that fails.

    Args:
        data: of this process.
        reply: the answer.
        frames: its buffers, if they are not in shared memory.
    """

    __slots__ = ("_data", "_error", "_frames", "_reply")

    def __init__(self, data: BulkData, reply: m.Reply, frames: Sequence[Any]) -> None:
        self._data, self._reply, self._frames = data, reply, frames
        self._error: BaseException | None = None
        """Why its shared memory could not be mapped, which releases it."""

    def __call__(self) -> Any:
        """Return the value, or raise what its unpickling raises."""
        if self._error is not None:
            raise self._error
        if self._reply.bulk is not None and not self._frames:
            try:
                # Kept, as the sender frees its memory once it is dropped here: the next try may have more memory.
                self._frames = self._data.open(self._reply.bulk)
            except Exception as error:
                self._error = error
                raise
        try:
            return loads(self._reply.body, self._frames)
        except MemoryError as error:
            size = len(self._reply.body) + sum(map(len, self._frames))
            raise MemoryError(
                f"out of memory while reading a value of {size >> 20} MiB; free memory, and read the result again"
            ) from error
