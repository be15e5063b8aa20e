"""Pausing and resuming the ranks of a mesh, and asking where they are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from monarch._core.kinds import is_tuple
from monarch._core.position import Position
from monarch._core.roster import Procs
from monarch._core.shapes.value_mesh import ValueMesh
from monarch._debug.here import pause_here, where_here
from monarch._debug.resuming import resume_here
from monarch._meshes.inside import region_of, state_of
from monarch._meshes.mesh_like import ProcMeshLike
from monarch._node.current import current_node
from monarch._node.services.asking import ask_soon
from monarch._node.services.registry import ServiceRequest, request, service

PATIENCE = 1.5
"""Seconds for all ranks to answer; one in C code takes half a second to say so."""
SILENT, DEAD = "does not answer", "dead"


def ask_ranks(procs: Procs, ranks: Iterable[int], asked: ServiceRequest, patience: float = PATIENCE) -> dict[int, Any]:
    """Return the answer of each rank; for one that gives none, a text that says why."""
    node = current_node()
    names = {rank: procs.proc(rank) for rank in ranks}
    living = [name for name in names.values() if node.peers.get(name).dead is None]
    answers = ask_soon(living, asked, patience)
    return {rank: answers.get(name, SILENT if name in living else DEAD) for rank, name in names.items()}


@service("pausing.pause", "local")
def pause(mesh: ProcMeshLike) -> ValueMesh[Position]:
    """Pause the ranks of a mesh, and return where each one is."""
    return _positions(mesh, request(pause_here))


@service("pausing.resume", "local")
def resume(mesh: ProcMeshLike) -> ValueMesh[bool]:
    """Resume the ranks of a mesh, and return for each one whether it was paused, or about to be."""
    return values_of(mesh, [answer is True for answer in _answers(mesh, request(resume_here))])


@service("pausing.where", "local")
def where(mesh: ProcMeshLike) -> ValueMesh[Position]:
    """Return where each rank of a mesh is."""
    return _positions(mesh, request(where_here))


def values_of(mesh: ProcMeshLike, values: list[Any]) -> ValueMesh[Any]:
    """Return values of the ranks of a mesh, shown with the ranks of the whole mesh if it is a slice."""
    return ValueMesh.of(mesh.extent, values, region_of(mesh).base_ranks)


def _answers(mesh: ProcMeshLike, asked: ServiceRequest) -> list[Any]:
    return list(ask_ranks(state_of(mesh).procs, region_of(mesh).base_ranks(), asked).values())


def _positions(mesh: ProcMeshLike, asked: ServiceRequest) -> ValueMesh[Position]:
    answers = _answers(mesh, asked)
    found = [Position.unpacked(answer) if is_tuple(answer) else Position(str(answer), []) for answer in answers]
    return values_of(mesh, found)
