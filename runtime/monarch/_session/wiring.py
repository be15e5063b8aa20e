"""Connect the hooks of lower rooms to the rooms above them, before a process receives its first message."""

from __future__ import annotations

import sys

from monarch._actors import running
from monarch._node.liveness import Liveness
from monarch._node.node import Node
from monarch._node.services.registry import declared
from monarch._supervision.behind import Behind
from monarch._supervision.unjoined import UnjoinedCollectives
from monarch._supervision.watch import FailureWatch


def wire(node: Node) -> None:
    """Connect the hooks of actors and calls to a node. Programs and ranks both call this."""
    begin(node)
    running.on_error = _explain
    node.watch = FailureWatch(node)
    node.part(Liveness).ticked.subscribe(Behind(node).tick)
    node.part(Liveness).ticked.subscribe(node.part(UnjoinedCollectives).tick)


@declared("collector.begin")
def begin(node: Node) -> None:
    """Write the logs of all meshes of a process from now on."""
    raise NotImplementedError


def _explain(error: BaseException) -> BaseException | None:
    # Without torch.distributed, no collective can have run here.
    if "torch.distributed" not in sys.modules:
        return None
    from monarch._groups.failures import note_failure

    return note_failure(error)
