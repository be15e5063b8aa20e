"""Unresponsive ranks: alive, but stopped by a signal or in C code that holds the GIL."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from typing import Any

from monarch._core.events import Event
from monarch._core.roster import split_proc
from monarch._node.node_like import NodeLike
from monarch._node.services.frame import ask_frame
from monarch._node.services.registry import request, service
from monarch._procs.os.blocked import cpu_shares, process_state
from monarch._procs.session_folder import host_of
from monarch._wire import messages as m
from monarch._wire.pickling import dumps_whole
from monarch._wire.receiving.aside import tell, tell_error
from monarch._wire.receiving.timers import until_next
from monarch.exceptions import ArgumentError

USUAL = 5.0
"""Seconds without an answer after which a rank counts as unresponsive."""
_EVERY = 1.0
_NOTHING = dumps_whole(())
_STATES = {
    "T": "its process is stopped by a signal (SIGSTOP, or from a terminal)",
    "t": "its process is stopped by a debugger",
    "D": "its process waits in the kernel for a disk or a device",
    "Z": "its process has just ended",
}


_STARVED = 0.5
"""Part of its silence for which a process is ready to run and has no CPU, from which on that is the cause."""


def check_bound(bound: float | None) -> None:
    """Raise ArgumentError for an invalid number of seconds."""
    if bound is not None and not (bound > 0 and math.isfinite(bound)):
        raise ArgumentError(f"silence: expected a number of seconds above 0, got {bound!r}")


class Liveness:
    """Sends heartbeat requests to ranks that calls wait for; their network thread answers.

    Attributes:
        bounds: seconds without an answer after which a rank is reported, by uid of the mesh.
        since: the time of the first unanswered request, by process.
    """

    def __init__(self, node: NodeLike) -> None:
        self._node = node
        self.ticked: Event[[float]] = Event(tell_error)
        """Fires with the time of each check; in the receiving thread."""
        self.changed: Event[[str, str]] = Event(tell_error)
        """A process has become unresponsive, with the predicate, or answers again, with an empty text."""
        self.bounds: dict[str, float] = {}
        self.since: dict[str, float] = {}
        self._asked: dict[str, float] = {}
        self._starved: dict[str, float] = {}
        """Seconds for which each asked process had waited for a CPU by then."""
        self._ticking = False
        self._port = 0
        node.events.proc_died.subscribe(self.forget)

    def watch(self, uid: str, bound: float | None) -> None:
        """Watch a mesh from now on."""
        check_bound(bound)
        self.bounds[uid] = USUAL if bound is None else bound
        if not self._ticking:
            self._ticking = True
            self._node.receive_loop.call_later(until_next(_EVERY, time.monotonic()), self._tick)

    def _tick(self) -> None:
        node, now = self._node, time.monotonic()
        if node.closed:
            return
        self.ticked.tell(now)
        self.ask(node.ports.waited_for(), now)
        for proc, asked in list(self._asked.items()):
            if proc not in self.since and now - asked >= self.bounds.get(split_proc(proc)[0], USUAL):
                self.since[proc] = asked
                # Unknown for processes of other hosts.
                self.changed.tell(proc, self.text(proc))
                lives = "it is alive, and " if proc in node.peers.pids else ""
                self._say(f"{self._title(proc)} {self.text(proc)}; {lives}its calls are waiting")
        node.receive_loop.call_later(until_next(min([_EVERY, *self.bounds.values()]), now), self._tick)

    def ask(self, procs: Iterable[str], now: float) -> None:
        """Ask processes without an open request."""
        node = self._node
        if not self._port:
            self._port = node.ports.open(self)
        for proc in procs:
            if proc not in self._asked and split_proc(proc)[0] in self.bounds and self._listens(proc):
                self._asked[proc] = now
                self._starved[proc] = cpu_shares(node.peers.pids.get(proc, 0))[1]
                node.peers.get(proc).send(ask_frame(node, request(here), self._port))

    def _listens(self, proc: str) -> bool:
        """Return whether a process listens: one that is starting cannot answer."""
        peer = self._node.peers.known.get(proc)
        if peer is None or peer.starting:
            return False
        return host_of(proc) != self._node.host or proc in self._node.peers.pids

    def look(self, procs: Sequence[str], patience: float) -> None:
        """Check all now, within some seconds."""
        begun = time.monotonic()
        self.ask(procs, begun)
        waiting = _Answers(self, set(procs) & self._asked.keys())
        self._looks = waiting
        self._node.receive_loop.wait(waiting, patience)
        for proc in waiting.left():
            if proc not in self.since:
                self.since[proc] = self._asked.get(proc, begun)
                self.changed.tell(proc, self.text(proc))

    _looks: _Answers | None = None

    def reply(self, reply: m.Reply, frames: Any) -> None:
        """Note an answer."""
        self._asked.pop(reply.src, None)
        since = self.since.pop(reply.src, None)
        if since is not None and time.monotonic() - since >= self.bounds.get(split_proc(reply.src)[0], USUAL):
            self._say(f"{self._title(reply.src)} answers again")
        if since is not None:
            self.changed.tell(reply.src, "")
        if self._looks is not None and self._looks.done:
            self._node.receive_loop.notify(self._looks)

    def asks(self, proc: str) -> bool:
        """Return whether a process has been asked and has not answered."""
        return proc in self._asked

    def forget(self, proc: str) -> None:
        """Forget a process that has died."""
        for table in (self._asked, self.since, self._starved):
            table.pop(proc, None)

    def text(self, proc: str) -> str:
        """Describe an unresponsive process; empty for others."""
        since = self.since.get(proc)
        if since is None:
            return ""
        pid = self._node.peers.pids.get(proc, 0)
        why = ""
        seconds = time.monotonic() - since
        if state := process_state(pid):
            starved = cpu_shares(pid)[1] - self._starved.get(proc, 0.0) > _STARVED * seconds
            usual = (
                "it gets no CPU, since this machine is overloaded" if starved else "it is in C code that holds the GIL"
            )
            why = _STATES.get(state, usual)
        return f"has not answered for {seconds:.1f} s" + (f": {why}" if why else "")

    def _title(self, proc: str) -> str:
        uid, rank = split_proc(proc)
        return f"rank {rank} of {self._node.names.get(uid, uid)}"

    def _say(self, text: str) -> None:
        tell(f"monarch: {text}")


class _Answers:
    """Waits for the answers of some processes."""

    def __init__(self, silence: Liveness, procs: set[str]) -> None:
        self._silence = silence
        self._procs = procs
        self.thread: Any = None

    def left(self) -> list[str]:
        return [proc for proc in self._procs if self._silence.asks(proc)]

    @property
    def done(self) -> bool:
        return not self.left()


@service("liveness.here", "quick")
def here() -> None:
    """Service: do nothing; an answer shows that the process is responsive."""
