"""Ranks of notebook meshes that move off hosts: off those that are taken back, and off lost ones in a smaller mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from monarch._kernel_api import (
    ActorMesh,
    Drained,
    describe_ranks,
    drain_hosts,
    give_copies,
    state_of,
    take_copies,
)
from monarch_kernel.meshes.mesh import Mesh

_PATIENCE_S = 60.0
"""Seconds for the running calls, and for the variables."""


def move(mesh: Mesh, leaving: Sequence[str], free: Sequence[str], seconds: float, *, heirs: bool = False) -> Drained:
    """Move the ranks of a mesh off hosts, with their variables; without enough other hosts, it shrinks.

    Args:
        mesh: the mesh.
        leaving: the hosts that its ranks leave.
        free: the hosts that they may move to.
        seconds: for the running calls, and for the variables.
        heirs: see ``drain_hosts``.
    """
    cells = state_of(mesh.cells).key

    def means(actors: ActorMesh) -> Any:
        return (give_copies, take_copies, ([],)) if state_of(actors).key == cells else None

    def define(ranks: list[int]) -> None:
        mesh.lack(ranks)
        mesh.define()

    with mesh.changing():
        return drain_hosts(mesh.procs, leaving, free, seconds, means, define, heirs=heirs)


def leave_lost(mesh: Mesh, sizes: Mapping[str, int]) -> list[str]:
    """Before a resize to fewer hosts, let as many lost hosts leave as it removes; return lines about the ranks.

    Ranks at the end of the mesh hand their variables to those that the lost hosts had, on their own hosts.
    """
    procs = state_of(mesh.procs).procs
    if procs.host_axes != 1 or procs.labels[0] not in sizes:
        return []
    fewer = len(procs.hosts) - sizes[procs.labels[0]]
    leaving = mesh.hosts.lost()[: max(0, fewer)]
    if not leaving:
        return []
    drained = move(mesh, leaving, (), _PATIENCE_S, heirs=True)
    mesh.hosts.leave(leaving)
    return moved_lines(mesh, drained)


def moved_lines(mesh: Mesh, drained: Drained) -> list[str]:
    """Describe what has moved, in lines."""
    lines: list[str] = []
    if drained.moved:
        lost = sorted(drained.lost)
        procs = state_of(mesh.procs).procs
        where = ", ".join(dict.fromkeys(mesh.hosts.name(procs.host(rank)) for rank in drained.moved))
        what = f"; the variables of {describe_ranks(lost)} are lost" if lost else f" with {_whose(drained)}"
        lines.append(f"{describe_ranks(drained.moved)} of mesh {mesh.name!r} moved to {where}{what}")
        lines += [f"not moved: {name} ({why})" for name, why in _left_behind(drained).items()]
    return lines


def _whose(drained: Drained) -> str:
    heirs = [drained.heirs[rank] for rank in drained.moved if rank in drained.heirs]
    return f"the variables of {describe_ranks(heirs)}" if heirs else "their variables"


def _left_behind(drained: Drained) -> dict[str, str]:
    """Return the variables that did not move, with the reason."""
    left: dict[str, str] = {}
    for report in drained.reports.values():
        if report is not None:
            left.update(report[1])
    return left
