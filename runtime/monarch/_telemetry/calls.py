"""The calls of a process, written to the logs of their meshes.

Sending a call only notes when. Calls that are pending at the next look, at most five seconds later, are written with
their answers as they come. Of those that have ended by then some are written, and the rest are counted: a loop of quick
calls costs little and does not fill the log.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from time import time
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

from monarch._core.roster import split_proc
from monarch._core.telemetry.calling import calling
from monarch._core.telemetry.events import CallAnswered, CallsSkipped, CallStarted, CallWaits
from monarch._telemetry.lives import Lives
from monarch._telemetry.mesh_telemetry import MeshTelemetry

if TYPE_CHECKING:
    from monarch._node.peers.peer import Peer
    from monarch._node.peers.port_table import PortTable

LISTED = 25
"""Calls between two looks that are written even if they have ended at the second."""
_MANY = 256
"""Ranks of a call that count as another call, since each takes time to write."""
_ERRORS = 1000
"""Calls whose errors are kept until they are in the log."""
_WAITING = 10_000
"""Pending calls that one look writes: the newest; others are counted until the next one. Also the errors and the ends
noted between two looks."""


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
    ranks: dict[str, int]
    """By proc id."""


class _Open:
    """A pending call that is in the log."""

    def __init__(self, number: int, log: MeshTelemetry, sent: _Sent) -> None:
        self.number = number
        self.log = log
        self.call = sent.call
        self.left = sent.ranks
        """By proc id, the ranks that have not answered."""


class ProcessCalls:
    """The calls of a process; see ``Collector`` for who may use what.

    Args:
        lives: by uid, of the meshes with a log.
        ports: the ports of the process.
    """

    def __init__(self, lives: Mapping[str, Lives], ports: PortTable) -> None:
        self._lives = lives
        self._ports = ports
        # Both: appended by the threads that send, taken by the thread that looks.
        self._listed: deque[_Sent] = deque()
        """Calls that are written even if they have ended."""
        self._passed: deque[Sequence[Peer]] = deque()
        """The targets of the other calls: nothing is made for them, and no result is kept."""
        # By the receiving thread, taken by the one that looks: port and rank of errors, and the errors.
        self._failed: deque[tuple[int, int, _Error]] = deque(maxlen=_WAITING)
        # Likewise: port of the call, and the reason.
        self._waits: deque[tuple[int, str]] = deque(maxlen=_WAITING)
        # By any thread: ports of written calls that have been closed, and when.
        self._closed: deque[tuple[int, float]] = deque(maxlen=_WAITING)
        # Looking thread only, like the next four.
        self._open: dict[int, _Open] = {}
        self._errors: dict[int, dict[int, _Error]] = {}
        """By port and rank, the errors of calls, the newest ones: an error may be noted before its call."""
        self._last = 0
        self._room = LISTED
        """How many more calls are written before the next look, even if they end before it; a hint."""
        self._skipped: dict[str, int] = {}
        """By uid, the calls that were passed over and not written; below 0 if one was counted and then
        written: the next one makes up for it."""
        self.wake = _nothing
        """Called after a call was sent, while ``asleep``. Set once."""
        self.asleep = True
        """Whether the thread that looks must be woken; a hint, so that most notes cost no system call."""

    @property
    def are_open(self) -> bool:
        """Whether there is something to look at."""
        return bool(self._open or self._listed or self._passed)

    def sent(self, call: Any) -> None:
        """Note a call, in the thread that sends it."""
        if self._room > 0:
            self._room -= 1 + len(call.targets) // _MANY
            # The call may be gone at the next look, and must not be kept: it holds its results.
            self._listed.append(_sent(call, time(), calling.get()))
            self._follow_port(call.port)
        else:
            self._passed.append(call.targets)
            call.title = calling.get()
            # Last: the thread that looks takes the call by it.
            call.sent_at = time()
        if self.asleep:
            self.wake()

    def closed(self, port: int) -> None:
        """Note the end of a call; in the thread that completes it."""
        self._closed.append((port, time()))

    def _follow_port(self, port: int) -> None:
        if not self._ports.follow(port):
            self.closed(port)

    def failed(self, port: int, rank: int, error: str, stopped: bool) -> None:
        """Note that a rank answered a call with an error; in the receiving thread."""
        self._failed.append((port, rank, _Error(error, stopped)))

    def waits(self, port: int, reason: str) -> None:
        """Note why ranks of a call wait, or that they no longer do; in the receiving thread."""
        self._waits.append((port, reason))

    def look(self, held: list[Any]) -> None:
        """Write what has happened since the last look.

        Args:
            held: takes the calls that were looked at, to be dropped when no lock is held.
        """
        for _ in range(len(self._listed)):
            self._begin(self._listed.popleft())
        passed = [self._passed.popleft() for _ in range(len(self._passed))]
        for proc, run in groupby(passed, _first):
            self._skip(proc, len(list(run)))
        for call in self._pending():
            held.append(call)
            sent = _sent(call, call.sent_at, call.title)
            # It is written once.
            call.sent_at = 0.0
            self._skip(sent.proc, -1)
            self._begin(sent)
            self._follow_port(sent.port)
        self._write_skipped()
        for _ in range(len(self._waits)):
            port, reason = self._waits.popleft()
            if port in self._open:
                self._open[port].log.add(CallWaits(self._open[port].number, reason))
        ends = dict(self._closed.popleft() for _ in range(len(self._closed)))
        for port in list(self._open):
            self._follow(port, ends.get(port, 0.0), held)
        self._note_errors()
        while len(self._errors) > _ERRORS:
            del self._errors[next(iter(self._errors))]
        self._room = LISTED

    def _pending(self) -> Iterator[Any]:
        """Yield the newest pending calls that were passed over."""
        calls = [call for call in list(self._ports.gathers.values()) if getattr(call, "sent_at", 0.0)]
        return (call for call in calls[-_WAITING:] if not call.done)

    def _skip(self, proc: str, count: int) -> None:
        """Count calls that were not written, by a process that they were sent to."""
        uid = split_proc(proc)[0]
        self._skipped[uid] = self._skipped.get(uid, 0) + count

    def _write_skipped(self) -> None:
        for uid, count in list(self._skipped.items()):
            if uid not in self._lives:
                del self._skipped[uid]
            elif count > 0:
                del self._skipped[uid]
                self._lives[uid].log.add(CallsSkipped(count))

    def _begin(self, sent: _Sent) -> None:
        """Write a call."""
        lives = self._lives.get(split_proc(sent.proc)[0])
        if lives is None:
            return
        self._last += 1
        title, cell = sent.title
        lives.log.add(CallStarted(self._last, title, cell, tuple(sent.ranks.values())), sent.when)
        self._open[sent.port] = _Open(self._last, lives.log, sent)

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


def _sent(call: Any, when: float, title: tuple[str, int]) -> _Sent:
    if not title[0]:
        title = (call.label.removesuffix("()"), title[1])
    return _Sent(ref(call), call.port, when, title, call.targets[0].proc, _ranks_of(call))


def _first(targets: Sequence[Peer]) -> str:
    return targets[0].proc


def _nothing() -> None:
    pass
