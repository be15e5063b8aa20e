"""Process groups that lost some ranks: all ranks of the mesh are told, called or not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from monarch._core.roster import Procs
from monarch._groups.breaking import spoil_generation
from monarch._meshes.inside import state_of
from monarch._meshes.registry import meshes_of
from monarch._node.node_like import NodeLike
from monarch._node.services.asking import ServiceAnswers
from monarch._node.services.registry import request


class Addressed(Protocol):
    """A call with the mesh that it goes to."""

    view: Any

    @property
    def actor(self) -> str: ...


def meshes_of_calls(node: NodeLike, calls: Iterable[Addressed]) -> set[Procs]:
    """Return the process meshes that some calls went to."""
    # A spawn has no view, and its mesh may be gone.
    known = meshes_of(node).actor_meshes
    views = [known.get(call.actor) if call.view is None else call.view for call in calls]
    return {state_of(view).procs for view in views if view is not None}


def spoil_groups(node: NodeLike, meshes: Iterable[Procs], reason: str, number: int) -> None:
    """Tell all ranks of some meshes, before later calls, that a generation of groups is broken.

    Args:
        node: the node of this process.
        meshes: meshes whose ranks may have left a collective half way.
        reason: for the errors of ranks that still wait in one.
        number: the number of the generation; ranks with a newer one keep it.
    """
    ranks = [procs.proc(rank) for procs in meshes for rank in range(procs.size)]
    ServiceAnswers(node, ranks, request(spoil_generation, reason, number)).close()
