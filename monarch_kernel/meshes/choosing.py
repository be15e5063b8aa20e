"""The ranks that a cell is for."""

from __future__ import annotations

from collections.abc import Sequence

from monarch._kernel_api import (
    ActorMesh,
    current_node,
    member_at,
    meshes_of,
    region_of,
    state_of,
)
from monarch_kernel.grammar.header import Header, HeaderError, check_axes, ranks_of
from monarch_kernel.grammar.suggest import did_you_mean


def choose(actors: ActorMesh, header: Header) -> list[ActorMesh]:
    """Return the actors that a cell is for: one view, or one of each if they make no regular view."""
    if header.role:
        shared = meshes_of(current_node()).own_procs.get(state_of(actors).procs.uid)
        roles = shared.roles if shared is not None else {}
        if header.role not in roles:
            raise HeaderError(
                f"[{header.role}]: expected ranks such as [0,3] or [0:4], or a role; this "
                f"mesh has {'the roles ' + ', '.join(roles) if roles else 'no roles'}"
                f"{did_you_mean(header.role, roles)}"
            )
        ranks = roles[header.role]
        return [actors.slice(**{actors.extent.labels[-1]: slice(ranks.start, ranks.stop)})]
    if header.axes is not None:
        check_axes(header.axes, dict(actors.extent))
        return [actors.slice(**header.axes)]
    if header.ranks is None:
        return [actors]
    chosen = ranks_of(header.ranks, len(actors))
    if chosen == list(range(len(actors))):
        return [actors]
    return [member_at(actors, rank) for rank in chosen]


def ranks_in(views: Sequence[ActorMesh]) -> list[int]:
    """Return the ranks of views, in their order."""
    return [region_of(view).base_rank(position) for view in views for position in range(len(view))]
