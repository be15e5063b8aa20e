"""The events of a mesh, and progress on it, which is among them. The room of telemetry provides both."""

from __future__ import annotations

from monarch._core.telemetry.event_table import EventTable
from monarch._meshes.mesh_like import ActorMeshLike, ProcMeshLike
from monarch._node.services.registry import declared


@declared("collector.events_of")
def events_of(mesh: ProcMeshLike | ActorMeshLike) -> EventTable:
    """Return the events of the processes of a mesh, of a slice those of its ranks."""
    raise NotImplementedError


@declared("collector.progress")
def progress(mesh: ProcMeshLike | ActorMeshLike, bar: str, done: float, total: float, unit: str, ended: bool) -> None:
    """Report how far long work on a mesh has come, for its views; from any thread, and cheap.

    Args:
        mesh: a mesh of processes or actors.
        bar: name of the work, the same in each report of it.
        done: so much of the total.
        total: not positive if it is not known.
        unit: the unit of both.
        ended: whether the work has ended.
    """
    raise NotImplementedError
