"""Give replies that were folded on their way to their calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

from monarch._core.flow import finish_all
from monarch._node.node_like import NodeLike
from monarch._wire.messages import RESULT, Folded, Reply

if TYPE_CHECKING:
    from monarch._node.peers.peer import Peer


class _Sink(Protocol):
    """Takes the replies to a call."""

    targets: Any
    """The peers, by position."""

    def reply(self, reply: Reply, frames: Sequence[Any], /) -> None: ...


def take_folded(node: NodeLike, folded: Folded) -> None:
    """Give replies that were folded on their way to the call that waits for them."""
    sink = cast("_Sink | None", node.ports.sinks.get(folded.port))
    if sink is None:
        # The next replies of these ranks say again what they have finished.
        return
    targets = sink.targets
    alike: Callable[[Reply, range], None] | None = getattr(sink, "reply_alike", None)
    for status, done, body, ends in folded.groups:
        for ranks in map(range, ends[::2], ends[1::2]):
            peers: list[Peer] = [targets[rank] for rank in ranks]
            for peer in finish_all(peers, done):
                node.receive_loop.notify(peer)
            if alike is not None and status == RESULT:
                alike(Reply(peers[0].proc, folded.port, ranks.start, status, done, body), ranks)
                continue
            for rank, peer in zip(ranks, peers, strict=True):
                sink.reply(Reply(peer.proc, folded.port, rank, status, done, body), ())
