"""Construction of the actors of one spawn: its waiters, and constructor errors that nobody has read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import ref

from monarch._core.shapes.extent import Extent
from monarch._meshes.actors.spawn_abort import SpawnAbort
from monarch._node.node_like import NodeLike
from monarch._node.remote_errors import unpack_failure
from monarch._node.replies.answers import Lost
from monarch._node.replies.gather import Gather, is_gather
from monarch._python.later import asyncio
from monarch._wire import messages as m

if TYPE_CHECKING:
    from monarch._node.node import Node
    from monarch._node.peers.peer import Peer

HEARD_S = 0.2
"""Seconds after the first constructor error in which others may raise and somebody may read it."""

_PATIENCE = 10
"""Factor on that bound while constructors are being freed from a collective."""


class Creation(Gather[None]):
    """Done when all actors of a spawn are made, or some time after the first constructor has raised.

    An error that nobody reads becomes a fault. It counts as read if this future or a call to the actor raised it, if a
    thread waits for this future, or if somebody holds a call to the actor that was pending when its constructor raised,
    since that call has the error too. Constructors that end after this future is done are handled as well.

    Args:
        node: the node of this process.
        targets: the processes of the actors.
        ranks: their base ranks.
        extent: the extent of the mesh.
        name: the name of the mesh, for errors.
        key: the key of the actors.
        coming: by base rank, the dead processes that are being replaced; the replacement creates their actors.
        unwanted: whether the result no longer matters: the mesh was stopped, or a heal has recreated its actors.
        everyone: the proc ids of the whole process mesh.
    """

    __slots__ = (
        "_awaiting",
        "_calls",
        "_claims",
        "_coming",
        "_has_callback",
        "_passing",
        "_ranks",
        "_read",
        "_recreated",
        "_reported",
        "_then",
        "_whose",
        "everyone",
        "raised",
        "unwanted",
    )

    def __init__(
        self,
        node: Node,
        targets: Sequence[Peer],
        ranks: Sequence[int],
        extent: Extent,
        name: str,
        key: str,
        coming: Mapping[int, m.Dead],
        unwanted: Callable[[], bool],
        everyone: Callable[[], list[str]],
    ) -> None:
        self.unwanted = unwanted
        self.everyone = everyone
        self._ranks = list(ranks)
        self._whose = key
        """The key of the actors, for faults."""
        self._coming = dict(coming)
        """Lock: that of futures, here and below."""
        self._claims = 0
        """The number of waiting threads."""
        self._has_callback = False
        """Whether a callback is waiting."""
        self._awaiting: list[asyncio.Future[None]] = []
        self._calls: list[tuple[int, Callable[[], Any]]] = []
        """Pending calls to actors whose constructor raised, while somebody holds them, each with the base rank."""
        self._read: set[int] = set()
        """Base ranks whose failure was read, or had somebody waiting for it."""
        self._reported: set[int] = set()
        """The same, and those whose failure was reported as a fault."""
        self._passing = False
        """Whether unread errors are about to be reported."""
        self._recreated: set[int] = set()
        """Base ranks whose actors a heal has recreated."""
        self._then: Callable[[], None] | None = None
        """Called once all actors exist after a heal."""
        self.raised: dict[int, m.Reply] = {}
        """The errors of constructors, by base rank."""
        super().__init__(node, targets, extent, name, "__init__", lambda _, __: None, key)

    # Waiters

    def get(self, timeout: float | None = None) -> None:
        with self._lock:
            self._claims += 1
        try:
            return super().get(timeout)
        finally:
            with self._lock:
                self._claims -= 1

    def as_asyncio(self) -> asyncio.Future[None]:
        had_callback = self._has_callback
        future = super().as_asyncio()
        with self._lock:
            # A cancelled callback no longer waits.
            self._has_callback = had_callback
            self._awaiting.append(future)
        return future

    def add_done_callback(self, callback: Any) -> None:
        self._has_callback = True
        super().add_done_callback(callback)

    def proc_ids(self) -> list[str]:
        """Return the proc ids of the whole process mesh."""
        return self.everyone()

    def _is_awaited(self) -> bool:
        """Return whether somebody waits for this future; with the lock."""
        return bool(self._claims or self._has_callback or any(not each.cancelled() for each in self._awaiting))

    def heard(self, ranks: Iterable[int]) -> None:
        """Note that the constructor errors of these base ranks were read."""
        with self._lock:
            self._read.update(ranks)
            self._reported |= self._read

    def is_read(self, rank: int) -> bool:
        """Return whether the constructor error of a base rank was read, perhaps just after it was taken as unread."""
        with self._lock:
            return rank in self._read

    def is_error(self, fault: m.Fault) -> bool:
        """Return whether a fault is the error of a constructor, rather than a later failure of the actor."""
        with self._lock:
            raised = self.raised.get(fault.rank)
        return raised is not None and raised.body == fault.body

    def recreated(self, ranks: Iterable[int], then: Callable[[], None]) -> None:
        """Note that a heal has recreated actors.

        Args:
            ranks: their base ranks.
            then: called once all actors exist, at once or in the receiving thread; must not wait.
        """
        with self._lock:
            self._recreated.update(ranks)
            self._then = then
        self._check_whole()

    def _check_whole(self) -> None:
        """Call ``then`` if no constructor is running, and no failed one has not been recreated."""
        with self._lock:
            if not self.done or self.unanswered or not self.raised.keys() <= self._recreated:
                return
            then, self._then = self._then, None
        if then is not None:
            then()

    def _make(self) -> None:
        self.heard(list(self.raised))
        return super()._make()

    # Events

    def reply(self, reply: m.Reply, frames: Sequence[bytes]) -> None:
        """Take the reply of a constructor."""
        if reply.status != m.RESULT:
            self._has_raised(reply)
        if self.done:
            self._comes_late(reply)
        else:
            super().reply(reply, frames)

    def _has_raised(self, reply: m.Reply) -> None:
        rank = self._ranks[reply.rank]
        calls = _calls_to(self._node, self.actor, self.targets[reply.rank])
        with self._lock:
            if rank in self.raised:
                return
            self.raised[rank] = reply
            self._calls.extend((rank, call) for call in calls)
            first, self._passing = not self._passing, True
        if first:
            self._node.receive_loop.call_later(HEARD_S, self._pass_on)

    def _comes_late(self, reply: m.Reply) -> None:
        """Take a reply after the future is done; later readers of the future see it."""
        with self._lock:
            if self._replies:
                self._replies[reply.rank] = reply
            over = self._answered(self.targets[reply.rank])
        if reply.status != m.RESULT:
            self._node.watch.failed(self, reply.rank)
        if over:
            self._close()
            self._check_whole()

    def _answered(self, peer: Peer) -> bool:
        """Return whether this was the last outstanding reply; with the lock."""
        if peer not in self.unanswered:
            return False
        self.unanswered = [each for each in self.unanswered if each is not peer]
        return not self.unanswered

    def _close(self) -> None:
        self._node.ports.close(self.port)
        if self.party is not None:
            self.party.completed()

    def _give_up(self) -> None:
        """Complete without the outstanding replies, which are handled later."""
        if self._abandon():
            if self.party is not None:
                self.party.completed()
            self._complete()

    def _pass_on(self, patience: int = _PATIENCE) -> None:
        """Give up on outstanding replies and report unread errors.

        Ranks that wait for the failed ones in a collective are about to be freed and mostly answer in time.
        """
        if patience and not self.done and self.party is not None and self.party.frees:
            self._node.receive_loop.call_later(HEARD_S, partial(self._pass_on, patience - 1))
        elif self.done or not self.waits_for():
            self._tell()
        else:
            SpawnAbort(self._node, self, self._tell)

    def _tell(self) -> None:
        self._give_up()
        for fault in self.unreported():
            self._node.events.faulted.tell(fault)

    def unreported(self) -> list[m.Fault]:
        """Take the constructor errors that nobody has read; each is returned once."""
        unwanted = self.unwanted()
        with self._lock:
            awaited = self._is_awaited()
            self._read.update(self.raised if awaited else (rank for rank, call in self._calls if call() is not None))
            reported = set(self.raised) if awaited or unwanted else self._reported | self._read
            if reported & self._reported or awaited:
                # Ranks freed from a collective fail as a consequence.
                reported |= {rank for rank, reply in self.raised.items() if unpack_failure(reply.body).freed}
            unreported = [reply for rank, reply in sorted(self.raised.items()) if rank not in reported]
            self._reported.update(self.raised)
            self._calls.clear()
            self._awaiting.clear()
            # The readers have the errors so far.
            self._has_callback = self._passing = False
        return [m.Fault(each.src, self._whose, self._ranks[each.rank], each.body) for each in unreported]

    def lost(self, peer: Peer, dead: m.Dead) -> bool:
        """Handle the death of a process, unless it was known to be dead; return whether somebody waits to be told."""
        if self.done:
            with self._lock:
                over = self._answered(peer)
            if over:
                self._close()
                self._check_whole()
            return False
        with self._lock:
            if self._coming and any(each is dead for each in self._coming.values()):
                return False
            awaited = self._is_awaited()
        return super().lost(peer, dead) and awaited

    def arrived(self, rank: int, reply: m.Reply) -> None:
        """Take the result of a constructor in a replacement process."""
        with self._lock:
            if self._coming.pop(rank, None) is None:
                return
            place = self._ranks.index(rank)
            if reply.status != m.RESULT:
                # The replacement reports it.
                self._reported.add(rank)
                self.raised[rank] = reply
        super().reply(m.Reply(reply.src, self.port, place, reply.status, 0, reply.body), ())

    def give_up_lost(self) -> None:
        """Stop waiting for actors of dead processes that nobody will replace."""
        with self._lock:
            lost = 0
            for rank, dead in self._coming.items():
                place = self._ranks.index(rank)
                if self._left and self._replies[place] is None:
                    self._replies[place] = Lost(dead)
                    lost += 1
            self._coming.clear()
            self._left -= lost
            complete = lost and not self._left
        if complete:
            self._end()
        elif lost:
            self._node.receive_loop.call_later(HEARD_S, self._give_up)


class Booting(Creation):
    """A future that is done when the bootstraps of all processes of a mesh have ended.

    An error that nobody reads, here or from an actor spawned there, becomes a fault too.

    Args:
        node: the node of this process.
        targets: the processes, by base rank.
        extent: the extent of the mesh.
        name: the name of the mesh, for errors.
        uid: the uid of the mesh.
        unwanted: whether errors no longer matter.
    """

    __slots__ = ()

    def __init__(
        self, node: Node, targets: Sequence[Peer], extent: Extent, name: str, uid: str, unwanted: Callable[[], bool]
    ) -> None:
        super().__init__(node, targets, range(len(targets)), extent, name, "", {}, unwanted, list)
        self.method = "bootstrap"
        self._finish = _true
        self._whose = uid

    def _has_raised(self, reply: m.Reply) -> None:
        # Wait for the other bootstraps, which are independent.
        with self._lock:
            self.raised[reply.rank] = reply
        self._node.receive_loop.call_later(HEARD_S, self._pass_on_all)

    def _pass_on_all(self) -> None:
        for fault in self.unreported():
            self._node.events.faulted.tell(fault)


def _true(*_: Any) -> Any:
    return True


def _calls_to(node: NodeLike, key: str, peer: Peer) -> list[Callable[[], Any]]:
    """Return weak references to the pending calls to one actor, except its construction."""
    references: list[Callable[[], Any]] = []
    for sink in list(node.ports.gathers.values()):
        if peer not in sink.targets:
            continue
        if is_gather(sink):
            if sink.actor == key and sink.method != "__init__":
                references.append(ref(sink))
        elif getattr(getattr(sink, "_mesh", None), "_key", "") == key:
            # Streams and ports: somebody reads their answers.
            references.append(partial(_itself, sink))
    return references


def _itself(sink: Any) -> Any:
    return sink
