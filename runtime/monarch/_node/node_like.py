"""A protocol of a node for its parts, so that they do not import it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from monarch._node.bulk import BulkData
from monarch._node.call_watch import CallWatch
from monarch._node.events import NodeEvents
from monarch._node.peers.hosts import HostConnections
from monarch._node.peers.peer_table import PeerTable
from monarch._node.peers.port_table import PortTable
from monarch._node.replies.replies import Replies
from monarch._node.services.lanes import Lanes
from monarch._node.waits import ProcessWaits
from monarch._wire.receiving.loop import ReceiveLoop

P = TypeVar("P")


class NodeLike(Protocol):
    """One process in a session; see ``monarch._node.node.Node``."""

    proc: str
    rank: int
    names: dict[str, str]
    events: NodeEvents
    receive_loop: ReceiveLoop
    watch: CallWatch
    waits: ProcessWaits
    ports: PortTable
    peers: PeerTable
    hosts: HostConnections
    bulk: BulkData
    replies: Replies
    lanes: Lanes

    @property
    def host(self) -> str: ...
    @property
    def root(self) -> str: ...
    @property
    def closed(self) -> bool: ...
    def part(self, kind: Callable[[Any], P]) -> P: ...
    def find_part(self, kind: type[P]) -> P | None: ...
