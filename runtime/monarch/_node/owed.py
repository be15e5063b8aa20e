"""Calls whose answers are taken one by one: who owes one, and who has failed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from monarch._core.roster import split_proc
from monarch._node.call_watch import CallGroup
from monarch._node.node_like import NodeLike

if TYPE_CHECKING:
    from monarch._node.peers import Peer
    from monarch._wire import messages as m


class Watched(Protocol):
    """A call as those see it who watch over its ranks."""

    party: CallGroup | None
    view: Any

    @property
    def actor(self) -> str: ...
    @property
    def port(self) -> int: ...
    @property
    def targets(self) -> Sequence[Peer]: ...
    @property
    def watched(self) -> bool: ...
    @property
    def unread(self) -> bool: ...
    @property
    def _node(self) -> NodeLike: ...
    def waits_for(self) -> list[Peer]: ...
    def failed_positions(self) -> list[int]: ...
    def base_rank(self, position: int) -> int: ...


class Owed:
    """A call whose answers go somewhere one by one; fail fast watches over it as over a Gather.

    Args:
        node: of this process.
        view: the mesh that was addressed.
        targets: the procs of its actors.
    """

    port = 0
    """Where the answers come; 0 if there are none."""
    unread = False
    """Whether an error that has arrived may still be read."""
    watched = True
    """Whether others are looked after if it fails."""

    def __init__(self, node: NodeLike, view: Any, targets: Sequence[Peer]) -> None:
        self._node = node
        self.view = view
        self.actor: str = view._key
        self.targets = list(targets)
        self.party: CallGroup | None = None
        # Changed by the receiving thread, or by the one that sends while it holds the only reference.
        self.owed = set(range(len(self.targets)))
        self._failed: set[int] = set()

    @property
    def label(self) -> str:
        """What is waited for, as errors say it."""
        return self.view._called

    @property
    def done(self) -> bool:
        """Whether nothing is owed any more."""
        return not self.owed

    def settle(self, position: int, failed: bool, closes: bool = True) -> None:
        """An answer has come, or will not come; with the last one the port is closed, if it may be."""
        self.owed.discard(position)
        if not self.owed and closes:
            self._node.ports.close(self.port)
        if failed:
            self._failed.add(position)
            self._node.watch.failed(self, position)
        if not self.owed and self.party is not None:
            self.party.completed()

    def check(self) -> None:
        """Take note of procs that died while the call was being sent."""
        for peer in self.targets:
            if peer.dead is not None:
                self.lost(peer, peer.dead)

    def lost(self, peer: Peer, dead: m.Dead) -> bool:
        """A proc has died; whether it owed something."""
        raise NotImplementedError

    def waits_for(self) -> list[Peer]:
        """Return the procs that owe an answer."""
        return [self.targets[position] for position in sorted(self.owed)]

    def failed_positions(self) -> list[int]:
        """Return those that have answered that they have failed."""
        return sorted(self._failed)

    def base_rank(self, position: int) -> int:
        """Return the rank of a position, as its mesh counts."""
        return split_proc(self.targets[position].proc)[1]


class Unanswered(Owed):
    """Broadcasts to a mesh that somebody has sent, once one of its actors has failed: nobody hears how they end.

    It is over when its ranks are seen to run nothing of the kind any more.
    """

    def __init__(self, node: NodeLike, view: Any, targets: Sequence[Peer], failed: set[int]) -> None:
        super().__init__(node, view, targets)
        self.owed -= failed
        self._failed = set(failed)

    def lost(self, peer: Peer, dead: m.Dead) -> bool:
        return False
