"""State that all views of one process mesh share in a process."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock, RLock
from typing import Any

from monarch._core.changes import Changes
from monarch._core.events import Event
from monarch._core.roster import Procs, split_proc
from monarch._core.shapes.ranks import describe_ranks
from monarch._core.supervision import Supervision
from monarch._meshes.procs.starting import ProcStarter
from monarch._node.future import Future, Promise
from monarch._node.node import Node
from monarch._node.peers.peer import Peer
from monarch._wire import messages as m
from monarch.exceptions import StoppedError


class ProcsState:
    """State that all views of one process mesh share in this process."""

    __slots__ = (
        "changes",
        "ended",
        "initialized",
        "lock",
        "owned",
        "procs",
        "restarts",
        "roles",
        "runner",
        "runner_lock",
        "starting",
        "stopped",
        "stopping",
        "supervision",
    )

    def __init__(self, procs: Procs, owned: bool) -> None:
        self.procs = procs
        self.owned = owned
        self.stopped: str | None = None
        """Why the processes were told to end; written under ``lock``, which a change of the processes holds as well."""
        self.ended: Event[[]] = Event()
        """Fires when the processes have ended after a stop."""
        self.stopping: Future[None] | None = None
        self.initialized: Future[Any] | None = None
        self.runner_lock = Lock()
        self.runner: Any = None
        """The actors of ``execute``; under runner_lock."""
        self.starting: ProcStarter | None = None
        """How to start processes; only at the owner."""
        self.supervision = Supervision()
        self.restarts = 0
        """How often the restart rule has replaced ranks."""
        self.roles: dict[str, range] = {}
        """The processes of each host with a role, by its name."""
        self.changes: Changes[Promise[None]] = Changes()
        """The running heal or resize."""
        self.lock = RLock()
        """Held for a short step that changes the processes, or the actor meshes on them; never while waiting or while
        user code runs. A ``__del__`` or a signal handler may stop the mesh in the middle of one."""

    def check_runs(self, wish: str) -> None:
        """Raise StoppedError if the mesh was stopped.

        Args:
            wish: what the caller does to it, such as ``resized``.
        """
        if self.stopped is not None:
            raise StoppedError(f"{self.procs.name} was stopped before it was {wish}", mesh=self.procs.name)


class DeathFuture(Future[None]):
    """A future that is done when some processes have died."""

    __slots__ = ("_left", "port", "targets")

    def __init__(self, node: Node, label: str, peers: Sequence[Peer]) -> None:
        super().__init__(node, label)
        self.targets = peers
        """Lost together at the end of the session, which ends its processes."""
        self._left = {peer.proc for peer in peers}
        self.port = 0
        if node.closed or not peers:
            self.done = True
            return
        self.port = node.ports.open(self)
        for peer in peers:
            # Before the port was open, nobody told this future of a death.
            if peer.dead is not None:
                self.lost(peer, peer.dead)

    def reply(self, reply: m.Reply, frames: Any) -> None:
        """Ignore replies; none arrive here."""

    def lost(self, peer: Any, dead: m.Dead) -> bool:
        """Note the death of a process."""
        with self._lock:
            if peer.proc not in self._left:
                return False
            self._left.discard(peer.proc)
            complete = not self._left
        if complete:
            self._node.ports.close(self.port)
            self._complete()
        return True

    def _unanswered_text(self) -> str:
        left = sorted(split_proc(proc)[1] for proc in [*self._left])
        return f": {describe_ranks(left)} {'has' if len(left) == 1 else 'have'} not exited" if left else ""

    def _make(self) -> None:
        return None
