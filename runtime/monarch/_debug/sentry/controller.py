"""The sentries of a program: they compare the fingerprints that ranks send, and report what they find."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable
from threading import Lock
from typing import NamedTuple

from monarch._core.digests.divergence import Divergence, Sample, Sentry
from monarch._core.roster import split_proc
from monarch._core.telemetry.events import Diverged
from monarch._node.current import current_node
from monarch._node.node import Node
from monarch._node.services.registry import service
from monarch._telemetry.collector import Collector

_MOST = 64
"""Sentries that are kept."""
_OVERDUE_S = 2.0
"""Seconds that NaN or Inf of a rank waits for the samples of the others."""


class Sent(NamedTuple):
    """A sample as it is sent."""

    step: int
    names: list[tuple[str, str]] | None
    """None if they are those of the sample before."""
    marks: list[int]
    strange: dict[int, str]


class SentryState(NamedTuple):
    """The state of a sentry."""

    name: str
    last: int
    """The last step that was compared; 0 if none was."""
    compared: int
    """Steps that were compared."""
    found: list[Divergence]


class Sentries:
    """The sentries of this program. Thread-safe."""

    def __init__(self, node: Node) -> None:
        self._node = node
        # Guards the two below; held briefly, while no other code runs.
        self._lock = Lock()
        self._sentries: OrderedDict[tuple[str, str], Sentry] = OrderedDict()
        """By mesh and key of the watch."""
        self._names: dict[tuple[str, str, int], list[tuple[str, str]]] = {}
        """The tensors of a rank, also by its number."""
        self.tell: Callable[[str], object] = lambda text: print(text, file=sys.stderr)
        """Shows a line to the user; set once by a notebook."""

    def take(self, proc: str, key: str, name: str, count: int, sent: Sent) -> None:
        """Take a sample of a rank.

        Args:
            proc: the proc of the rank.
            key: the key of the watch; one that is begun again has another.
            name: the name of what is watched.
            count: the number of ranks that are compared.
            sent: the sample.
        """
        uid, rank = split_proc(proc)
        with self._lock:
            sentry = self._sentries.get((uid, key))
            if sentry is None:
                sentry = self._sentries[uid, key] = Sentry(name, count)
                if len(self._sentries) > _MOST:
                    self._forget(*next(iter(self._sentries)))
            names = self._names[uid, key, rank] = sent.names or self._names.get((uid, key, rank), [])
            found = sentry.take(rank, Sample(sent.step, names, sent.marks, sent.strange))
        self._report(uid, found)
        if sent.strange and not sentry.found:
            self._node.receive_loop.call_later(_OVERDUE_S, lambda: self._look_soon(uid, key))

    def _look_soon(self, uid: str, key: str) -> None:
        self._node.lanes.post("sentry", lambda: self._look(uid, key))

    def _look(self, uid: str, key: str) -> None:
        with self._lock:
            sentry = self._sentries.get((uid, key))
            found = sentry.overdue() if sentry is not None else []
        self._report(uid, found)

    def _report(self, uid: str, found: list[Divergence]) -> None:
        for each in found:
            log = self._node.part(Collector).log_of(uid)
            if log is not None:
                log.add(Diverged(each.watch, tuple(each.ranks), each.step, each.text))
            self.tell(str(each))

    def end(self, uid: str, key: str) -> None:
        """Forget a sentry."""
        with self._lock:
            self._forget(uid, key)

    def _forget(self, uid: str, key: str) -> None:
        self._sentries.pop((uid, key), None)
        for each in [each for each in self._names if each[:2] == (uid, key)]:
            del self._names[each]

    def watched(self, uid: str, key: str) -> SentryState | None:
        """Return the state of a sentry; None before its first sample."""
        with self._lock:
            sentry = self._sentries.get((uid, key))
            if sentry is None:
                return None
            return SentryState(sentry.watch, sentry.last, sentry.compared, list(sentry.found))


@service("sentry.take", "threaded")
def take(proc: str, key: str, name: str, count: int, sent: Sent) -> None:
    """Service of a program: compare a sample of a rank; see ``Sentries.take``."""
    current_node().part(Sentries).take(proc, key, name, count, Sent(*sent))


@service("sentry.note", "threaded")
def note(proc: str, text: str) -> None:
    """Service of a program: show a line about a watch."""
    current_node().part(Sentries).tell(f"rank {split_proc(proc)[1]}: {text}")
