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
    rest: AbandonedCall | None = None
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
            rank = reply.rank
            failed = reply.status and self.actor
            if left:
                if not 0 <= rank < len(replies):
                    reply = replaced(reply, self.targets, self.label)
                    rank = reply.rank
                if replies[rank] is not None:
                    return
                if failed:
                    # Before anybody can see that the rank has answered. Its subscribers only note it.
                    self._node.events.call_failed.tell(self.port, self.base_rank(rank), *failure_line(reply))
                replies[rank] = (reply, frames) if frames else reply
                self._left = left - 1
        if not left:
            if self.rest is not None:
                self.rest.reply(reply, frames)
            return
        if failed and self.watched:
            if reply.status == ERROR and self._tells():
                self._error_to_tell = of_endpoint(self.label, self.base_rank(rank), unpack_failure(reply.body))
            # Other ranks may wait for this one.
            self._node.watch.failed(self, rank)
        if left == 1:
            self._end()
        elif self.waiter is not None:
            self._node.receive_loop.notify(self.waiter)

    def reply_alike(self, reply: Reply, ranks: range) -> None:
        """Take the same value from the actors at some positions, without buffers; ignore second replies."""
        with self._lock:
            replies, left = self._replies, self._left
            if left:
                begin, end = ranks.start, ranks.stop
                new = replies[begin:end].count(None)
                if new == end - begin:
                    replies[begin:end] = [reply] * new
                elif new:
                    replies[begin:end] = [reply if each is None else each for each in replies[begin:end]]
                self._left -= new
            complete = not self._left
        if not left:
            if self.rest is not None:
                self.rest.reply_alike(reply, ranks)
            return
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
            rest = self.rest
        if rest is not None:
            rest.lost(peer, dead)
            return False
        if waited and not dead.expected and self._tells():
            self._error_to_tell = of_death(self.label, split_proc(dead.proc)[1], dead)
        if complete:
            self._end()
        elif waited and not self._patient:
            if self.on_loss is not None:
                self.on_loss()
            # Answers at the same time count; but do not wait for the others to report a death.
            self._node.receive_loop.call_later(_HEARING, self._give_up)
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
        self._give_up()
        return True

    def _give_up(self) -> None:
        """Complete without the outstanding answers, but follow which ranks still run the call. Any thread."""
        if not self._abandon(True):
            return
        rest = self.rest
        if rest is None:
            self._end()
            return
        # Its output so far is shown at its end, that of the other ranks later.
        self._node.ports.pass_on(self.port, rest)
        # They may have answered before that.
        rest.settle()
        if self.party is not None:
            self.party.completed()
        self._complete()

    def _abandon(self, follows: bool = False) -> bool:
        """Stop waiting for the outstanding answers; return whether there were any.

        Args:
            follows: whether to note the ranks that still run the call.
        """
        with self._lock:
            if not self._left:
                return False
            self.unanswered = self.waits_for()
            left = [peer for peer in self.unanswered if peer.dead is None]
            # In one step: a thread that finds nothing left passes its answer on.
            self.rest = AbandonedCall(self, left) if left and follows else None
            self._left = 0
            return True

    def waits_for(self) -> list[Peer]:
        """Return the procs that have not answered, as far as that is followed."""
        if not self._left:
            return self.rest.waits_for() if self.rest is not None else list(self.unanswered)
        return [peer for peer, reply in zip(self.targets, self._replies, strict=True) if reply is None]


class AbandonedCall(Gather[None]):
    """A call that has ended with the death or failure of some ranks, while others still run it.

    It holds no results, so that the future of the call can be dropped.

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
        self._running = tuple(left)
        """The procs that have not answered. Replaced with the lock, by any thread."""
        self._call = ref(call)

    def reply(self, reply: Reply, frames: Sequence[bytes]) -> None:
        """Note the answer of a rank."""
        at = reply.rank
        known = 0 <= at < len(self.targets)
        self._end_on({id(self.targets[at])} if known else {id(each) for each in self.targets if each.proc == reply.src})

    def reply_alike(self, reply: Reply, ranks: range) -> None:
        """Note the answers of some ranks."""
        self._end_on(set(map(id, self.targets[ranks.start : ranks.stop])))

    def lost(self, peer: Peer, dead: Dead) -> bool:
        """Note the death of a proc; nobody waits for its answer."""
        self._end_on({id(peer)})
        return False

    def _end_on(self, peers: set[int]) -> None:
        """Note procs that no longer run it."""
        with self._lock:
            self._running = tuple(each for each in self._running if id(each) not in peers)
        self.settle()
        call = self._call()
        for waiter in (self.waiter, call.waiter if call is not None else None):
            if waiter is not None:
                self._node.receive_loop.notify(waiter)

    def settle(self) -> None:
        """Close the port once no proc runs it."""
        if not self._running:
            self._node.ports.close(self.port)
            if self.party is not None:
                self.party.completed()

    def waits_for(self) -> list[Peer]:
        """Return the procs that have not answered."""
        return list(self._running)


def _nothing(call: Gather[None], values: list[Any]) -> None:
    return None


def is_gather(sink: object) -> TypeGuard[Gather[Any]]:
    """Return whether the sink of a port is a Gather."""
    return isinstance(sink, Gather)
