"""The meshes of one process: those that were spawned from here and not stopped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from monarch._core.events import Event
from monarch._core.roster import split_proc
from monarch._node.node import Node
from monarch._node.node_like import NodeLike
from monarch._wire import messages as m
from monarch._wire.receiving.aside import tell_error
from monarch.exceptions import StoppedError

if TYPE_CHECKING:
    from monarch._meshes.actor_mesh import ActorMesh
    from monarch._meshes.proc_mesh import _Shared


class HostAgents(Protocol):
    """What meshes need of the session; its room is above this one."""

    @property
    def agent_pid(self) -> int:
        """Of the agent of this host; 0 if none runs."""
        ...

    def need_agent(self) -> None:
        """Start the agent of this host, unless it runs."""

    def base_env(self, host: str, /) -> dict[str, str | None]:
        """Return how the environment of this program has changed since the agent of a host was started."""
        ...

    def output_options(self, uid: str, stream: bool, window: float | None, /) -> None:
        """Set how the output of a mesh of procs is shown."""


class _NoAgents:
    """Of a rank: its agent runs as long as it does."""

    agent_pid = 0

    def need_agent(self) -> None:
        pass

    def base_env(self, host: str) -> dict[str, str | None]:
        return {}

    def output_options(self, uid: str, stream: bool, window: float | None) -> None:
        pass


class Meshes:
    """The part of a node that has the meshes spawned from here. The dicts change by single operations only."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self.agents: HostAgents = _NoAgents()
        """Set once, before anything is spawned."""
        self.actor_meshes: dict[str, ActorMesh] = {}
        """By key: they are healed whoever holds them."""
        self.owners: dict[str, str] = {}
        """Of each of those, the key of the actor that spawned it, empty for the program."""
        self.proc_meshes: dict[str, tuple[str, str]] = {}
        """Of each uid of a mesh of procs its name, and its owner as above."""
        self.own_procs: dict[str, _Shared] = {}
        """What the views of those share, by uid."""
        self.joined: Event[[str, int, str]] = Event(tell_error)
        """A rank joined a mesh: uid, rank, proc id."""
        self.left: Event[[str, int]] = Event(tell_error)
        """A rank left a mesh: uid, rank."""
        node.events.lost.subscribe(self._tell_siblings)

    def add_procs(self, uid: str, name: str, owner: str, shared: _Shared) -> None:
        """Take note of a mesh of procs that was spawned from here."""
        self._node.names[uid] = name
        self.proc_meshes[uid] = (name, owner)
        self.own_procs[uid] = shared

    def shared_of(self, uid: str, name: str, wish: str) -> _Shared:
        """Return what belongs to a mesh that was spawned from here.

        Raises:
            StoppedError: it was spawned elsewhere, or was stopped.
        """
        shared = self.own_procs.get(uid)
        if shared is None or shared.stopped is not None:
            why = "was stopped" if shared is not None else "was spawned elsewhere"
            raise StoppedError(f"{name} {why}, so it cannot be {wish} here", mesh=name)
        return shared

    def _tell_siblings(self, dead: m.Dead) -> None:
        """Others of its mesh may wait for it in a collective, of which nobody else frees them."""
        shared = self.own_procs.get(split_proc(dead.proc)[0])
        if shared is None:
            return
        procs, frame = shared.procs, m.encode(dead)
        for rank in range(procs.region().nelements):
            sibling = self._node.peers.known.get(procs.proc(rank))
            if sibling is not None and sibling.dead is None:
                sibling.send(frame)


def meshes_of(node: NodeLike) -> Meshes:
    """Return the meshes that were spawned from a process."""
    return node.part(Meshes)
