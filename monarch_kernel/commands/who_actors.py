"""The second table of ``%mesh who``: the actors on the ranks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase

from monarch._kernel_api import ActorMesh, format_ranks, state_of
from monarch_kernel.meshes.mesh import Mesh

HEADERS = ("actors", "class", "mesh", "ranks", "failed")


def actors_on(mesh: Mesh, ranks: Collection[int], patterns: Sequence[str]) -> list[list[object]]:
    """Return the rows for the live actors of a mesh.

    Args:
        mesh: the mesh.
        ranks: the ranks that are asked for.
        patterns: patterns of names; all actors if there are none.
    """
    users = mesh.users_actors()
    rows = [_row(each, mesh, ranks) for each in users if _matches(state_of(each).name, patterns)]
    return sorted((row for row in rows if row[3]), key=lambda row: str(row[0]))


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return not patterns or any(fnmatchcase(name, each) for each in patterns)


def _row(actors: ActorMesh, mesh: Mesh, ranks: Collection[int]) -> list[object]:
    state = state_of(actors)
    here = [rank for rank in state.region.base_ranks() if rank in ranks]
    failed = sorted(state.failed.intersection(here))
    return [state.name, state.cls.__name__, mesh.name, format_ranks(here), format_ranks(failed)]
