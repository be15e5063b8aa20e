"""What all views of one mesh of procs in a process share."""

from __future__ import annotations

from threading import Lock
from typing import Any

from monarch._core.changes import Changes
from monarch._core.events import Event
from monarch._core.roster import Procs
from monarch._core.supervision import Supervision
from monarch._meshes.procs.starting import Starting
from monarch._node.future import Future, Promise
from monarch._node.node import Node
from monarch._wire import messages as m


class ProcsState:
    """What all views of one mesh of procs in this process share."""

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
        self.ended: Event[[]] = Event()
        """Told when its processes have ended after a stop."""
        self.stopping: Future[None] | None = None
        self.initialized: Future[Any] | None = None
        self.runner_lock = Lock()
        self.runner: Any = None
        """The actors that ``execute`` has made; under runner_lock."""
        self.starting: Starting | None = None
        """How its processes are started; only its owner has this."""
        self.supervision = Supervision()
        self.restarts = 0
        """How often ranks were started again by its own rule."""
        self.roles: dict[str, range] = {}
        """Of each host the processes that have a role, by its name."""
        self.changes: Changes[Promise[None]] = Changes()
        """The heal or resize that is under way."""
        self.lock = Lock()
        """Held for a step that changes which processes there are, or which meshes of actors live on them; never while
        anything is waited for, or code of the user runs."""


class Ended(Future[None]):
    """Done when some processes have died."""

    __slots__ = ("_left", "port")

    def __init__(self, node: Node, label: str, procs: list[str]) -> None:
        super().__init__(node, label)
        self._left = set(procs)
        self.port = 0
        if procs:
            self.port = node.ports.open(self)
        else:
            self.done = True

    targets: Any = ()

    def reply(self, reply: m.Reply, frames: Any) -> None:
        """Nothing is replied here."""

    def lost(self, peer: Any, dead: m.Dead) -> bool:
        """One of them has died."""
        with self._lock:
            if peer.proc not in self._left:
                return False
            self._left.discard(peer.proc)
            complete = not self._left
        if complete:
            self._node.ports.close(self.port)
            self._complete()
        return True

    def _make(self) -> None:
        return None
