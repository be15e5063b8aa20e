"""One heal or resize of a mesh at a time: the next one waits for its turn; calls continue."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from monarch._core.changes import Change
from monarch._meshes.registry import give_up_lost
from monarch._node.future import Promise
from monarch._node.node import Node
from monarch.exceptions import SupervisionError

if TYPE_CHECKING:
    from monarch._meshes.procs.state import ProcsState


@contextmanager
def changing(shared: ProcsState, node: Node, what: str, timeout: float) -> Generator[None]:
    """Make other heals and resizes of a mesh wait while the block runs. No lock is held: see ``ProcsState.lock``.

    Args:
        shared: the state of the mesh.
        node: the node of its owner.
        what: the change, such as ``healed``.
        timeout: seconds to wait for a running change.

    Raises:
        SupervisionError: the running change takes longer.
    """
    name, deadline = shared.procs.name, time.monotonic() + timeout
    change = Change(what, time.monotonic(), Promise[None](node, f"{name} to be {what}"))
    try:
        while (other := shared.changes.begin(change)) is not None:
            if not node.waits.wait(other.end, max(0.0, deadline - time.monotonic())):
                raise SupervisionError(
                    f"{name} was not {what}: it is still being {other.what} "
                    f"({time.monotonic() - other.since:.1f} s so far); try again when that is done",
                    mesh=name,
                )
        yield
    finally:
        # Not if it is interrupted, or gives up, before its turn.
        if shared.changes.end(change):
            change.end.complete(_nothing)
            give_up_lost(node, shared.procs.uid)


def _nothing() -> None:
    return None
