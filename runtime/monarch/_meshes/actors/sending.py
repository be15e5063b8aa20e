"""Sending messages to the members of a view: to all or to none, large buffers once for each host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from monarch._core.flow import take_all
from monarch._meshes.actors.backpressure import wait_for_room
from monarch._meshes.mesh_like import ActorMeshLike
from monarch._node.node import Node
from monarch._node.peers.targets import Targets
from monarch._wire import messages as m
from monarch._wire.links import lasting
from monarch._wire.pickling import are_large

_COPIED_ONCE = 32 << 10
"""Bytes from which a frame is no longer copied for each receiver."""


class Outgoing:
    """One message that is encoded, with its large buffers in shared memory where they go there.

    Args:
        node: the node of this process.
        targets: the receivers.
        call: the message, without its buffers.
        buffers: buffers of its body, which go beside it.
        gathered: whether the answers of another host may be folded into one.
    """

    __slots__ = (
        "_far",
        "_frames",
        "_gathered",
        "_near",
        "_node",
        "_reached",
        "_segment",
        "call",
        "is_reserved",
        "targets",
    )

    def __init__(
        self, node: Node, targets: Targets, call: m.Call, buffers: Sequence[memoryview], gathered: bool
    ) -> None:
        self._node = node
        self.targets = targets
        self.call = call
        self._gathered = gathered
        self.is_reserved = False
        """Whether its receivers have room reserved for it."""
        self._reached = 0
        """Receivers that it went to."""
        self._segment = 0
        """Of its shared memory; 0 for none."""
        bulk = None
        if buffers and targets.near and are_large(buffers):
            bulk = self._into_memory(buffers)
        try:
            # A copy, since the caller may change its memory before everything is sent.
            frames = lasting(buffers) if buffers and (targets.far or bulk is None) else ()
            self._frames: Sequence[Any] = () if bulk else frames
            self._near: Any = b""
            if targets.near:
                near = m.encode(_with(call, bulk, 0 if bulk else len(buffers))) if buffers else m.encode(call)
                copied = len(near) >= _COPIED_ONCE and len(targets.near) > 1
                self._near = lasting([near])[0] if copied else near
            self._far: list[Any] = []
            if targets.far:
                far = m.encode(_with(call, None, len(buffers))) if buffers else m.encode(call)
                self._far = [far, *frames]
        except BaseException:
            self.drop()
            raise

    def _into_memory(self, buffers: Sequence[memoryview]) -> m.PackedBulk | None:
        """Write large buffers into shared memory for receivers on this host; None if they go through the socket."""
        receivers = [peer for peer in self.targets.near if peer.dead is None]
        if not receivers:
            return None
        bulk = self._node.bulk.put(buffers, [peer.proc for peer in receivers])
        if bulk is not None:
            self._segment = bulk[3]
        for peer in receivers:
            if peer.dead is not None:
                # The receiver died meanwhile and will release nothing.
                self._node.bulk.forget_holder(peer.proc)
        return bulk

    def send(self) -> None:
        """Send it, with room reserved."""
        self.is_reserved = True
        for peer in self.targets.near:
            peer.send(self._near, self._frames)
            self._reached += 1
        if self._far:
            port = self.call.port if self._gathered else 0
            self._node.hosts.cast(self._node.proc, self.targets.far, port, self._far)
        self._reached = len(self.targets.peers)

    @property
    def is_sent(self) -> bool:
        """Whether it went to all of its receivers."""
        return self._reached == len(self.targets.peers)

    def drop(self) -> None:
        """Give back what it holds for receivers that it has not reached: reserved room, and shared memory."""
        missed = self.targets.peers
        if self._reached:
            reached = set(map(id, missed if self._reached == len(missed) else self.targets.near[: self._reached]))
            missed = [peer for peer in missed if id(peer) not in reached]
        if self.is_reserved:
            self.is_reserved = False
            for peer in missed:
                peer.give_back(self.call.cost)
        if self._segment:
            for peer in missed:
                # One that does not hold it is ignored.
                self._node.bulk.segments.release(self._segment, peer.proc)
            self._segment = 0


def send_with_room(
    node: Node, messages: Sequence[Outgoing], mesh: ActorMeshLike, method: str, sink: Any = None
) -> None:
    """Send messages once all of their receivers have room. If this raises, the caller drops them.

    Signal handlers of the main thread are deferred while messages go out: an interrupt would leave some receivers
    without theirs, and in a collective of the endpoint the others would wait for them.

    Args:
        node: the node of this process.
        messages: each with receivers of its own.
        mesh: the addressed mesh, for errors.
        method: the endpoint, for errors.
        sink: takes the answers; None if there are none. The watch is told of it before an interrupt is raised, so that
            a Stop finds the call.

    Raises:
        SendTimeoutError: a receiver had no room and finished nothing for a minute.
    """
    loop = node.receive_loop
    while True:
        held = loop.hold()
        try:
            full = _reserve(messages) if len(messages) > 1 else _reserve_one(messages[0])
            if full < 0:
                for each in messages:
                    each.is_reserved = True
                for each in messages:
                    each.send()
                if sink is not None:
                    node.watch.sent(sink)
                return
        finally:
            loop.let_go(held)
        wait_for_room(node, [peer for each in messages for peer in each.targets.peers], full, mesh, method)


def _reserve_one(message: Outgoing) -> int:
    """Reserve room for a message at all receivers and return -1, or at none, and return the place of one without."""
    peers, cost = message.targets.peers, message.call.cost
    full = take_all(peers, cost)
    if full > 0:
        for peer in peers[:full]:
            peer.give_back(cost)
    return full


def _reserve(messages: Sequence[Outgoing]) -> int:
    """Reserve room for all messages and return -1, or for none, and return the place of a receiver without room."""
    done: list[Outgoing] = []
    for each in messages:
        full = _reserve_one(each)
        if full >= 0:
            for before in done:
                for peer in before.targets.peers:
                    peer.give_back(before.call.cost)
            return full + sum(len(before.targets.peers) for before in done)
        done.append(each)
    return -1


def _with(call: m.Call, bulk: m.PackedBulk | None, frames: int) -> m.Call:
    return m.Call(
        call.src,
        call.actor,
        call.method,
        call.port,
        call.view,
        call.sender,
        call.flags,
        call.body,
        bulk,
        frames,
        call.cost,
    )
