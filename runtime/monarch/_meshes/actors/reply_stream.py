"""The futures of a stream, which take replies in order of arrival."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from monarch._meshes.actors.results import single_value
from monarch._meshes.inside import title_of
from monarch._meshes.mesh_like import ActorMeshLike
from monarch._node.future import Future
from monarch._node.node import Node
from monarch._node.peers.targets import Targets
from monarch._node.replies.answers import replaced
from monarch._node.replies.gather import Gather
from monarch._node.replies.owed import Owed
from monarch._wire import messages as m

if TYPE_CHECKING:
    from monarch._node.peers.peer import Peer


R = TypeVar("R")


class _Arrival(Future[R]):
    """One of the answers of a stream, whichever comes next."""

    __slots__ = ("_got", "actor", "port", "stream")

    def __init__(self, node: Node, stream: ReplyStream) -> None:
        super().__init__(node, stream.label)
        self.stream = stream
        self._got: Gather[Any] | None = None

    def arrive(self, part: Gather[Any]) -> None:
        self._got = part
        self._complete()

    @property
    def unread(self) -> bool:
        """Whether it has failed and nobody has read the error."""
        return self.done and self._error is None and self._got is not None and bool(self._got.failed_positions())

    def _make(self) -> R:
        assert self._got is not None
        return self._got.get()


class ReplyStream(Owed):
    """Hands each reply to the next future, in order of arrival."""

    def __init__(self, node: Node, mesh: ActorMeshLike, targets: Targets, method: str) -> None:
        super().__init__(node, mesh, targets.peers)
        self._mesh = mesh
        self._method = method
        self._shape = targets.shape
        self.futures: list[_Arrival[Any]] = [_Arrival(node, self) for _ in self.targets]
        self._next = 0
        self.port = node.ports.open(self)

    @property
    def label(self) -> str:
        """The call that errors name."""
        return title_of(self._mesh, self._method)

    @property
    def unread(self) -> bool:
        """Whether an error has arrived that was not read and still may be."""
        return any(future.unread for future in self.futures[: self._next])

    def reply(self, reply: m.Reply, frames: Sequence[bytes]) -> None:
        """Take an answer."""
        if not 0 <= reply.rank < len(self.targets):
            reply = replaced(reply, self.targets, self.label)
        if reply.rank in self.owed:
            part = self._part(reply.rank)
            part.reply(m.Reply(reply.src, part.port, 0, reply.status, 0, reply.body, reply.bulk), frames)
            self._give(reply.rank, part, bool(reply.status))

    def lost(self, peer: Peer, dead: m.Dead) -> bool:
        """Turn each answer that a dead proc owes into an error."""
        waited = False
        for rank, target in enumerate(self.targets):
            if target is peer and rank in self.owed:
                part = self._part(rank)
                part.lost(peer, dead)
                self._give(rank, part)
                waited = True
        return waited

    def fail(self, uid: str, key: str, why: str) -> bool:
        """Turn each answer that is still owed into an error, since the mesh has failed."""
        failed = False
        for rank in sorted(self.owed):
            part = self._part(rank)
            if part.fail(uid, key, why):
                self._give(rank, part)
                failed = True
        return failed

    def _part(self, rank: int) -> Gather[Any]:
        one = self._mesh._member_of(self._shape, rank)  # pyright: ignore[reportPrivateUsage]
        state = self._mesh._state  # pyright: ignore[reportPrivateUsage]
        peers = [self.targets[rank]]
        gather: Gather[Any] = Gather(self._node, peers, one.extent, state.name, self._method, single_value, state.key)
        # A stand-in for a reply that has arrived, not a call.
        gather.watched = False
        gather.view = one
        return gather

    def _give(self, rank: int, part: Gather[Any], failed: bool = False) -> None:
        self.settle(rank, failed)
        future = self.futures[self._next]
        self._next += 1
        future.arrive(part)
