"""Futures of calls, which collect the replies of the addressed actors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar
from weakref import ref

from monarch._core.roster import split_proc
from monarch._core.shapes.extent import Extent
from monarch._node.call_watch import WatchesCalls
from monarch._node.future import Future
from monarch._node.node_like import NodeLike
from monarch._node.remote_errors import unpack_failure
from monarch._node.replies.answers import Lost, failure_line, replaced
from monarch._node.replies.outcome import Outcome
from monarch._node.replies.unread import of_death, of_endpoint, of_mesh
from monarch._wire.messages import ERROR, Dead, Reply

if TYPE_CHECKING:
    from monarch._node.peers.peer import Peer
    from monarch._wire.receiving.loop import Waiter


R = TypeVar("R")


_HEARING = 0.05
"""Seconds after a death in which other ranks may still answer before the call fails."""


class Gather(Outcome[R]):
    """Collects one reply from each of some actors, and is done when it has all of them.

    Args:
        node: the node of this process.
        targets: the procs of the actors, by position in the addressed view.
        extent: the extent of that view.
        mesh: name of the mesh, for errors.
        method: the endpoint, for errors.
        finish: makes the result from the values.
        actor: key of the actors.
        patient: whether a death does not end the wait for the others.
        opens: whether it opens its port; if not, the sender does, which closes it if an interrupt comes before that.
    """

    __slots__ = ()

    # Most calls keep these, so they are not set for each.
    on_loss: Callable[[], None] | None = None
    """Called in the receiving thread at a death that will end the wait; set by the caller."""
    party: WatchesCalls | None = None
    """Watches the other ranks once one has failed."""
    waiter: Waiter | None = None
    """Called when another rank has answered."""
    remains: Remains | None = None
    """The ranks that had not answered when a failure ended the wait. Set once, before it is done."""

    def __init__(
        self,
        node: NodeLike,
        targets: Sequence[Peer],
        extent: Extent,
        mesh: str,
        method: str,
        finish: Callable[[Gather[R], list[Any]], R],
        actor: str = "",
        patient: bool = False,
        opens: bool = True,
    ) -> None:
        # Not super(), which each call would pay for.
        Future.__init__(self, node)  # pyright: ignore[reportUnknownMemberType]
        self.targets = targets
        self.extent = extent
        self.mesh = mesh
        self.method = method
        self.actor = actor
        self._left = len(targets)
        self._replies = [None] * self._left
        self._finish = finish
        self._patient = patient
        self.view = None
        self.watched = not patient
        """Whether to watch the other ranks once one has failed."""
        self.sent_at: float
        """When it was sent, until the log of events has it; the log sets it, and the next one before."""
        self.title: tuple[str, int]
        """See ``monarch._core.telemetry.calling``."""
        self.port: int = node.ports.open_call(self) if opens else 0

    def check(self) -> None:
        """Note procs that died while the call was being sent."""
        for peer in self.targets:
            if peer.dead is not None:
                self.lost(peer, peer.dead)

    def reply(self, reply: Reply, frames: Sequence[bytes]) -> None:
        """Take the reply of an actor; ignore a second one.

        A reply from a position outside the view is an error of its sender.
        """
        with self._lock:
            replies, left = self._replies, self._left
            if not left:
                return
            rank = reply.rank
            if not 0 <= rank < len(replies):
                reply = replaced(reply, self.targets, self.label)
                rank = reply.rank
            if replies[rank] is not None:
                return
            failed = reply.status and self.actor
            if failed:
                # Before anybody can see that the rank has answered. Its subscribers only note it.
                self._node.events.call_failed.tell(self.port, self.base_rank(rank), *failure_line(reply))
            replies[rank] = (reply, frames) if frames else reply
            self._left = left = left - 1
        if failed and self.watched:
            if reply.status == ERROR and self._tells():
                self._error_to_tell = of_endpoint(self.label, self.base_rank(rank), unpack_failure(reply.body))
            # Other ranks may wait for this one.
            self._node.watch.failed(self, rank)
        if not left:
            self._end()
        elif self.waiter is not None:
            self._node.receive_loop.notify(self.waiter)

    def reply_alike(self, reply: Reply, ranks: range) -> None:
        """Take the same value from the actors at some positions, without buffers; ignore second replies."""
        with self._lock:
            replies = self._replies
            if not self._left:
                return
            begin, end = ranks.start, ranks.stop
            new = replies[begin:end].count(None)
            if new == end - begin:
                replies[begin:end] = [reply] * new
            elif new:
                replies[begin:end] = [reply if each is None else each for each in replies[begin:end]]
            self._left -= new
            complete = not self._left
        if complete:
            self._end()
        elif self.waiter is not None:
            self._node.receive_loop.notify(self.waiter)

    def _end(self) -> None:
        """Complete, with all answers that come."""
        self._node.ports.close(self.port)
        if self.party is not None:
            # Before the waiting callers continue.
            self.party.completed()
        self._complete()

    def failed_positions(self) -> list[int]:
        """Return the positions that have failed so far."""
        return [position for position, reply, _ in self._replied() if reply.status]

    def _tells(self) -> bool:
        """Return whether an error that arrives now is told if nobody reads it."""
        return bool(self.actor) and self.watched and self._error_to_tell is None and self.method != "__init__"

    def lost(self, peer: Peer, dead: Dead) -> bool:
        """Note the death of a proc, and return whether its answer was outstanding."""
        waited = False
        with self._lock:
            for position, target in enumerate(self.targets):
                if target is peer and self._left and self._replies[position] is None:
                    self._replies[position] = Lost(dead)
                    self._left -= 1
                    waited = True
            complete = waited and not self._left
        if waited and not dead.expected and self._tells():
            self._error_to_tell = of_death(self.label, split_proc(dead.proc)[1], dead)
        if complete:
            self._end()
        elif waited and not self._patient:
            if self.on_loss is not None:
                self.on_loss()
            # Answers at the same time count; but do not wait for the others to report a death.
            self._node.receive_loop.call_later(_HEARING, self._leave)
        return waited

    def fail(self, uid: str, key: str, why: str) -> bool:
        """Fail the call if it is to actors of a failed mesh, and return whether it was pending."""
        if self._patient or self.method == "__init__" or not self.actor or (key and self.actor != key):
            return False
        if split_proc(self.targets[0].proc)[0] != uid:
            return False
        with self._lock:
            if not self._left:
                return False
            self._why = why
        if self._tells():
            self._error_to_tell = of_mesh(self.label, why)
        self._leave()
        return True

    def _leave(self) -> None:
        """Complete without the outstanding answers, but follow which ranks still run the call."""
        if self._abandon():
            left = [peer for peer in self.unanswered if peer.dead is None]
            if left:
                self.remains = Remains(self, left)
            self._end()
            if self.remains is not None:
                # Output of the call so far is shown at its end, that of these ranks later.
                self._node.ports.reopen(self.port, self.remains)

    def _abandon(self) -> bool:
        """Stop waiting for the outstanding answers; return whether there were any."""
        with self._lock:
            if not self._left:
                return False
            self.unanswered = self.waits_for()
            self._left = 0
            return True

    def waits_for(self) -> list[Peer]:
        """Return the procs that have not answered, as far as that is followed."""
        if not self._left:
            return self.remains.waits_for() if self.remains is not None else list(self.unanswered)
        return [peer for peer, reply in zip(self.targets, self._replies, strict=True) if reply is None]


class Remains(Gather[None]):
    """The ranks that still run a call whose wait has ended with the death or failure of others.

    It holds no results, so that the call itself can be dropped.

    Args:
        call: the call.
        left: the procs that have not answered it.
    """

    __slots__ = ()

    def __init__(self, call: Gather[Any], left: Sequence[Peer]) -> None:
        super().__init__(
            call._node, call.targets, call.extent, call.mesh, call.method, _nothing, call.actor, opens=False
        )
        self.view, self.watched, self.port = call.view, call.watched, call.port
        self._value = None
        self.done = True
        self._left = 0
        self._running = list(left)
        """The procs that have not answered. Any thread, with the lock."""
        self._call = ref(call)

    def reply(self, reply: Reply, frames: Sequence[bytes]) -> None:
        """Note the answer of a rank."""
        self._ended(range(reply.rank, reply.rank + 1))

    def reply_alike(self, reply: Reply, ranks: range) -> None:
        """Note the answers of some ranks."""
        self._ended(ranks)

    def lost(self, peer: Peer, dead: Dead) -> bool:
        """Note the death of a proc; nobody waits for its answer."""
        self._ended(range(len(self.targets)), peer)
        return False

    def _ended(self, positions: range, only: Peer | None = None) -> None:
        with self._lock:
            ended = [each for each in self.targets[positions.start : positions.stop] if only in (None, each)]
            self._running = [each for each in self._running if each not in ended]
            over = not self._running
        if over:
            self._node.ports.close(self.port)
            if self.party is not None:
                self.party.completed()
        call = self._call()
        for waiter in (self.waiter, call.waiter if call is not None else None):
            if waiter is not None:
                self._node.receive_loop.notify(waiter)

    def waits_for(self) -> list[Peer]:
        """Return the procs that have not answered."""
        return list(self._running)


def _nothing(call: Gather[None], values: list[Any]) -> None:
    return None


def is_gather(sink: object) -> TypeGuard[Gather[Any]]:
    """Return whether the sink of a port is a Gather."""
    return isinstance(sink, Gather)
