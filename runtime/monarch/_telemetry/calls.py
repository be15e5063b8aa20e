"""The calls of a process, written to the logs of their meshes.

Sending a call only notes it. Calls that are pending at the next look, at most two seconds later, are written with their
answers as they come. Of those that have ended by then some are written, and the rest are counted: a loop of quick calls
costs little and does not fill the log.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple
from weakref import ref

from monarch._core.roster import split_proc
from monarch._core.telemetry.calling import calling
from monarch._core.telemetry.events import CallAnswered, CallsSkipped, CallStarted
from monarch._telemetry.lives import Lives
from monarch._telemetry.mesh_telemetry import MeshTelemetry

LISTED = 10
"""Calls between two looks that are written even if they have ended at the second."""
_MANY = 256
"""Ranks of a call that count as another call, since each takes time to write."""
_ERRORS = 1000
"""Calls whose errors are kept until they are in the log."""
_WAITING = 10_000
"""Calls noted between two looks; more are counted only."""


class _Error(NamedTuple):
    text: str
    """First line; empty for none."""
    stopped: bool
    """Whether the call was only ended from outside: by an interrupt, or because of other ranks."""


_NONE = _Error("", False)
_UNANSWERED = _Error("the call ended before its answer", True)


class _Sent(NamedTuple):
    call: ref[Any]
    port: int
    when: float
    title: tuple[str, int]
    proc: str
    """A process that it was sent to."""
    ranks: dict[str, int] | None
    """By proc id; None if it is not to be written unless it is pending at the next look."""


class _Open:
    """A pending call that is in the log."""

    def __init__(self, number: int, log: MeshTelemetry, sent: _Sent, ranks: dict[str, int]) -> None:
        self.number = number
        self.log = log
        self.call = sent.call
        self.left = ranks
        """By proc id, the ranks that have not answered."""


class Calls:
    """The calls of a process; see ``Collector`` for who may use what.

    Args:
        lives: by uid, of the meshes with a log.
    """

    def __init__(self, lives: Mapping[str, Lives]) -> None:
        self._lives = lives
        # Appended by the threads that send, taken by the thread that looks; bounded, and what falls out is counted.
        self._sent: deque[_Sent] = deque(maxlen=_WAITING)
        # By the receiving thread, taken by the one that looks: port and rank of errors, and the errors.
        self._failed: deque[tuple[int, int, _Error]] = deque(maxlen=_WAITING)
        # By any thread: ports that have been closed, and when.
        self._closed: deque[tuple[int, float]] = deque(maxlen=_WAITING)
        # Looking thread only, like the next three.
        self._open: dict[int, _Open] = {}
        self._errors: dict[int, dict[int, _Error]] = {}
        """By port and rank, the errors of calls, the newest ones: an error may be noted before its call."""
        self._last = 0
        self._room = LISTED
        """How many more calls are written before the next look, even if they end before it; a hint."""
        self.active = False
        """Whether meshes were spawned from here; set once, before the first call."""
        self.wake = _nothing
        """Called after a call was sent. Set once."""

    @property
    def are_open(self) -> bool:
        """Whether there is something to look at."""
        return bool(self._open or self._sent)

    def sent(self, call: Any) -> None:
        """Note a call, in the thread that sends it."""
        if not self.active:
            return
        title, ranks = calling.get(), None
        if self._room > 0:
            # The call may be gone at the next look, and must not be kept: it holds its results.
            self._room -= 1 + len(call.targets) // _MANY
            ranks = _ranks_of(call)
            title = title if title[0] else (_title_of(call), title[1])
        self._sent.append(_Sent(ref(call), call.port, time.time(), title, call.targets[0].proc, ranks))
        self.wake()

    def closed(self, port: int) -> None:
        """Note the end of a call; in the thread that completes it."""
        if self.active:
            self._closed.append((port, time.time()))

    def failed(self, port: int, rank: int, error: str, stopped: bool) -> None:
        """Note that a rank answered a call with an error; in the receiving thread."""
        self._failed.append((port, rank, _Error(error, stopped)))

    def look(self, held: list[Any]) -> None:
        """Write what has happened since the last look.

        Args:
            held: takes the calls that were looked at, to be dropped when no lock is held.
        """
        skipped: dict[str, int] = {}
        for _ in range(len(self._sent)):
            sent = self._sent.popleft()
            uid = split_proc(sent.proc)[0]
            if uid in self._lives and not self._begin(sent, self._lives[uid].log, held):
                skipped[uid] = skipped.get(uid, 0) + 1
        for uid, count in skipped.items():
            self._lives[uid].log.add(CallsSkipped(count))
        ends = dict(self._closed.popleft() for _ in range(len(self._closed)))
        for port in list(self._open):
            self._follow(port, ends.get(port, 0.0), held)
        self._note_errors()
        while len(self._errors) > _ERRORS:
            del self._errors[next(iter(self._errors))]
        self._room = LISTED

    def _begin(self, sent: _Sent, log: MeshTelemetry, held: list[Any]) -> bool:
        """Write a call, and return whether it was."""
        ranks, (title, cell) = sent.ranks, sent.title
        if ranks is None:
            call = sent.call()
            held.append(call)
            if call is None or call.done:
                return False
            ranks, title = _ranks_of(call), title or _title_of(call)
        self._last += 1
        log.add(CallStarted(self._last, title, cell, tuple(ranks.values())), sent.when)
        self._open[sent.port] = _Open(self._last, log, sent, ranks)
        return True

    def _note_errors(self) -> None:
        while self._failed:
            port, rank, error = self._failed.popleft()
            self._errors.setdefault(port, {})[rank] = error

    def _follow(self, port: int, end: float, held: list[Any]) -> None:
        """Write the new answers to a call; ``end`` is when it ended, 0 if that is not known."""
        pending = self._open[port]
        call = pending.call()
        held.append(call)
        by_error: dict[_Error, list[int]] = {}
        ended = call is None or call.done
        waiting = {peer.proc: peer.dead for peer in call.waits_for()} if call is not None else {}
        # Only now: a rank that has just answered has told its error before.
        self._note_errors()
        errors = self._errors.get(port, {})
        for proc, rank in list(pending.left.items()):
            if ended or proc not in waiting:
                del pending.left[proc]
                dead = waiting.get(proc)
                # A rank that lives was not heard to the end, for example because another one has died.
                error = _Error(dead.reason, False) if dead is not None else _UNANSWERED
                error = error if proc in waiting else errors.get(rank, _NONE)
                by_error.setdefault(error, []).append(rank)
        for error, ranks in by_error.items():
            pending.log.add(CallAnswered(pending.number, tuple(ranks), error.text, error.stopped), end)
        if not pending.left:
            del self._open[port]
            self._errors.pop(port, None)


class _Known(NamedTuple):
    """The ranks of some targets, which never change."""

    targets: Any
    ranks: dict[str, int]


_known = _Known(None, {})
"""Of the last call: most calls of a program go to the same ranks. Any thread sets it, as a whole."""


def _ranks_of(call: Any) -> dict[str, int]:
    global _known
    known = _known
    if known.targets is not call.targets:
        known = _known = _Known(call.targets, {peer.proc: split_proc(peer.proc)[1] for peer in call.targets})
    return dict(known.ranks)


def _title_of(call: Any) -> str:
    return call.label.removesuffix("()")


def _nothing() -> None:
    pass
