"""The meshes that a thread has activated."""

from __future__ import annotations

import threading

from monarch._engine.meshes.tensor_mesh import TensorMesh


class _Active(threading.local):
    """The meshes that the calling thread has activated, innermost last; None for ``no_mesh``."""

    def __init__(self) -> None:
        super().__init__()
        self.meshes: list[TensorMesh | None] = []


active = _Active()


def active_mesh() -> TensorMesh | None:
    """Return the mesh whose block is the innermost of the calling thread; None without one."""
    return active.meshes[-1] if active.meshes else None
