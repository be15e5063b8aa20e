"""The insides of meshes for other files of this package.

Users see a mesh's public attributes when they press Tab, and its endpoints are attributes too, so everything else has a
name with an underscore. Only these functions and the path of a call, in adverbs.py, read those names from outside.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, overload

from monarch._core.shapes.mesh_view import MakesViews
from monarch._core.shapes.region import Region
from monarch._meshes.mesh_like import ActorMeshLike, ProcMeshLike, ResizableHosts
from monarch._wire import messages as m

if TYPE_CHECKING:
    from monarch._meshes.actors.state import ActorsState
    from monarch._meshes.procs.state import ProcsState
    from monarch._node.node import Node
    from monarch._node.peers.targets import Targets

A = TypeVar("A", bound=ActorMeshLike)
V = TypeVar("V", bound=MakesViews)


@overload
def state_of(mesh: ActorMeshLike) -> ActorsState: ...
@overload
def state_of(mesh: ProcMeshLike) -> ProcsState: ...
def state_of(mesh: ActorMeshLike | ProcMeshLike) -> ActorsState | ProcsState:
    """Return what all views of a mesh share: name, key or processes, and how far its life has come."""
    return mesh._state  # pyright: ignore[reportPrivateUsage]


def node_of(mesh: ActorMeshLike | ProcMeshLike) -> Node:
    """Return the node of this process in the session of a mesh."""
    return mesh._node  # pyright: ignore[reportPrivateUsage]


def region_of(mesh: ActorMeshLike | ProcMeshLike | ResizableHosts) -> Region:
    """Return the ranks that a mesh or view addresses."""
    return mesh._region  # pyright: ignore[reportPrivateUsage]


@overload
def view_at(mesh: V, region: Region) -> V: ...
@overload
def view_at(mesh: ProcMeshLike, region: Region) -> Any: ...
def view_at(mesh: Any, region: Region) -> Any:
    """Return a view of a mesh that addresses other ranks."""
    return mesh._view(region)


def called_of(mesh: ActorMeshLike) -> str:
    """Return the name of a mesh with the selection of this view, such as ``trainers[gpus=1]``."""
    return mesh._called  # pyright: ignore[reportPrivateUsage]


def title_of(mesh: ActorMeshLike, method: str) -> str:
    """Return what errors call a call of an endpoint."""
    return mesh._title_of(method)  # pyright: ignore[reportPrivateUsage]


def member_at(mesh: A, position: int) -> A:
    """Return the view of the member at a position."""
    return mesh._member(position)  # pyright: ignore[reportPrivateUsage]


def targets_of(mesh: ActorMeshLike) -> Targets:
    """Return where the members of a mesh are: one consistent snapshot for a call."""
    return mesh._members_at()  # pyright: ignore[reportPrivateUsage]


def packed_of(mesh: ActorMeshLike) -> bytes:
    """Return the ranks that a mesh addresses, packed for the wire."""
    return mesh._view_bytes  # pyright: ignore[reportPrivateUsage]


def check_alive(mesh: ActorMeshLike, method: str) -> None:
    """Raise if members of a mesh have died or it was stopped, once no verdict on it is open."""
    mesh._check_alive(method)  # pyright: ignore[reportPrivateUsage]


def check_procs(mesh: ProcMeshLike, what: str) -> None:
    """Raise if processes of a mesh have died or it was stopped."""
    mesh._check(what)  # pyright: ignore[reportPrivateUsage]


def living_procs(mesh: ProcMeshLike) -> list[str]:
    """Return the proc ids of the processes of a mesh not known to be dead."""
    return mesh._living()  # pyright: ignore[reportPrivateUsage]


def coming_procs(mesh: ProcMeshLike) -> dict[int, m.Dead]:
    """Return the dead processes of a mesh that may be replaced, by base rank."""
    return mesh._coming()  # pyright: ignore[reportPrivateUsage]


def hosts_of(mesh: ResizableHosts) -> tuple[str, ...]:
    """Return the hosts of a mesh of hosts, by base rank."""
    return mesh._hosts  # pyright: ignore[reportPrivateUsage]
