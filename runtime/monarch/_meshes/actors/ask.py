"""Asking the processes of a mesh for a service, whatever their actors do."""

from __future__ import annotations

from typing import Any

from monarch._meshes.mesh_like import ActorMeshLike
from monarch._node.future import Future
from monarch._node.gather import Gather
from monarch._wire import messages as m
from monarch._wire.pickling import dumps


def ask(mesh: ActorMeshLike, service: str, *args: Any) -> Future[dict[int, Any]]:
    """Asks the processes of a mesh of actors; the result has what each answered, by position."""
    node = mesh._node
    targets = mesh._members_at()

    def finish(_: Gather[Any], values: list[Any]) -> dict[int, Any]:
        return dict(enumerate(values))

    gather: Gather[Any] = Gather(node, targets.peers, targets.shape.region.extent, mesh._name, service, finish)
    frame = m.encode(m.Ask(node.proc, gather.port, targets.shape.packed, service, dumps(args)[0]))
    for peer in targets.peers:
        peer.send(frame)
    gather.check()
    return gather
