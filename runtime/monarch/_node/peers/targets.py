"""The receivers of a call, as one snapshot."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from monarch._core.shapes.region import Region
from monarch._node.peers.gateway import Gateway
from monarch._node.peers.peer import Peer, RemotePeer
from monarch._wire.messages import pack


class Gateways(Protocol):
    """The connections to other hosts."""

    def gateway(self, host: str) -> Gateway: ...


class TargetShape(NamedTuple):
    """The ranks of a view, as one object, so that readers see one state."""

    region: Region
    packed: bytes
    """The region for the wire."""

    @classmethod
    def of(cls, region: Region) -> TargetShape:
        """Return the shape of a region."""
        return cls(region, pack(region.pack()))


class Targets:
    """A snapshot of the members of a view: direct peers, and those of other hosts, by host.

    One snapshot determines everything about a call: its receivers, its view, the awaited answers. It is immutable.

    Args:
        shape: the shape of the view.
        version: the version of the roster that says which processes the members are.
    """

    __slots__ = ("extent", "far", "near", "peers", "shape", "version")

    def __init__(self, hosts: Gateways, peers: Iterable[Peer], shape: TargetShape, version: int) -> None:
        self.shape = shape
        self.extent = shape.region.extent
        self.version = version
        self.peers = list(peers)
        self.near: list[Peer] = []
        procs_of: dict[str, list[str]] = {}
        for peer in self.peers:
            if isinstance(peer, RemotePeer):
                procs_of.setdefault(peer.host, []).append(peer.proc)
            else:
                self.near.append(peer)
        self.far = [(hosts.gateway(host), procs) for host, procs in procs_of.items()]
