"""Replacement of a process of a mesh: a new incarnation at the same coordinates."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from monarch._core.roster import Procs, split_proc
from monarch._core.shapes.value_mesh import ValueMesh
from monarch._groups.convening import tell_of_new_ones
from monarch._meshes.actors.actor_mesh import ActorMesh
from monarch._meshes.actors.creation import Creation
from monarch._meshes.inside import member_at, node_of, packed_of, state_of, targets_of, view_at
from monarch._meshes.procs.limits import check_room
from monarch._meshes.procs.queries import actor_meshes_on
from monarch._meshes.procs.stopping import end_if_stopped
from monarch._meshes.registry import meshes_of
from monarch._node.future import Future
from monarch._node.node import Node
from monarch._node.peers.peer import Peer
from monarch._node.remote_errors import Failure, unpack_failure
from monarch._node.replies.gather import Gather
from monarch._node.services.asking import tell_proc
from monarch._node.services.registry import declared
from monarch._wire import messages as m
from monarch._wire.pickling import dumps
from monarch.exceptions import SpawnError, StoppedError

if TYPE_CHECKING:
    from monarch._meshes.procs.state import ProcsState


def replace(
    shared: ProcsState, node: Node, ranks: Sequence[int], hosts: Mapping[str, str] | None = None
) -> list[Future[Any]]:
    """End the processes of some ranks, start new ones, and construct their actors with the original arguments.

    Args:
        shared: the state of the process mesh.
        node: the node of its owner.
        ranks: the ranks to replace.
        hosts: replacements of lost hosts, by lost host.

    Returns:
        Futures that are done when the new actors are constructed.

    Raises:
        StoppedError: the mesh is not owned here, or was stopped.
        LimitError: too few file descriptors are free.
    """
    procs, starting = shared.procs, shared.starting
    if shared.stopped is not None:
        raise StoppedError(f"cannot replace ranks of {procs.name}: it was stopped; spawn a new one", mesh=procs.name)
    if starting is None:
        raise StoppedError(
            f"cannot replace ranks of {procs.name}: only the process that spawned it can", mesh=procs.name
        )
    moved: dict[str, str] = dict(hosts or {})
    places: list[str] = [moved.get(host) or host for host in map(procs.host, ranks)]
    check_room(node, Counter(places))
    old: dict[str, list[str]] = {}
    for rank in ranks:
        peer = node.peers.get(procs.proc(rank))
        old.setdefault(peer.host, []).append(peer.proc)
    for host, names in old.items():
        if host not in (hosts or ()):
            node.peers.to_agent(host, m.Stop(node.proc, names, 0.0))
    node.hosts.hurry(old)
    with shared.lock:
        shared.check_runs("healed")
        spares = {rank: starting.take_spare(rank) for rank in ranks}
        roster = procs.replaced(spares, hosts or {})
        # Before anybody can look up the new processes and ask an agent that does not know them yet.
        new = [node.peers.get(roster.proc(procs.uid, rank), starting=True) for rank in ranks]
        procs.learn(roster)
        # Meshes spawned later look up the new processes.
        actors = actor_meshes_on(shared, node)
    for rank in ranks:
        meshes_of(node).joined.tell(procs.uid, rank, procs.proc(rank))
    arrival = Arrival(node, procs.name, new)
    cold = [rank for rank in ranks if not spares[rank]]
    if cold:
        starting.start(cold, arrival.port, again=True)
    tell_of_new_ones(procs)
    for rank in (rank for rank in ranks if spares[rank]):
        tell_proc(node, procs.proc(rank), assume, procs, rank, arrival.port)
    end_if_stopped(node, shared, new)
    made: list[Future[Any]] = [arrival]
    for actor in actors:
        made.extend(create(actor, rank) for rank in ranks if state_of(actor).region.position_of(rank) is not None)
    return made


@declared("rank.assume")
def assume(procs: Procs, rank: int, port: int) -> None:
    """Assign the rank of a dead process to a spare one, which replies to the port when it is set up."""
    raise NotImplementedError


class Arrival(Future[None]):
    """A future that is done when new processes are set up; they reply to its port."""

    __slots__ = ("_failed", "_left", "port", "targets")

    def __init__(self, node: Node, label: str, peers: Sequence[Peer]) -> None:
        super().__init__(node, label)
        self.targets = {split_proc(peer.proc)[1]: peer for peer in peers}
        """By base rank, which replies that were folded on their way name."""
        self._left = {peer.proc for peer in peers}
        self._failed: BaseException | None = None
        self.port = node.ports.open(self)
        for peer in peers:
            # A spare process may have died before the port was open.
            if peer.dead is not None:
                self.lost(peer, peer.dead)

    def reply(self, reply: m.Reply, frames: Any) -> None:
        """Take the reply of a process that is set up, or whose bootstrap failed."""
        if reply.status != m.RESULT:
            failure = unpack_failure(reply.body)
            self._failed = SpawnError(f"the bootstrap of {self.label} failed: {failure.kind}: {failure.text}")
        self._arrived(reply.src)

    def lost(self, peer: Peer, dead: m.Dead) -> bool:
        """Fail if a new process dies as well."""
        if peer.proc not in self._left:
            return False
        self._failed = SpawnError(f"a new process of {self.label} {dead.reason}", mesh=self.label)
        self._arrived(peer.proc)
        return True

    def _arrived(self, proc: str) -> None:
        with self._lock:
            self._left.discard(proc)
            complete = not self._left and not self.done
        if complete:
            self._node.ports.close(self.port)
            self._complete()

    def _make(self) -> None:
        if self._failed is not None:
            raise self._failed


def create(actor: ActorMesh, rank: int) -> Future[Any]:
    """Construct one actor of a mesh, again or for a new rank, with its original arguments."""
    node, state = node_of(actor), state_of(actor)
    position = state.region.position_of(rank)
    assert position is not None and state.spec is not None
    whole = view_at(actor, state.region)
    body, buffers = dumps(dataclasses.replace(state.spec, is_added=True))
    targets = targets_of(member_at(whole, position))
    gather = _Made(node, targets.peers, whole.extent, state.name, "__init__", _nothing, state.key)
    gather.place, gather.rank, gather.creation = position, rank, state.creation
    # The constructor sees its place in the whole mesh, as at first.
    create = m.Create(node.proc, state.key, gather.port, packed_of(whole), body, None, len(buffers))
    targets.peers[0].send(m.encode(create), buffers)
    gather.check()
    return gather


class _Made(Gather[Any]):
    """A future of the construction of one actor, which replies from its place in the whole mesh."""

    __slots__ = ("creation", "place", "rank")

    creation: Creation | None
    """The construction of the whole mesh, if that waits for this actor."""

    def reply(self, reply: m.Reply, frames: Sequence[bytes]) -> None:
        """Take the reply of the constructor."""
        if self.creation is not None:
            self.creation.arrived(self.rank, reply)
        reply.rank = 0
        super().reply(reply, frames)

    def _error_of(
        self, failures: dict[int, Failure], lost: dict[int, m.Dead], results: ValueMesh[Any] | None
    ) -> BaseException:
        place = (self.place,)
        # At most one.
        return super()._error_of(
            dict(zip(place, failures.values(), strict=False)), dict(zip(place, lost.values(), strict=False)), results
        )


def _nothing(_: Any, __: Any) -> None:
    return None
