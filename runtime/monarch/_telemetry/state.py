"""The present state of a mesh, for programs."""

from __future__ import annotations

from monarch._core.telemetry.model import MeshModel
from monarch._meshes.mesh_like import ActorMeshLike, ProcMeshLike
from monarch._telemetry.collector import telemetry_of


def state_of(mesh: ProcMeshLike | ActorMeshLike) -> MeshModel:
    """Return the present state of a mesh: of its ranks, calls, metrics and progress.

    Args:
        mesh: a mesh of processes or actors, spawned by this program.

    Raises:
        MonarchError: the mesh was spawned elsewhere.
    """
    return telemetry_of(mesh).model()
