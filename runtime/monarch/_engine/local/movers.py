"""The actors that send values to ranks of other meshes, one for each rank of a mesh of processes."""

from __future__ import annotations

import threading
from typing import Any

from monarch._engine.rank.operations.moving import Mover
from monarch._meshes.inside import state_of, view_at
from monarch._meshes.procs.proc_mesh import ProcMesh
from monarch._node.node import Node


class Movers:
    """The movers of this process's meshes; a part of its node."""

    def __init__(self, node: Node) -> None:
        self._lock = threading.Lock()
        self._actors: dict[str, Any] = {}
        """By uid of the mesh of processes. Lock: ``_lock``."""

    def of(self, procs: ProcMesh) -> Any:
        """Return the movers of the whole mesh of processes; the first use starts them."""
        shared = state_of(procs).procs
        with self._lock:
            found = self._actors.get(shared.uid)
            if found is None:
                found = self._actors[shared.uid] = view_at(procs, shared.region()).spawn(shared.name, Mover)
            return found
