"""The meshes that were spawned from this process and not stopped."""

from __future__ import annotations

from monarch._core.events import Event
from monarch._core.roster import split_proc
from monarch._meshes.actors.actor_mesh import ActorMesh
from monarch._meshes.actors.creation import Booting, Creation
from monarch._meshes.inside import state_of
from monarch._meshes.procs.state import ProcsState
from monarch._meshes.verdicts import verdicts_of
from monarch._node.node import Node
from monarch._node.node_like import NodeLike
from monarch._node.services.frame import send_to_all
from monarch._wire import messages as m
from monarch._wire.receiving.aside import tell_error
from monarch.exceptions import StoppedError


class SpawnedMeshes:
    """The part of a node with the meshes spawned from here. The dicts change by single operations only."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self.actor_meshes: dict[str, ActorMesh] = {}
        """By key; a heal covers them whether or not anybody holds them."""
        self.owners: dict[str, str] = {}
        """By key, the key of the actor that spawned the mesh; empty for the program."""
        self.proc_meshes: dict[str, tuple[str, str]] = {}
        """The name and the owner, as above, of each process mesh, by uid."""
        self.own_procs: dict[str, ProcsState] = {}
        """The shared state of process meshes, by uid."""
        self.added: Event[[str, ProcsState]] = Event(tell_error)
        """A process mesh was registered, by its uid."""
        self.stopping: Event[[str, list[str], int]] = Event(tell_error)
        """A process mesh was told to end: its uid, the living processes, and the port of the future of their end."""
        self.joined: Event[[str, int, str]] = Event(tell_error)
        """A rank joined a mesh: uid, rank, proc id."""
        self.left: Event[[str, int]] = Event(tell_error)
        """A rank left a mesh: uid, rank."""
        node.events.lost.subscribe(self._tell_siblings)

    def add_procs(self, uid: str, name: str, owner: str, shared: ProcsState) -> None:
        """Register a process mesh that was spawned from here."""
        self._node.names[uid] = name
        self.proc_meshes[uid] = (name, owner)
        self.own_procs[uid] = shared
        shared.ended.subscribe(lambda: self._forget_actors(shared))
        self.added.tell(uid, shared)

    def add_actors(self, key: str, mesh: ActorMesh) -> None:
        """Register an actor mesh that was spawned from here."""
        self.actor_meshes[key] = mesh
        state_of(mesh).ended.subscribe(lambda: self.actor_meshes.pop(key, None))

    def _forget_actors(self, shared: ProcsState) -> None:
        for key in [key for key, mesh in list(self.actor_meshes.items()) if state_of(mesh).procs == shared.procs]:
            self.actor_meshes.pop(key, None)

    def shared_of(self, uid: str, name: str, wish: str) -> ProcsState:
        """Return the state of a mesh that was spawned from here.

        Raises:
            StoppedError: the mesh was spawned elsewhere or was stopped, or this is a fork of its owner.
        """
        if self._node.closed:
            raise StoppedError(f"{name} cannot be {wish} here: {self._node.ended}", mesh=name)
        shared = self.own_procs.get(uid)
        if shared is None or shared.stopped is not None:
            why = "was stopped" if shared is not None else "was spawned by another process"
            raise StoppedError(f"{name} {why}, so it cannot be {wish} here", mesh=name)
        return shared

    def _tell_siblings(self, dead: m.Dead) -> None:
        """Tell the other ranks of a dead one, which may wait for it in a collective."""
        shared = self.own_procs.get(split_proc(dead.proc)[0])
        if shared is None:
            return
        procs, frame = shared.procs, m.encode(dead)
        known = self._node.peers.known
        siblings = [known.get(procs.proc(rank)) for rank in range(procs.region().nelements)]
        send_to_all(self._node, [peer for peer in siblings if peer is not None], frame)


def meshes_of(node: NodeLike) -> SpawnedMeshes:
    """Return the meshes that were spawned from a process."""
    return node.part(SpawnedMeshes)


def give_up_lost(node: Node, uid: str) -> None:
    """Stop waiting for actors in dead processes, once no heal or verdict is open on their mesh."""
    shared = meshes_of(node).own_procs.get(uid)
    if shared is None or shared.changes.now is not None or verdicts_of(node).is_open(uid):
        return
    for mesh in list(meshes_of(node).actor_meshes.values()):
        creation = state_of(mesh).creation
        if creation is not None and state_of(mesh).procs.uid == uid:
            creation.give_up_lost()


def booting(node: NodeLike, uid: str, rank: int) -> bool:
    """Return whether the bootstrap of a process has raised."""
    shared = meshes_of(node).own_procs.get(uid)
    known = shared.initialized if shared is not None else None
    return isinstance(known, Booting) and rank in known.raised


def was_read(node: NodeLike, fault: m.Fault) -> bool:
    """Return whether somebody has read the constructor error of a fault, or that of the bootstrap behind it."""
    mesh, boot = meshes_of(node).actor_meshes.get(fault.actor), _boot_of(node, fault)
    own = state_of(mesh).creation if mesh is not None else boot
    if own is None or not own.is_error(fault):
        return False
    shared = [boot, *_creations_with(node, fault)] if boot is not None and fault.rank in boot.raised else []
    return any(each is not None and each.is_read(fault.rank) for each in (own, *shared))


def _boot_of(node: NodeLike, fault: m.Fault) -> Booting | None:
    shared = meshes_of(node).own_procs.get(split_proc(fault.src)[0])
    known = shared.initialized if shared is not None else None
    return known if isinstance(known, Booting) else None


def _creations_with(node: NodeLike, fault: m.Fault) -> list[Creation | None]:
    """Return the spawns on the mesh of a fault: a failed bootstrap fails all of them."""
    return [state_of(each).creation for each in _actors_on(node, split_proc(fault.src)[0])]


def _actors_on(node: NodeLike, uid: str) -> list[ActorMesh]:
    return [mesh for mesh in list(meshes_of(node).actor_meshes.values()) if state_of(mesh).procs.uid == uid]


def is_boot_unwanted(node: NodeLike, uid: str) -> bool:
    """Return whether a failed bootstrap needs no report: the mesh was stopped, or its actors report it."""
    meshes = meshes_of(node)
    shared = meshes.own_procs.get(uid)
    if shared is None or shared.stopped is not None:
        return True
    return bool(_actors_on(node, uid))
