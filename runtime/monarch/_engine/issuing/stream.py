"""The ops of one mesh on their way to its ranks: collected, sent in batches, and what has become of them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from typing import Any, Protocol

from monarch._engine.issuing.encoding import NEW, Entry, Template, pack
from monarch._engine.issuing.observer import current
from monarch._engine.layouts.layout import Layout
from monarch._engine.layouts.rank_layout import RankLayout
from monarch._meshes.inside import node_of
from monarch._wire.deferred_signals import DeferredSignals
from monarch.exceptions import DeviceMeshError, MonarchError

BATCH = 64
"""Entries after which a batch is sent."""
_SOON = 0.004
"""Seconds after which a batch is sent that is not full."""
_IN_FLIGHT = 64
"""Batches that the ranks may be behind; a program that is faster waits."""

_LOOK_S = 0.05
"""Seconds before the first look at what batches have answered, if the program sends no more."""
_LATE_S = 1.0
"""Seconds between looks if the ranks take long."""
_WAIT_S = 600.0
"""Seconds to wait for other threads that send."""
_TURN = 0.1
"""Seconds that the main thread waits for the lock before it runs handlers of signals, and waits again."""
_MAIN = threading.main_thread().ident
_signals = DeferredSignals(lambda: None)
"""Defers handlers of signals while a batch is sent. Main thread only."""
_numbers = count(1)
"""References, unique in the program: ranks of overlapping slices keep theirs in one table."""


def new_number() -> int:
    """Return a number that no reference has."""
    return next(_numbers)


class _Lock(Protocol):
    def acquire(self, *, timeout: float = -1) -> bool: ...

    def release(self) -> None: ...


class _Locks:
    """Several locks, as one."""

    def __init__(self, locks: list[_Lock]) -> None:
        self._locks = locks

    def acquire(self, *, timeout: float = -1) -> bool:
        """Take all of them, or none if one is not free in time."""
        for position, lock in enumerate(self._locks):
            if not lock.acquire(timeout=timeout):
                for each in self._locks[:position]:
                    each.release()
                return False
        return True

    def release(self) -> None:
        """Let go of them."""
        for each in self._locks:
            each.release()


@contextmanager
def _quiet(lock: _Lock) -> Generator[None]:
    """Hold a lock. The program's handlers of signals run before or after, so that they may use tensors too.

    A Stop in the middle would also reach some ranks with a batch, and others without.
    """
    if threading.get_ident() != _MAIN:
        lock.acquire()
        try:
            yield
        finally:
            lock.release()
        return
    held = _signals.begin()
    try:
        while not lock.acquire(timeout=_TURN):
            _signals.end_and_run(held)
            held = _signals.begin()
        try:
            yield
        finally:
            lock.release()
    finally:
        _signals.end_and_run(held)


class Ref:
    """A reference to a tensor on the ranks, which forget it when this is garbage."""

    __slots__ = ("__weakref__", "number", "stream")

    def __init__(self, stream: OpStream, layout: Layout | RankLayout) -> None:
        self.stream = stream
        self.number = number = next(_numbers)
        stream.live[number] = layout

    def __del__(self) -> None:
        # Runs in any thread and also while a lock is held, so it only appends.
        # torch.compile makes references without a stream.
        stream = getattr(self, "stream", None)
        if stream is None:
            return
        stream.live.pop(self.number, None)
        stream.pending.append(self.number)


class ProgramOrder:
    """Keeps the ops of all slices of a mesh of processes in the order of the program, since they share ranks.

    Attributes:
        last: the stream that issued the last op. Any thread sets it: ops of several threads have no order.
        streams: the streams of all slices. Only grows; single operations, from any thread.
        epoch: how often the ranks have begun to run ops again. Written while ``held``.
        kept: functions that some ranks have kept, and nobody waits for, with the stream of each; single operations of a
            deque, from any thread.
    """

    def __init__(self) -> None:
        self.last: OpStream | None = None
        self.streams: list[OpStream] = []
        self.epoch = 0
        self.kept: deque[tuple[OpStream, Any]] = deque()

    def ask_kept(self) -> None:
        """Ask for the results of functions that ranks have kept, as these run now."""
        with suppress(IndexError):
            while True:
                stream, function = self.kept.popleft()
                with suppress(MonarchError):
                    # A death is told by the next look.
                    function.ask_again()
                    stream.follow(function)

    @contextmanager
    def held(self) -> Generator[None]:
        """Let other threads send no ops in a block, so that a message comes between the same ops on all ranks."""
        with ExitStack() as stack:
            for stream in list(self.streams):
                stack.enter_context(stream.held(_WAIT_S))
            yield

    @contextmanager
    def together(self) -> Generator[None]:
        """Let messages to several ranks come between the same ops on all, and reach all of them or none."""
        with _quiet(_Locks([stream.lock for stream in list(self.streams)])):
            yield

    def next(self, stream: OpStream) -> None:
        """Send what the stream before has not sent yet."""
        last, self.last = self.last, stream
        if last is not None:
            with suppress(DeviceMeshError):
                # Told by the next look.
                last.flush(wait=False)


class OpStream:
    """The ops of one mesh or slice, in the order in which the program issues them.

    Args:
        actors: the executors on the ranks of the mesh.
        order: the order of all slices of the mesh of processes.
    """

    def __init__(self, actors: Any, order: ProgramOrder | None = None) -> None:
        self.actors = actors
        self.order = order or ProgramOrder()
        self.pending: deque[Entry] = deque()
        """Entries that were not sent. Any thread appends; ``flush`` takes, with the lock."""
        self.live: dict[int, Layout | RankLayout] = {}
        """Layouts of the tensors that the program holds, by reference; single operations of a dict, from any thread."""
        self.order.streams.append(self)
        self.sent: deque[tuple[Any, int]] = deque()
        """Futures of batches that may be running, oldest first, with the epoch. Lock: ``lock``."""
        self.on_done: Callable[[Any, int], None] = lambda future, epoch: None
        """Called with the future of each batch that is done, and its epoch, in any thread. Set once."""
        self.on_looked: Callable[[], bool] = lambda: False
        """Called in a thread that may not wait after it has looked at what batches have answered; returns whether to
        look again. Set once."""
        self._is_watched = False
        """Whether a timer will look at what batches have answered. Lock: ``lock``."""
        self.templates: dict[int, Template] = {}
        """All templates by number; single operations of a dict."""
        self._retired: dict[int, int] = {}
        """Templates that are of no use once another one was sent, by the number of that one. Likewise."""
        self._known: set[int] = set()
        """Templates that the ranks have. Lock: ``lock``."""
        self._next_template = count(1)
        self.lock = threading.RLock()
        """Held while a batch is sent, so that batches stay in order."""
        self._scheduled = False
        """Whether a timer will send what is pending. Set with an append, cleared by the sender."""
        self._node = node_of(actors)

    def tensors(self) -> list[tuple[int, Layout | RankLayout]]:
        """Return the tensors that the program holds, by reference."""
        while True:
            # Until Python 3.11 a garbage collection in the middle may drop some.
            with suppress(RuntimeError):
                return list(self.live.items())

    def template(self, template: Template) -> int:
        """Return the number of a new template."""
        number = next(self._next_template)
        self.templates[number] = template
        return number

    def retire(self, number: int, last: Template, values: tuple[Any, ...]) -> None:
        """Append a last op, after which a template is of no use. Only appends: runs in any thread, with any lock."""
        final = self.template(last)
        self._retired[final] = number
        self.pending.append((final, (), values, (), 0))

    def issue(
        self, number: int, inputs: tuple[int, ...], values: tuple[Any, ...], outputs: tuple[int, ...], line: int
    ) -> None:
        """Append an op. It is sent with a batch, or after some milliseconds."""
        observer = current.observer
        if observer is not None:
            values = observer.issued(self, number, inputs, values, outputs, line)
        if self.order.last is not self:
            self.order.next(self)
        pending = self.pending
        pending.append((number, inputs, values, outputs, line))
        if len(pending) >= BATCH:
            self.flush()
        elif not self._scheduled:
            self._scheduled = True
            self._node.receive_loop.call_later(_SOON, self._post)

    def _post(self) -> None:
        """Send in a thread that may wait; the receiving thread must not."""
        self._node.lanes.post("tensors", self._send_late)

    def _send_late(self) -> None:
        try:
            self.flush(wait=False)
        except Exception as error:
            # The program is told at its next op or look, which asks again.
            del error

    def flush(self, wait: bool = True) -> None:
        """Send what is pending.

        Args:
            wait: whether to wait if the ranks are far behind.

        Raises:
            DeviceMeshError: a rank has died.
        """
        with _quiet(self.lock):
            self._send()
            self._collect()
            late = [self.sent.popleft()] if wait and len(self.sent) > _IN_FLIGHT else []
        for future, epoch in late:
            future.exception()
            self.on_done(future, epoch)

    def _collect(self) -> None:
        """Look at what batches have answered, with the lock."""
        while self.sent and self.sent[0][0].done:
            self.on_done(*self.sent.popleft())

    def _watch(self, after: float) -> None:
        """Look some time later at what batches have answered, with the lock."""
        self._is_watched = True

        def post() -> None:
            self._node.lanes.post("tensors", lambda: self._look(after))

        self._node.receive_loop.call_later(after, post)

    def _look(self, after: float) -> None:
        """Look at what batches have answered, and again while some have not; in a thread of its own."""
        with self.lock:
            self._collect()
            self._is_watched = False
            again = bool(self.sent)
        again = self.on_looked() or again
        with self.lock:
            if again and not self._is_watched:
                self._watch(min(_LATE_S, after * 2))

    def _send_batch(self, batch: list[Entry]) -> None:
        try:
            future = self.actors.run.call(pack(batch))
            future.rename("the ops on tensors")
            self.sent.append((future, self.order.epoch))
            if not self._is_watched:
                self._watch(_LOOK_S)
        except Exception:
            # Nothing was sent: a rank has died. Healing cancels the ops, see meshes/healing.py.
            self.pending.extendleft(reversed([each for each in batch if isinstance(each, int) or each[0] != NEW]))
            self._known.clear()
            raise

    def take_ops(self) -> list[tuple[Any, ...]]:
        """Return the ops that were not sent, which are forgotten."""
        with self.lock:
            entries = [self.pending.popleft() for _ in range(len(self.pending))]
            self.pending.extend(each for each in entries if isinstance(each, int))
            return [each for each in entries if not isinstance(each, int)]

    @contextmanager
    def held(self, wait_s: float) -> Generator[None]:
        """Let other threads send nothing in a block.

        Args:
            wait_s: seconds to wait for a thread that sends.

        Raises:
            DeviceMeshError: it has not ended.
        """
        if not self.lock.acquire(timeout=wait_s):
            raise DeviceMeshError(
                f"another thread has been sending ops on tensors for {wait_s:.0f} s; interrupt it, or restart the mesh"
            )
        try:
            yield
        finally:
            self.lock.release()

    def _send(self) -> None:
        """Send what is pending, with the lock."""
        self._scheduled = False
        batch: list[Entry] = []
        pending, known = self.pending, self._known
        while pending:
            entry = pending.popleft()
            if not isinstance(entry, int) and entry[0] not in known:
                known.add(entry[0])
                batch.append((NEW, entry[0], self.templates[entry[0]]))
            batch.append(entry)
        if batch:
            self._send_batch(batch)
        for entry in batch if self._retired else ():
            if not isinstance(entry, int) and entry[0] in self._retired:
                self.templates.pop(self._retired.pop(entry[0]), None)
                self.templates.pop(entry[0], None)

    def follow(self, future: Any) -> None:
        """Read later how the ranks have answered a function."""
        with _quiet(self.lock):
            self.sent.append((future, self.order.epoch))
            if not self._is_watched:
                self._watch(_LOOK_S)

    def forget_ranks(self) -> None:
        """Send all templates again, since some ranks are new."""
        with self.lock:
            self._known.clear()
