"""Answers to messages of other processes, and the finished cost of each sender."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from monarch._core.flow import Finished
from monarch._core.shapes.region import Region
from monarch._node.bulk import BulkData
from monarch._node.peers.peer_table import PeerTable
from monarch._node.remote_errors import pack_failure
from monarch._procs.session_folder import host_of
from monarch._wire import messages as m
from monarch._wire.links import lasting
from monarch._wire.pickling import are_large
from monarch.exceptions import PointError

if TYPE_CHECKING:
    from typing import Any

_VIEWS = 4096


class Replies:
    """The answers of one process, and the credit that it returns to senders.

    Args:
        peers: the peers of this process.
        bulk: its shared memory.
        place: returns the rank of this process and the name of its mesh.
    """

    def __init__(self, peers: PeerTable, bulk: BulkData, place: Callable[[], tuple[int, str]]) -> None:
        self._peers = peers
        self._bulk = bulk
        self._place = place
        self._proc = peers.proc
        self._host = host_of(peers.proc)
        self.counts: dict[str, Finished] = {}
        """By sender; grows only by setdefault, and each has its own lock."""
        # A cache without a lock: two threads that miss the same view make two equal regions.
        self._views: dict[bytes, Region] = {}

    def send(
        self, to: str, port: int, rank: int, status: int, body: bytes, buffers: Sequence[memoryview] = (), cost: int = 0
    ) -> None:
        """Send a value or an error to a port, after handling a message of a cost.

        If it raises, nothing was sent or counted.
        """
        peer = self._peers.known.get(to) or self._peers.get(to)
        if not buffers:
            done = (self.counts.get(to) or self._counts_of(to)).report(cost)
            peer.send(m.encode(m.Reply(self._proc, port, rank, status, done, body, None, 0)))
            return
        # A dead receiver would never release the memory.
        near = peer.host == self._host and peer.dead is None and are_large(buffers)
        bulk = self._bulk.put(buffers, [to]) if near else None
        if bulk is not None and peer.dead is not None:
            self._bulk.forget_holder(to)
        more = lasting(buffers) if bulk is None else ()
        done = (self.counts.get(to) or self._counts_of(to)).report(cost)
        peer.send(m.encode(m.Reply(self._proc, port, rank, status, done, body, bulk, len(more))), more)

    def answer(self, to: str, port: int, view: bytes, status: int, body: bytes) -> None:
        """Answer a message from this rank's position in the view that it addressed.

        A rank that is not in that view answers with an error, never from the position of another one.
        """
        rank, name = self._place()
        try:
            place = self.region_of(view).place_of(rank) if view else 0
        except Exception as error:
            place = m.NOWHERE
            if status == m.RESULT:
                text = f"rank {rank} of {name} received a message that was sent to other ranks: {error}"
                status, body = m.ERROR, pack_failure(PointError(text), True)
        self.send(to, port, place, status, body)

    def finished(self, src: str, cost: int, replying: bool) -> None:
        """Count a message as handled; without an answer that says so, tell the sender when due."""
        counts = self.counts.get(src) or self._counts_of(src)
        if replying:
            counts.add(cost)
        elif total := counts.due(cost):
            self._peers.get(src).send(m.encode(m.Credit(self._proc, total)))

    def credited(self, credit: m.Credit, _: Sequence[Any]) -> None:
        """Take credit from a receiver."""
        self._peers.get(credit.src).finished(credit.done)

    def region_of(self, view: bytes) -> Region:
        """Return the region of a message."""
        region = self._views.get(view)
        if region is None:
            if len(self._views) > _VIEWS:
                self._views.clear()
            region = self._views[view] = Region.unpack(m.unpack(view))
        return region

    def _counts_of(self, src: str) -> Finished:
        return self.counts.setdefault(src, Finished())
