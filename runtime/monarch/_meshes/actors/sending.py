"""Sending one message to the members of a view, its large buffers once for each host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from monarch._node.node import Node
from monarch._node.peers import Targets
from monarch._wire import messages as m
from monarch._wire.links import lasting

_COPIED_ONCE = 32 << 10
"""Bytes from which a frame is no longer copied for each receiver."""


def into_memory(node: Node, targets: Targets, buffers: Sequence[memoryview], cost: int) -> m.PackedBulk | None:
    """Write large buffers into shared memory for receivers on this host; None if they go through the socket."""
    receivers = [peer for peer in targets.near if peer.dead is None]
    if not receivers:
        return None
    try:
        bulk = node.bulk.put(buffers, [peer.proc for peer in receivers])
    except BaseException:
        for peer in targets.peers:
            peer.give_back(cost)
        raise
    for peer in receivers:
        if peer.dead is not None:
            # The receiver died meanwhile and will release nothing.
            node.bulk.forget_holder(peer.proc)
    return bulk


def send_to_all(
    node: Node,
    targets: Targets,
    call: m.Call,
    buffers: Sequence[memoryview],
    bulk: m.PackedBulk | None,
    gathered: bool,
) -> None:
    """Send one message to all members of a view: directly on this host, once per host elsewhere."""
    # A copy, since the caller may change its memory before everything is sent.
    frames = lasting(buffers) if buffers and (targets.far or bulk is None) else ()
    if targets.near:
        frame: Any = m.encode(_with(call, bulk, 0 if bulk else len(buffers))) if buffers else m.encode(call)
        if len(frame) >= _COPIED_ONCE and len(targets.near) > 1:
            frame = lasting([frame])[0]
        for peer in targets.near:
            peer.send(frame, () if bulk else frames)
    if targets.far:
        far = m.encode(_with(call, None, len(buffers))) if buffers else m.encode(call)
        node.hosts.cast(node.proc, targets.far, call.port if gathered else 0, [far, *frames])


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
