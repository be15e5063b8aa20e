"""Calls whose answers are taken one by one: outstanding and failed ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from monarch._core.roster import split_proc
from monarch._node.call_watch import WatchesCalls
from monarch._node.node_like import NodeLike

if TYPE_CHECKING:
    from monarch._node.peers.peer import Peer
    from monarch._wire import messages as m


class WatchedCall(Protocol):
    """A call as its watchers see it."""

    party: WatchesCalls | None
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


def node_of_call(call: WatchedCall) -> NodeLike:
    """Return the node of this process in the session of a call."""
    return call._node  # pyright: ignore[reportPrivateUsage]


class Owed:
    """A call whose answers are delivered one by one; fail fast watches it like a Gather.

    Args:
        node: the node of this process.
        view: the addressed mesh.
        targets: the procs of its actors.
    """

    port = 0
    """The port for the answers; 0 if there are none."""
    unread = False
    """Whether an error that has arrived may still be read."""
    watched = True
    """Whether to watch the other ranks if one fails."""
    sent_at = 0.0
    """When it was sent, until the log of events has it."""
    title = ("", 0)
    """See ``monarch._core.telemetry.calling``."""

    def __init__(self, node: NodeLike, view: Any, targets: Sequence[Peer]) -> None:
        self._node = node
        self.view = view
        self.actor: str = view._key
        self.targets = list(targets)
        self.party: WatchesCalls | None = None
        # Changed by the receiving thread, or by the sending thread while it holds the only reference.
        self.owed = set(range(len(self.targets)))
        self._failed: set[int] = set()

    @property
    def label(self) -> str:
        """The call, for errors."""
        return self.view._called

    @property
    def done(self) -> bool:
        """Whether nothing is owed any more."""
        return not self.owed

    def settle(self, position: int, failed: bool, closes: bool = True) -> None:
        """Note an answer or its loss; after the last one close the port, if allowed."""
        self.owed.discard(position)
        if not self.owed and closes:
            self._node.ports.close(self.port)
        if failed:
            self._failed.add(position)
            self._node.watch.failed(self, position)
        if not self.owed and self.party is not None:
            self.party.completed()

    def check(self) -> None:
        """Note procs that died while the call was being sent."""
        for peer in self.targets:
            if peer.dead is not None:
                self.lost(peer, peer.dead)

    def lost(self, peer: Peer, dead: m.Dead) -> bool:
        """Note the death of a proc, and return whether it owed an answer."""
        raise NotImplementedError

    def waits_for(self) -> list[Peer]:
        """Return the procs that owe an answer."""
        return [self.targets[position] for position in sorted(self.owed)]

    def failed_positions(self) -> list[int]:
        """Return the positions that have failed."""
        return sorted(self._failed)

    def base_rank(self, position: int) -> int:
        """Return the base rank of a position."""
        return split_proc(self.targets[position].proc)[1]


class Unanswered(Owed):
    """Broadcasts to a mesh with a failed actor, whose ends nobody hears.

    It is over when its ranks no longer run any of them.
    """

    def __init__(self, node: NodeLike, view: Any, targets: Sequence[Peer], failed: set[int]) -> None:
        super().__init__(node, view, targets)
        self.owed -= failed
        self._failed = set(failed)

    def lost(self, peer: Peer, dead: m.Dead) -> bool:
        return False
