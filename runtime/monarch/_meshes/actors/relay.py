"""Pass the answers to a call on to a port of its caller's choice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from monarch._actors.ports import Port
from monarch._core.roster import split_proc
from monarch._meshes.inside import state_of, title_of
from monarch._meshes.mesh_like import ActorMeshLike
from monarch._node.node import Node
from monarch._node.peers.targets import Targets
from monarch._node.replies.answers import replaced
from monarch._node.replies.death_errors import died
from monarch._node.replies.owed import Owed
from monarch._wire import messages as m
from monarch._wire.pickling import dumps

if TYPE_CHECKING:
    from monarch._node.peers.peer import Peer


class AnswerRelay(Owed):
    """Forwards answers to a port, maybe in another process. Explicit ports may answer more than once."""

    def __init__(
        self, node: Node, mesh: ActorMeshLike, targets: Targets, method: str, port: Port[Any], explicit: bool
    ) -> None:
        super().__init__(node, mesh, targets.peers)
        self._mesh = mesh
        self._method = method
        self._target = port
        self._explicit = explicit
        self._shape = targets.shape
        self.port = self._node.ports.open(self)

    @property
    def label(self) -> str:
        """The call that errors name."""
        return title_of(self._mesh, self._method)

    def reply(self, reply: m.Reply, frames: Sequence[bytes]) -> None:
        """Take an answer."""
        if not 0 <= reply.rank < len(self.targets):
            reply = replaced(reply, self.targets, self.label)
        if self._explicit or reply.rank in self.owed:
            try:
                self._pass_on(reply, frames)
            except Exception as error:
                self._target.exception(error)
            self.settle(reply.rank, bool(reply.status), not self._explicit)

    def _pass_on(self, reply: m.Reply, frames: Sequence[bytes]) -> None:
        body, buffers = reply.body, []
        if reply.bulk is not None or frames:
            body, buffers = dumps(self._node.bulk.load(reply, frames))
        self._target._send(reply.status, body, buffers, reply.rank)  # pyright: ignore[reportPrivateUsage]

    def lost(self, peer: Peer, dead: m.Dead) -> bool:
        """Turn the answers that a dead proc owes into errors."""
        owed = [rank for rank in sorted(self.owed) if self.targets[rank] is peer]
        name, base = state_of(self._mesh).name, [split_proc(target.proc)[1] for target in self.targets]
        for rank in owed:
            self._target.exception(died(self.label, name, {rank: dead}, base, None, self._node.names))
            self.settle(rank, False, not self._explicit)
        if self._explicit and all(target.dead is not None for target in self.targets):
            # No process is left that might answer again.
            self._node.ports.close(self.port)
        return bool(owed)
