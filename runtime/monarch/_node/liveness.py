"""Unresponsive ranks: alive, but stopped by a signal or in C code that holds the GIL."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from monarch._core.events import Event
from monarch._core.roster import split_proc
from monarch._core.shapes.ranks import describe_ranks
from monarch._node.node_like import NodeLike
from monarch._node.peers.peer import Peer, RemotePeer
from monarch._node.services.frame import ask_frame, ask_ranks
from monarch._node.services.registry import request, service
from monarch._procs.os.blocked import cpu_shares, other_program, process_state
from monarch._procs.session_folder import host_of
from monarch._wire import messages as m
from monarch._wire.receiving.aside import tell, tell_error
from monarch._wire.receiving.timers import until_next
from monarch.exceptions import ArgumentError

USUAL = 5.0
"""Seconds without an answer after which a rank counts as unresponsive."""
_EVERY = 1.0
_EARLY = 0.5
"""Part of a pause by which a look may come early, with a call: a wake-up of its own would cost more than the look."""
_SAY = 0.05
"""Seconds for which news that a rank answers again waits for that of others."""
_STATES = {
    "T": "its process is stopped by a signal (SIGSTOP, or from a terminal)",
    "t": "its process is stopped by a debugger",
    "D": "its process is blocked in the kernel, waiting for a disk or device",
    "Z": "its process has ended, but the agent of its host has not reported how yet",
}


_MOST = 0.5
"""Part of a time for which a process runs, or is ready to and has no CPU, from which on that is its state."""


def check_bound(bound: float | None) -> None:
    """Raise ArgumentError for an invalid number of seconds."""
    if bound is not None and not (bound > 0 and math.isfinite(bound)):
        raise ArgumentError(f"silence: expected a number of seconds above 0, got {bound!r}")


class _Round:
    """Heartbeat requests to ranks of one mesh on other hosts: one message, passed on from host to host.

    Its port is open until the last of them has answered or died. Receiving thread only, after it was sent.

    Args:
        liveness: told of each process that answers.
        node: the node of this process.
        peers: the ranks of the mesh, by number.
    """

    __slots__ = ("_left", "_liveness", "_node", "port", "targets")

    def __init__(self, liveness: Liveness, node: NodeLike, peers: dict[int, Peer]) -> None:
        self._liveness = liveness
        self._node = node
        self.targets: Mapping[int, Peer] = peers
        """By rank, which answers that were folded on their way name."""
        self._left = set(peers)
        self.port = node.ports.open(self)

    def send(self) -> None:
        """Send the requests."""
        ask_ranks(self._node, request(here), self.port, self.targets.values())

    def reply(self, reply: m.Reply, _: Any) -> None:
        """Note the answer of a rank."""
        rank = split_proc(reply.src)[1]
        self.reply_alike(reply, range(rank, rank + 1))

    def reply_alike(self, _: m.Reply, ranks: range) -> None:
        """Note the answers of ranks."""
        for rank in ranks:
            if rank in self._left:
                self._left.discard(rank)
                self._liveness.answered(self.targets[rank].proc)
        self._close_if_over()

    def forget(self, proc: str) -> None:
        """Expect no answer of a process that has died."""
        rank = split_proc(proc)[1]
        if rank in self.targets and self.targets[rank].proc == proc:
            self._left.discard(rank)
            self._close_if_over()

    def _close_if_over(self) -> None:
        if not self._left:
            self._node.ports.close(self.port)
            self._liveness.rounds.discard(self)


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
        self.rounds: set[_Round] = set()
        """Requests to ranks of other hosts that have not all been answered."""
        self._back: list[str] = []
        """Processes that answer again, of which nobody has been told."""
        self._asked: dict[str, float] = {}
        self._shares: dict[str, tuple[float, float, float]] = {}
        """For each asked process of this host: when its CPU was last looked at, and its ``cpu_shares`` then."""
        self._reported: set[str] = set()
        """Unresponsive processes that a line has named."""
        self._ticking = False
        self._latest = 0
        """The port of the last call at the last look."""
        self._port = 0
        node.events.proc_died.subscribe(self.forget)

    def watch(self, uid: str, bound: float | None) -> None:
        """Watch a mesh from now on."""
        check_bound(bound)
        self.bounds[uid] = USUAL if bound is None else bound
        if not self._ticking:
            self._ticking = True
            self._arrange(time.monotonic())

    def _arrange(self, now: float) -> None:
        """Arrange the next look: after half a pause at least, and one and a half if nothing makes it come early."""
        pause = min([_EVERY, *self.bounds.values()])
        early = _EARLY * pause
        self._node.receive_loop.call_later(until_next(pause, now, early), self._tick, early)

    def _tick(self) -> None:
        if self._node.closed:
            return
        now = time.monotonic()
        try:
            self._check(now)
        finally:
            # After an error too, which the receive loop reports: nobody else would look again.
            self._arrange(now)

    def _check(self, now: float) -> None:
        node = self._node
        self.ticked.tell(now)
        # Not for calls since the last look: in a loop of short calls, nobody need be asked.
        latest, self._latest = self._latest, node.ports.last
        self.ask(node.ports.waited_for(latest), now)
        silent: dict[tuple[str, str, bool], list[int]] = {}
        for proc, asked in list(self._asked.items()):
            uid, rank = split_proc(proc)
            bound = self.bounds.get(uid, USUAL)
            if proc in self._reported or now - asked < bound or self._makes_progress(proc, now, bound):
                continue
            self._reported.add(proc)
            if proc not in self.since:
                self.since[proc] = asked
                self.changed.tell(proc, self.text(proc))
            # Unknown for processes of other hosts.
            lives = proc in node.peers.pids and process_state(node.peers.pids[proc]) != "Z"
            silent.setdefault((uid, self.text(proc), lives), []).append(rank)
        for (uid, text, lives), ranks in silent.items():
            alive = ("it is alive, and " if len(ranks) == 1 else "they are alive, and ") if lives else ""
            each = "" if len(ranks) == 1 else "each of "
            calls = "its calls are waiting" if len(ranks) == 1 else "their calls are waiting"
            self._say(f"{each}{self._title(uid, ranks)} {text}; {alive}{calls}")

    def _makes_progress(self, proc: str, now: float, bound: float) -> bool:
        """Return whether an overdue process computes, or waits for a CPU: that is no reason for an alarm.

        It counts as busy until it has not been for the bound, so a wait after a long computation is reported too.
        """
        if proc not in self._shares or process_state(pid := self._node.peers.pids.get(proc, 0)) in _STATES:
            return False
        begun, ran, waited = self._shares[proc]
        if now - begun < bound:
            return True
        has_run, has_waited = cpu_shares(pid)
        if has_run - ran + has_waited - waited <= _MOST * (now - begun):
            return False
        self._shares[proc] = now, has_run, has_waited
        return True

    def ask(self, procs: Iterable[str], now: float) -> None:
        """Ask processes without an open request."""
        node = self._node
        if not self._port:
            self._port = node.ports.open(self)
        far: dict[str, dict[int, Peer]] = {}
        for proc in procs:
            uid, rank = split_proc(proc)
            if proc not in self._asked and uid in self.bounds and self._listens(proc):
                self._asked[proc] = now
                peer = node.peers.get(proc)
                if isinstance(peer, RemotePeer):
                    far.setdefault(uid, {})[rank] = peer
                    continue
                if pid := node.peers.pids.get(proc, 0):
                    self._shares[proc] = now, *cpu_shares(pid)
                if peer.dead is not None:
                    # Its death may have been told before it was in these tables.
                    self.forget(proc)
                    continue
                peer.send(ask_frame(node, request(here), self._port))
        for peers in far.values():
            # One message to all: there may be thousands.
            each = _Round(self, node, peers)
            self.rounds.add(each)
            for peer in peers.values():
                if peer.dead is not None:
                    # Its death may have been told before the round was known.
                    self.forget(peer.proc)
            each.send()

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
                if not self.asks(proc):
                    # It has answered or died meanwhile, and nobody removes this later.
                    self.since.pop(proc, None)
                    continue
                self.changed.tell(proc, self.text(proc))

    _looks: _Answers | None = None

    def reply(self, reply: m.Reply, frames: Any) -> None:
        """Note an answer."""
        self.answered(reply.src)

    def answered(self, proc: str) -> None:
        """Note that a process has answered."""
        self._asked.pop(proc, None)
        since = self.since.pop(proc, None)
        if proc in self._reported:
            self._reported.discard(proc)
            self._back.append(proc)
            if len(self._back) == 1:
                self._node.receive_loop.call_later(_SAY, self._say_back)
        if since is not None:
            self.changed.tell(proc, "")
        if self._looks is not None and self._looks.done:
            self._node.receive_loop.notify(self._looks)

    def _say_back(self) -> None:
        back, self._back = self._back, []
        ranks_of: dict[str, list[int]] = {}
        for proc in back:
            uid, rank = split_proc(proc)
            ranks_of.setdefault(uid, []).append(rank)
        for uid, ranks in ranks_of.items():
            self._say(f"{self._title(uid, ranks)} {'answers' if len(ranks) == 1 else 'answer'} again")

    def asks(self, proc: str) -> bool:
        """Return whether a process has been asked and has not answered."""
        return proc in self._asked

    def forget(self, proc: str) -> None:
        """Forget a process that has died."""
        for table in (self._asked, self.since, self._shares):
            table.pop(proc, None)
        self._reported.discard(proc)
        for each in list(self.rounds):
            each.forget(proc)

    def text(self, proc: str) -> str:
        """Describe an unresponsive process; empty for others."""
        now = time.monotonic()
        since = self.since.get(proc)
        if since is None:
            # Not reported if it computes, but a caller whose time is over should know.
            since = self._asked.get(proc, now)
            if now - since < self.bounds.get(split_proc(proc)[0], USUAL):
                return ""
        pid = self._node.peers.pids.get(proc, 0)
        why = ""
        if state := process_state(pid):
            why = _STATES.get(state) or self._why_busy(proc, pid, now)
        return f"has not answered for {now - since:.1f} s" + (f": {why}" if why else "")

    def _why_busy(self, proc: str, pid: int, now: float) -> str:
        """Describe why a process that is not suspended does not answer."""
        if program := other_program(pid):
            return f"an exec has replaced it by {program}, so it will not answer; kill -9 {pid} ends it"
        begun, ran, waited = self._shares.get(proc, (now, math.inf, math.inf))
        has_run, has_waited = cpu_shares(pid)
        most = _MOST * (now - begun)
        if has_waited - waited > most:
            return "it gets no CPU time, because this machine is overloaded"
        return f"it {'computes' if has_run - ran > most else 'is'} in C code that holds the GIL"

    def _title(self, uid: str, ranks: list[int]) -> str:
        return f"{describe_ranks(ranks)} of {self._node.names.get(uid, uid)}"

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
